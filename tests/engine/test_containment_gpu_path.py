"""Work for one sequence that raises ends it alone in the GPU's runner too, with the host one step ahead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from invariants import check_scheduler
from ladders import Ladder
from scheduling import request

from phonograph.core.request import Request
from phonograph.graphs.modes import GraphMode
from phonograph.runner.cuda import token_scores
from phonograph.sampling import logprobs
from phonograph.sampling.sampler import Sampler

cuda_inputs = pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from table_engine import EOS, VOCAB, Engine, MakeEngine, engine_maker, free, ruled, wanted  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Keep the log quiet: the failures are intended."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def make() -> MakeEngine:
    return engine_maker()


@pytest.fixture(scope="module")
def engine(make: MakeEngine) -> Engine:
    return make()


class Broken(Ladder):
    """Raises in one method of its matchers, from the given token on."""

    fault, begin = "", 0

    def matcher(self) -> Broken:
        if self.fault == "matcher":
            raise ValueError("matcher")
        return Broken(self.length, self.vocab, self.end)

    def accept(self, token_id: int) -> None:
        if type(self).fault == "accept" and self.taken >= type(self).begin:
            raise ValueError("accept")
        super().accept(token_id)

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        if type(self).fault == "fill" and self.taken >= type(self).begin:
            raise ValueError("fill")
        super().fill(bitmask_RW, row)


def neighbours() -> list[Request]:
    return [
        ruled("a", 5, temperature=1.0),
        free("b", temperature=0.0),
        free("c", temperature=0.9, logprobs=1),
        ruled("d", 4, temperature=0.0, presence_penalty=1.5),
    ]


def check(engine: Engine, victim: Request, part: str, says: str) -> None:
    """Run the victim among its neighbours, with more requests than slots."""
    others, late = neighbours(), [free("e", temperature=0.0), ruled("f", 3, temperature=1.0)]
    engine.run(*others[:2], victim, *others[2:], *late)
    for one in (*others, *late):
        assert one.failure is None and one.output_token_ids == wanted(engine.model, one), one.request_id
    assert victim.failure is not None and victim.finished
    assert victim.failure.part == part and says in victim.failure.problem, victim.failure
    check_scheduler(engine.core.scheduler)
    assert engine.core.scheduler.stats.blocks_used == 0 and not engine.core.has_work
    after = free("g", temperature=0.0)
    engine.run(after)
    assert after.output_token_ids == wanted(engine.model, after)


def victim_of(**params: Any) -> Request:
    one = request("victim", [4, 50, 6], **({"temperature": 0.0, "seed": 4321, "max_tokens": 12} | params))
    return one


def is_victim(engine: Engine, slot: int) -> bool:
    live: dict[int, Any] = engine.core.runner._sequences._live
    return slot in live and live[slot].params.seed == 4321


@pytest.mark.parametrize(
    ("fault", "begin", "scored", "part"),
    [
        ("matcher", 0, False, "sampling parameters"),
        ("fill", 0, True, "grammar"),
        ("fill", 2, False, "grammar"),
        ("accept", 0, False, "grammar"),
        ("accept", 2, True, "grammar"),
    ],
)
def test_a_grammar(
    engine: Engine, fault: str, begin: int, scored: bool, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without log-probabilities of its tokens."""
    monkeypatch.setattr(Broken, "fault", fault)
    monkeypatch.setattr(Broken, "begin", begin)
    victim = victim_of(**({"logprobs": 0} if scored else {}))
    victim.grammar = Broken(8, VOCAB, EOS)
    check(engine, victim, part, fault)


@pytest.mark.parametrize("name", ["load", "_keep_tokens"])
def test_loading_a_slot(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Sampler if name == "load" else cuda_inputs.CudaInputs
    function = getattr(owner, name)

    def broken(self: Any, slot: int, *rest: Any) -> None:
        if is_victim(engine, slot):
            raise OverflowError(name)
        function(self, slot, *rest)

    monkeypatch.setattr(owner, name, broken)
    check(engine, victim_of(), "sampling parameters" if name == "load" else "token ids", f"OverflowError: {name}")


def test_log_probabilities_of_a_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are scored together are tried alone."""
    function = token_scores.score_tokens

    def broken(logits: Any, tokens: torch.Tensor, top: int, **settings: Any) -> Any:
        if top == 3:
            raise ValueError("scores")
        return function(logits, tokens, top, **settings)

    monkeypatch.setattr(token_scores, "score_tokens", broken)
    check(engine, victim_of(logprobs=3), "log-probabilities", "scores")


def test_log_probabilities_of_a_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    function = logprobs.prompt_logprobs
    monkeypatch.setattr(engine.model, "prompt_logits", lambda hidden: hidden, raising=False)
    seen: list[int] = []

    def broken(hidden: Any, logits_fn: Any, targets: list[int], top: int, listed: Any, **settings: Any) -> Any:
        seen.append(top)
        if top == 3:
            raise ValueError("prompt")
        return function(hidden, logits_fn, targets, top, listed, **settings)

    monkeypatch.setattr(logprobs, "prompt_logprobs", broken)
    check(engine, victim_of(prompt_logprobs=3), "log-probabilities of the prompt", "prompt")
    assert seen == [3]


@pytest.mark.parametrize(
    ("token_id", "place", "with_grammar"), [(VOCAB, 0, False), (-2, 4, False), (2**31 - 1, 3, True)]
)
def test_a_result_that_is_no_token(
    engine: Engine, token_id: int, place: int, with_grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the device would return it: nothing but the bounds of the vocabulary tells."""
    ring, victim = engine.ring, victim_of()
    if with_grammar:
        victim.grammar = Ladder(8, VOCAB, EOS)
    send, sent = ring.send, [0]
    scheduled = engine.core.scheduler._in_flight

    def spoiled(tokens: torch.Tensor) -> int:
        batch, requests = scheduled[-1]
        for row, one in enumerate(requests):
            if one is victim and batch.samples[row]:
                if sent[0] == place:
                    tokens = tokens.clone()
                    tokens[row] = token_id
                sent[0] += 1
        return send(tokens)

    monkeypatch.setattr(ring, "send", spoiled)
    check(engine, victim, "sampling", f"returned {token_id}")
    assert len(victim.output_token_ids) == place


def test_a_preempted_output_whose_grammar_does_not_take_it_again(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(GraphMode.NONE, num_blocks=8, enable_prefix_caching=False)
    requests = [ruled(name, 12, temperature=1.0) for name in "abc"]
    requests[-1].grammar = Broken(12, VOCAB, EOS)
    for one in requests:
        engine.core.scheduler.add(one)
    while not engine.core.scheduler.stats.num_preemptions:
        engine.core.step()
    monkeypatch.setattr(Broken, "fault", "accept")
    while engine.core.has_work:
        engine.core.step()
        check_scheduler(engine.core.scheduler)
    failure = requests[-1].failure
    assert failure is not None and (failure.part, failure.problem) == ("sampling parameters", "ValueError: accept")
    assert [one.output_token_ids for one in requests[:2]] == [wanted(engine.model, one) for one in requests[:2]]
    assert engine.core.scheduler.stats.blocks_used == 0


def test_a_grammar_cannot_hurt_the_request_that_gets_its_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token is still owed to its matcher when the slot is loaded again."""
    victims = [victim_of(max_tokens=1) for _ in range(8)]
    monkeypatch.setattr(Broken, "fault", "accept")
    for place, one in enumerate(victims):
        one.request_id, one.grammar = f"v{place}", Broken(8, VOCAB, EOS)
    others = [ruled(name, 3, temperature=0.0) for name in "abcd"]
    engine.run(*(one for pair in zip(victims[::2], others, strict=True) for one in pair), *victims[1::2])
    assert [one.output_token_ids for one in others] == [wanted(engine.model, one) for one in others]
    assert all(one.failure is None and len(one.output_token_ids) == 1 for one in victims)
