"""Rows with a grammar in the runner on a GPU's parts, around a model of one table, on a GPU or in the interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from ladders import Ladder

from phonograph.core.request import Request
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.modes import GraphMode
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.grammar_masks import GrammarMasks

pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from table_engine import EOS, SLOTS, VOCAB, MakeEngine, check_outputs, engine_maker, free, row_of, ruled, wanted

from phonograph.runner.cuda.masked_sampling import MaskedSampling, MaskedSequence


@pytest.fixture
def make() -> MakeEngine:
    return engine_maker()


SETTINGS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7})


def mixture() -> list[Request]:
    """More than there are slots, with and without a grammar, sampled by the graph and behind it."""
    requests = [ruled(name, 3 + index, **SETTINGS[index % 3]) for index, name in enumerate("abdef")]
    requests += [free(name, **SETTINGS[index % 3]) for index, name in enumerate("ghi")]
    return [
        *requests,
        ruled("j", 3, temperature=1.2, top_k=9, top_p=0.9),
        ruled("k", 6, temperature=1.0, logprobs=2),
        ruled("l", 5, temperature=0.0, presence_penalty=1.5),
        free("m", temperature=0.9, logprobs=1),
        ruled("o", 6, temperature=1.0, logprob_token_ids=[7, 50, EOS]),
        free("p", temperature=0.9, logprob_token_ids=[4]),
        ruled("n", 30, temperature=1.0, max_tokens=5),
    ]


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.NONE])
def test_outputs_are_those_of_the_host(make: MakeEngine, mode: GraphMode) -> None:
    engine, requests = make(mode), mixture()
    engine.run(*requests)
    check_outputs(engine, requests)
    for one in requests:
        ends = "length" if one.request_id == "n" or one.grammar is None else "stop"
        assert one.finish_reason == ends or one.output_token_ids[-1] == EOS, one.request_id
    masked = [record for record in engine.records if record.cause.endswith("; masked sampling")]
    assert masked and len(masked) < len(engine.records), "both kinds of steps"
    where = "eagerly" if mode is GraphMode.NONE else "in a graph of"
    assert all(f"with a grammar {where}" in record.reason for record in masked)


def test_requests_that_come_and_go_leave_nothing_to_others(make: MakeEngine) -> None:
    """Aborts with tokens in flight; their slots go to requests with other grammars in the very next step."""
    engine, requests = make(), mixture()
    engine.run(*requests[:5], steps=4)
    for late, name in enumerate("bde"):
        assert engine.core.scheduler.abort(name)
        engine.core.scheduler.add(requests[5 + late])
        engine.core.step()
    engine.run(*requests[8:])
    for one in requests:
        whole = wanted(engine.model, one)
        if one.request_id in "bde":
            assert one.finish_reason == "abort" and one.output_token_ids == whole[: len(one.output_token_ids)]
        else:
            assert one.output_token_ids == whole, one.request_id


def test_a_preempted_output_goes_on_where_it_was(make: MakeEngine) -> None:
    engine = make(num_blocks=8, enable_prefix_caching=False)
    requests = [ruled(name, 12, temperature=1.0) for name in "abc"]
    engine.run(*requests)
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert [one.output_token_ids for one in requests] == [wanted(engine.model, one) for one in requests]


def test_rows_of_one_bad_model_end_alone(make: MakeEngine) -> None:
    engine = make()
    bad, good = ruled("a", 9), ruled("b", 9)
    engine.model.table[row_of(wanted(engine.model, bad)[2], len(bad.prompt_token_ids) + 2)] = float("nan")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    engine.run(bad, good)
    expected = wanted(engine.model, good)
    assert bad.finish_reason == "abort" and len(bad.output_token_ids) == 3
    assert good.output_token_ids == expected and good.finish_reason == "stop"


def test_graphs_are_few_and_chosen_by_rows(make: MakeEngine) -> None:
    engine, without = make(), make(GraphMode.NONE)
    captures = engine.core.runner.dispatcher.captures.largest_first()
    assert engine.num_graphs == len(captures) + 4 and without.num_graphs == 0
    engine.run(*(ruled(name, 4, temperature=0.0) for name in "abc"), free("z", temperature=0.0, max_tokens=12))
    sizes = Counter(record.reason.rpartition(" ")[2] for record in engine.records if "masked" in record.reason)
    assert set(sizes) == {"4"}
    alone = [ruled("d", 4, temperature=0.0)]
    engine.run(*alone)
    assert engine.records[-1].reason.endswith("masked sampling of 1 row with a grammar in a graph of 1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the stand-ins of a GPU")
def test_the_device_has_its_step_before_the_host_waits_and_other_steps_do_not_wait(make: MakeEngine) -> None:
    engine = make()
    engine.run(free("a", temperature=0.0, max_tokens=4))
    # Only results are read, each when the next step has been sent.
    assert engine.log == ["step", "send", *["step", "send", "read 1"] * 3, "read 0"]
    engine.log.clear()
    engine.run(ruled("b", 3, temperature=0.0, max_tokens=4))
    one = ["step", "read 0", "masks", "send", "read 1"]
    assert engine.log == ["step", "masks", "send", *one, *one, *one, "read 0"]
    engine.log.clear()
    # A request that has left its slot is not waited for, though its token is still on its way.
    engine.run(ruled("c", 3, temperature=0.0, max_tokens=1), free("a", temperature=0.0, max_tokens=2))
    assert engine.log == ["step", "masks", "send", "step", "send", "read 1", "read 0"]


def test_rows_of_a_smaller_step_are_listed_without_those_of_a_larger() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masks = GrammarMasks(max_num_seqs=SLOTS, vocab_size=VOCAB, device=device)
    for slot in range(SLOTS):
        masks.load(slot, Ladder(9, VOCAB, EOS), [8] if slot == 0 else [])
    seen: list[tuple[list[int], list[list[int]]]] = []

    def sample_masked(rows_G: torch.Tensor, bitmask_GW: torch.Tensor, requests_G: torch.Tensor) -> None:
        assert rows_G.tolist() == requests_G.tolist()
        seen.append((rows_G.tolist(), bitmask_GW.tolist()))

    def no_results() -> Any:
        raise AssertionError("no sequence has drafts")

    masked = MaskedSampling(sample_masked, masks=masks, max_rows=SLOTS, vocab_size=VOCAB, device=device)
    decision = Decision(mode=GraphMode.NONE, key=None, num_tokens=5, cause="a test", reason="a test of 5 tokens")
    told = [
        masked.sample(
            [MaskedSequence(row, slot, row, 1) for row, slot in zip(rows, slots, strict=True)],
            no_results,
            decision,
            SlotFailures(),
        ).reason.rpartition("; ")[2]
        for rows, slots in (([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]), ([4, 1, 3], [0, 1, 2]), ([2], [3]))
    ]
    assert [rows for rows, _ in seen] == [[0, 1, 2, 3, 4], [4, 1, 3, -1], [2]] and masked.sizes == (1, 2, 4, 5)
    moved, begun = seen[0][1][4], seen[0][1][0]
    assert moved != begun and seen[0][1] == [begun] * 4 + [moved]
    assert seen[1][1][:3] == [moved, begun, begun] and seen[2][1] == [begun]
    ends = ["5 rows with a grammar eagerly", "3 rows with a grammar eagerly", "1 row with a grammar eagerly"]
    assert told == [f"masked sampling of {end}" for end in ends]


def test_one_grammar_shared_by_samples(make: MakeEngine) -> None:
    engine, grammar = make(), Ladder(8, VOCAB, EOS)
    requests = [ruled("a", 0, temperature=1.0, seed=seed) for seed in range(4)]
    for index, one in enumerate(requests):
        one.request_id, one.grammar = f"a{index}", grammar
    engine.run(*requests)
    assert [one.output_token_ids for one in requests] == [wanted(engine.model, one) for one in requests]
    assert len({tuple(one.output_token_ids) for one in requests}) == 4 and grammar.taken == 0
