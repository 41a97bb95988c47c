"""Speculation on a GPU's parts: drafts are made, verified and accepted without the host, and change no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, product
from typing import Any

import pytest
import torch
from scheduling import request

from phonograph.config.speculative_config import SpeculativeConfig
from phonograph.core.request import Request
from phonograph.graphs.modes import GraphMode
from phonograph.sampling import grammar_masks

pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from table_engine import EOS, VOCAB, MakeEngine, check_outputs, engine_maker, free, row_of, ruled, wanted

K = 3
NGRAM = SpeculativeConfig("ngram", K, 2, 1, adaptive_depth=False)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 0.4, "min_p": 0.2, "top_k": 40},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {3: 2.0, 50: -1.0, 99: 4.0}},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "top_k": 30, "logprobs": 2},
]


def likely(right: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Return a proposer of the most likely tokens, which are other ones at positions for which `right` is False."""

    def propose(inputs: Any, table: torch.Tensor) -> None:
        state, best = inputs.state, table.argmax(-1).int()
        last, position = state.last_token.clone(), state.num_computed.clone()
        for index in range(K):
            last = best[row_of(last, position)]
            position = position + 1
            last = torch.where(right(position), last, (last + 1) % VOCAB)
            state.drafts[:, index] = last

    return propose


PROPOSERS: dict[str, Any] = {
    "lookup": None,
    "right": likely(lambda position: position >= 0),
    "wrong": likely(lambda position: position < 0),
    "some": likely(lambda position: position % 5 > 1),
}


@pytest.fixture(scope="module")
def make() -> MakeEngine:
    return engine_maker()


def requests(count: int, kinds: Sequence[dict[str, Any]] = KINDS, spread: int = 17, **more: Any) -> list[Request]:
    """Make requests of 6 to 5 + `spread` tokens."""
    made: list[Request] = []
    for index in range(count):
        prompt, params = [7 * index % 90 + 1] * (1 + 5 * index % 23), kinds[index % len(kinds)]
        made.append(request(f"{index}", prompt, seed=index, **({"max_tokens": 6 + 4 * index % spread} | params | more)))
    return made


@pytest.mark.parametrize(
    ("proposer", "mode", "num_blocks"),
    [
        ("lookup", GraphMode.FULL, 64),
        ("lookup", GraphMode.NONE, 12),
        ("wrong", GraphMode.NONE, 64),
        ("some", GraphMode.FULL, 12),
    ],
)
def test_tokens_are_those_of_each_request_alone(
    proposer: str, mode: GraphMode, num_blocks: int, make: MakeEngine
) -> None:
    """Beside prefills, with preemption, and in slots that are used again."""
    engine = make(mode, NGRAM, PROPOSERS[proposer], num_blocks=num_blocks)
    several = requests(10, spread=9)
    engine.run(*several)
    check_outputs(engine, several)
    counts = engine.core.scheduler.stats.drafts
    assert bool(engine.core.scheduler.stats.num_preemptions) == (num_blocks == 12)
    if proposer == "wrong":
        assert counts.verified > 0
    elif proposer != "lookup":
        assert 0 < counts.accepted < counts.verified <= counts.decodes * K
    labels = {*engine.core.runner.counts}
    assert labels == {"eager"} if mode is GraphMode.NONE else "full decode" in labels


@pytest.mark.parametrize("proposer", ["right", "wrong"])
def test_a_budget_may_choose_any_depth(proposer: str, make: MakeEngine) -> None:
    engine = make(GraphMode.FULL, NGRAM._replace(adaptive_depth=True), PROPOSERS[proposer])
    several = requests(9, KINDS[:2])
    engine.run(*several)
    check_outputs(engine, several)
    counts = engine.core.scheduler.stats.drafts
    assert {"plain step, to time it"} < {reason for reason, _ in counts.choices}
    assert counts.accepted > 0 or proposer == "wrong"


@pytest.mark.parametrize(
    ("proposer", "cost", "mode"),
    [("right", 1.2, GraphMode.FULL), ("wrong", 3.0, GraphMode.FULL), ("some", 9.0, GraphMode.NONE)],
)
def test_an_engine_whose_draft_model_gains_nothing_rests(
    proposer: str, cost: float, mode: GraphMode, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with passes takes `cost` times as long. Requests that start while the engine rests have no drafts."""
    passes = NGRAM._replace(model="a draft model", adaptive_depth=True)
    engine = make(mode, passes, PROPOSERS[proposer], in_steps=True)
    drafts: Any = engine.core.scheduler.drafts
    learn = drafts.budget.learn
    for number in (1, 4):
        for verified in (0, K * number):
            drafts.budget.costs.learn(number, verified, cost if verified else 1.0)
    made: list[bool] = []

    def timed(batch: Any, output: Any, seconds: float) -> None:
        made.append(batch.makes_drafts)
        assert batch.makes_drafts or batch.num_logits == batch.num_reqs, "drafts that no step made"
        learn(batch, output, cost if batch.makes_drafts else 1.0)

    monkeypatch.setattr(drafts.budget, "learn", timed)
    several = requests(16, [*KINDS[:2], *KINDS[:2], {"temperature": 1.0, "speculate": False}])
    engine.run(*several)
    check_outputs(engine, several)
    counts = engine.core.scheduler.stats.drafts
    assert counts.verified > 0 and (counts.accepted > 0.1 * counts.verified) == (proposer != "wrong")
    # At least the first and the last requests, which the host samples, make none.
    share = sum(made) / len(made)
    assert share > 0.7 if proposer == "right" else share < 0.5
    assert ("the engine rests" in dict(counts.choices)) == (proposer != "right")


def test_right_drafts_save_steps(make: MakeEngine) -> None:
    plain, drafting = make(), make(GraphMode.FULL, NGRAM, PROPOSERS["right"])
    for engine in (plain, drafting):
        engine.run(*(request(f"{index}", [index + 1], max_tokens=41, temperature=0.0) for index in range(3)))
    counts = drafting.core.scheduler.stats.drafts
    assert counts.verified - K <= counts.accepted > 0, "the most likely tokens are those of greedy decoding"
    assert len(drafting.records) <= len(plain.records) / 2


def test_batch_sizes_bound_the_depth(make: MakeEngine) -> None:
    engine = make(GraphMode.FULL, NGRAM._replace(per_batch_size=((2, 2, 1), (3, 9, 0))), PROPOSERS["right"])
    several = [request(f"{index}", [index + 1], max_tokens=9 + 8 * index, temperature=0.0) for index in range(3)]
    engine.run(*several)
    check_outputs(engine, several)
    depths: dict[int, int] = {}
    for record in engine.records:
        drafts = record.num_decode_tokens - record.num_decodes
        depths[record.num_decodes] = max(drafts, depths.get(record.num_decodes, 0))
    assert depths == {0: 0, 1: K, 2: 2, 3: 0}
    counts = engine.core.scheduler.stats.drafts
    assert 0 < counts.accepted == sum(counts.accepted_by_position) <= counts.verified
    assert counts.accepted_by_position[0] > counts.accepted_by_position[2] > 0


def test_a_history_that_repeats_is_looked_up(make: MakeEngine) -> None:
    """The logits repeat with period 3, so that all tokens behind the second period are drafted."""
    engine = make(GraphMode.FULL, NGRAM)
    engine.model.table.fill_(-9.0)
    for token, follower in ((5, 6), (6, 8), (8, 5)):
        for position in range(100):
            engine.model.table[row_of(token, position), follower] = 0.0
    one = request("a", [5, 6, 8, 5], max_tokens=40, temperature=0.0)
    engine.run(one)
    counts = engine.core.scheduler.stats.drafts
    assert len(one.output_token_ids) == 40 and counts.accepted > 0
    assert one.output_token_ids == wanted(engine.model, one)


@pytest.mark.parametrize("end", [1, 2, 4, 5, 7])
def test_a_run_is_cut_where_its_request_ends(end: int, make: MakeEngine) -> None:
    """By max_tokens, by the context, and by an end token in the middle of a run."""
    engine = make(GraphMode.FULL, NGRAM, PROPOSERS["right"], max_model_len=12)
    several = [
        request("a", [3], max_tokens=end, temperature=0.0),
        request("b", [4] * (12 - end), temperature=0.0),
        request("c", [9, 9], max_tokens=10, temperature=0.0),
    ]
    alone = wanted(engine.model, several[2])
    several[2].end_token_ids = frozenset({alone[min(end, 8)]})
    engine.run(*several)
    found = [one.output_token_ids for one in several]
    assert found[0] == wanted(engine.model, several[0]) and len(found[0]) == end
    assert found[1] == wanted(engine.model, several[1])[:end] and len(found[1]) == end
    assert found[2] == alone[: alone.index(alone[min(end, 8)]) + 1] or EOS in alone


def test_rows_that_are_masked_behind_a_step_run_beside_drafts(make: MakeEngine) -> None:
    engine = make(GraphMode.FULL, NGRAM, PROPOSERS["some"])
    several = [ruled("a", 9), free("b", temperature=0.4), ruled("c", 4, temperature=1.0), free("d", logprobs=0)]
    several += [free("e", temperature=0.0, max_tokens=20), ruled("f", 7, presence_penalty=1.0, logprobs=1)]
    engine.run(*several)
    check_outputs(engine, several)
    assert engine.core.scheduler.stats.drafts.accepted > 0


class Known:
    """Drafts what follows in known outputs, or another token at some positions."""

    def __init__(self, right: Callable[[int], bool]) -> None:
        self.outputs: list[list[int]] = []
        self._right = right

    def __call__(self, inputs: Any, table: torch.Tensor) -> None:
        for slot, length in enumerate(inputs.state.num_computed.tolist()):
            tokens = inputs.history[slot, : length + 1].tolist()
            for whole in self.outputs:
                drafts = whole[length + 1 : length + 1 + K]
                if whole[: length + 1] == tokens and drafts:
                    wrong = [(token + 1) % VOCAB for token in drafts]
                    picked = [
                        a if self._right(length + place) else b
                        for place, (a, b) in enumerate(zip(drafts, wrong, strict=True))
                    ]
                    inputs.state.drafts[slot, : len(drafts)] = torch.tensor(picked, dtype=torch.int32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="drafts of the host's making cannot be captured")
@pytest.mark.parametrize("in_steps", [False, True], ids=["lookup", "draft model"])
@pytest.mark.parametrize(("share", "mode"), [(1, GraphMode.FULL), (2, GraphMode.NONE), (3, GraphMode.FULL)])
def test_drafts_of_rows_with_a_grammar(
    share: int, mode: GraphMode, in_steps: bool, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks for each place behind drafts, some of which the grammar forbids, beside prefills and with preemption."""
    known = Known(lambda position: share == 1 or position % share > 0)
    speculation = NGRAM._replace(model="a draft model") if in_steps else NGRAM
    engine = make(mode, speculation, known, in_steps=in_steps, num_blocks=10, enable_prefix_caching=False)
    several = [
        ruled("a", 9, temperature=1.0),
        ruled("b", 12, temperature=0.0, logprobs=2),
        free("c", temperature=0.9),
        ruled("d", 7, temperature=0.8, presence_penalty=1.0, repetition_penalty=1.3),
        ruled("e", 30, temperature=1.0, max_tokens=11),
        ruled("f", 5, temperature=1.0, speculate=False),
        free("g", frequency_penalty=1.0, max_tokens=14),
    ]
    known.outputs = [[*one.prompt_token_ids, *wanted(engine.model, one)] for one in several]
    scheduler, runs = engine.core.scheduler, list[int]()
    update = scheduler.update

    def noted(batch: Any, output: Any) -> Any:
        requests = compress(scheduler._in_flight[0][1], batch.samples)
        lengths = dict(zip(output.slots, map(len, output.token_ids), strict=True))
        assert {slot: len(scores) for slot, scores in output.logprobs.items()}.items() <= lengths.items()
        runs.extend(len(run) for one, run in zip(requests, output.token_ids, strict=True) if one.grammar is not None)
        return update(batch, output)

    monkeypatch.setattr(scheduler, "update", noted)
    engine.run(*several)
    check_outputs(engine, several)
    counts = engine.core.scheduler.stats.drafts
    assert 10 < counts.accepted <= counts.verified and (share == 1) == (counts.accepted == counts.verified)
    assert engine.core.scheduler.stats.num_preemptions
    assert max(runs) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the stand-ins of a GPU")
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.NONE])
def test_steps_are_read_before_their_passes_if_nothing_is_computed_behind_these(
    mode: GraphMode, make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked rows and log-probabilities are computed behind the passes, and some steps have no passes.

    The stand-in for the ring compares what is read early with the copy behind the step.
    """
    engine = make(mode, NGRAM._replace(model="a draft model"), PROPOSERS["some"], in_steps=True)
    scheduler, seen = engine.core.scheduler, set[tuple[bool, bool, bool]]()
    update = scheduler.update

    def noted(batch: Any, output: Any) -> Any:
        several = scheduler._in_flight[0][1]
        masked = any(one.grammar is not None for one in compress(several, batch.samples))
        scored = any(one.params.logprobs is not None for one in several)
        early = batch.makes_drafts and not masked and not scored
        assert engine.log[-1].split()[0] == ("early" if early else "read")
        seen.add((batch.makes_drafts, masked, scored))
        return update(batch, output)

    monkeypatch.setattr(scheduler, "update", noted)
    several = [ruled("a", 9), free("b"), ruled("c", 4, temperature=1.0), free("d", logprobs=0)]
    several += [free("e", max_tokens=30), free("f", logprobs=2), *requests(2, speculate=False)]
    for some in (several[:4], several[4:6], several[6:]):
        engine.run(*some)
    check_outputs(engine, several)
    assert seen == {(True, *rest) for rest in product((False, True), repeat=2)} | {(False, False, False)}


def test_a_grammar_that_does_not_keep_up_has_no_drafts(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "_SLOW_SECONDS", 0.0)
    engine = make(GraphMode.FULL, NGRAM, PROPOSERS["right"])
    slow = ruled("a", 30, temperature=1.0)
    engine.run(slow)
    check_outputs(engine, [slow])
    drafted = [record.num_decode_tokens > record.num_decodes for record in engine.records]
    assert 4 <= sum(drafted) <= 6 and not any(drafted[10:]) and len(drafted) > 20
