"""A session whose steps bring several tokens of a request: stop strings in the middle, and the facts of the prompt."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from invariants import check_scheduler
from scheduling import FixedDepths, make_scheduler

from phonograph.core.batch import ScheduledBatch, StepOutput, TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.core import EngineCore
from phonograph.engine.outputs import CompletionOutput
from phonograph.engine.session import Session
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.modes import GraphMode
from phonograph.runner.steps import CompletedStep
from phonograph.structured.compiler import GrammarCompiler
from phonograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(MODEL_DIRECTORY)
IDS = TOKENIZER.encode("Tom has 12 apples and 7 pears, and he eats", add_special_tokens=False)
DECISION = Decision(mode=GraphMode.NONE, key=None, num_tokens=16, cause="a test", reason="a test")


def positions(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs([token_id], [-0.5], [1]) for token_id in token_ids]


class ScriptedRunner:
    """Accepts all drafts: each decode gets the next tokens of the script."""

    lookahead = 0

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_given: dict[int, int] = {}

    def submit(self, batch: ScheduledBatch) -> CompletedStep:
        for new in batch.new:
            self.num_given[new.slot] = 0
        output = StepOutput(slots=batch.slots)
        for row, slot in enumerate(batch.slots):
            start = self.num_given[slot]
            end = start + (batch.query_lens[row] if row < batch.num_decodes else 1)
            self.num_given[slot] = end
            output.token_ids.append(IDS[start:end])
            output.logprobs[slot] = positions(IDS[start:end])
        return CompletedStep(output, DECISION)


@pytest.fixture
def session() -> Session:
    core = EngineCore(make_scheduler(drafts=FixedDepths(3), max_num_batched_tokens=32), ScriptedRunner())
    model: Any = SimpleNamespace(vocab_size=2048, eos_token_ids=(0,), pooler=None, encoder=None)
    return Session(core, model, TOKENIZER, 0, GrammarCompiler(lambda: None, (0,)))


def run(session: Session, **params: Any) -> CompletionOutput:
    output = session.add([5, 6, 7], SamplingParams(logprobs=0, temperature=0, **params))
    while session.has_unfinished:
        assert session.step() == [output]
        check_scheduler(session.core.scheduler)
    (completion,) = output.outputs
    assert session.core.scheduler.stats.blocks_used == 0
    return completion


@pytest.mark.parametrize("num_kept", range(1, 9))
@pytest.mark.parametrize("max_tokens", [9, 12])
def test_tokens_after_a_stop_string_are_dropped(session: Session, num_kept: int, max_tokens: int) -> None:
    """The first step brings one token, the others four each; with nine, the scheduler ends the request with them."""
    text = TOKENIZER.decode(IDS[:num_kept])
    stop = text[-3:]
    assert text.find(stop) == len(text) - len(stop)
    completion = run(session, max_tokens=max_tokens, stop=[stop])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text.removesuffix(stop)
    assert completion.token_ids == IDS[:num_kept] and completion.positions == positions(IDS[:num_kept])


def test_an_output_without_a_stop_string_has_all_tokens(session: Session) -> None:
    completion = run(session, max_tokens=9, stop=["zzz"])
    assert completion.token_ids == IDS[:9] and completion.text == TOKENIZER.decode(IDS[:9])
    assert completion.finish_reason == "length" and completion.positions == positions(IDS[:9])


def test_the_prompt_is_reported_with_the_first_tokens_however_many(session: Session) -> None:
    output = session.add([5, 6, 7], SamplingParams(max_tokens=9, prompt_logprobs=0))
    (sample,) = session._samples.values()
    sample.request.prompt_logprobs += positions([6, 7])
    sample.request.num_cached_tokens = 2
    sample.request.output_token_ids += IDS[:2]
    session._update(sample)
    assert output.num_cached_tokens == 2 and list(output.prompt_logprobs.positions) == [None, *positions([6, 7])]
    known = output.prompt_logprobs
    sample.request.output_token_ids += IDS[2:3]
    session._update(sample)
    assert output.prompt_logprobs is known, "once"
