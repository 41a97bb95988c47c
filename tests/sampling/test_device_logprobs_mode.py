"""Values of `logprobs_mode` against float64, by the parts of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_scores import END, KINDS, VOCAB, check_whole
from ladders import Ladder
from scheduling import request

from phonograph.config.speculative_config import SpeculativeConfig
from phonograph.core.request import Request
from phonograph.sampling.logprobs import ScoreKind

pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from table_engine import MakeEngine, engine_maker, row_of


def requests(count: int) -> list[Request]:
    """Make requests of all kinds, every third with a grammar, more than there are slots."""
    made: list[Request] = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        prompt = [7 * index % 90 + 1] * (1 + 5 * index % 11)
        made.append(request(f"{index}", prompt, seed=index, **({"max_tokens": 5 + 3 * index % 8} | kind)))
        if index % 3 == 1 and not made[-1].params.min_tokens:
            made[-1].grammar = Ladder(30, VOCAB, END)
    return made


@pytest.fixture(scope="module")
def make() -> MakeEngine:
    return engine_maker()


@pytest.mark.parametrize(
    ("mode", "drafts"),
    [
        ("processed_logprobs", "none"),
        ("processed_logprobs", "some"),
        ("processed_logits", "lookup"),
        ("raw_logits", "some"),
        ("raw_logprobs", "none"),
    ],
)
def test_the_parts_of_a_gpu(mode: str, drafts: str, make: MakeEngine) -> None:
    """One step ahead, with slots that are used again; drafts are accepted and rejected."""

    def propose(inputs: Any, table: torch.Tensor) -> None:
        last, position = inputs.state.last_token.clone(), inputs.state.num_computed.clone()
        for index in range(3):
            last, position = table.argmax(-1).int()[row_of(last, position)], position + 1
            last = torch.where(position % 5 > 1, last, (last + 1) % VOCAB)
            inputs.state.drafts[:, index] = last

    settings: dict[str, Any] = {}
    if drafts != "none":
        settings["speculation"] = SpeculativeConfig("ngram", 3, 2, 1, adaptive_depth=False)
    if drafts == "some":
        settings["propose"] = propose
    engine = make(scores=ScoreKind.named(mode), **settings)
    ones = requests(2 * len(KINDS))
    engine.run(*ones)
    if drafts == "some":
        counts = engine.core.scheduler.stats.drafts
        assert 0 < counts.accepted < counts.verified
    table = engine.model.table.cpu().numpy()
    for one in ones:
        assert one.failure is None
        tokens = [*one.prompt_token_ids, *one.output_token_ids]
        start = len(one.prompt_token_ids) - 1
        rows = [table[row_of(token, start + place)] for place, token in enumerate(tokens[start:-1])]
        grammar: Any = one.grammar
        check_whole(mode, one.params, one.prompt_token_ids, one.output_token_ids, one.logprobs, rows, grammar)
