"""Suffix decoding on a GPU's parts: the host makes drafts, sends them with the step, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scheduling import request

from phonograph.config.speculative_config import read_speculative_config
from phonograph.core.batch import DraftCounts
from phonograph.core.request import Request
from phonograph.graphs.modes import GraphMode
from phonograph.sampling import grammar_masks

pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from table_engine import MakeEngine, engine_maker, free, ruled, wanted

SUFFIX = read_speculative_config({"method": "suffix", "num_speculative_tokens": 3, "adaptive_depth": False})


@pytest.fixture(scope="module")
def make() -> MakeEngine:
    return engine_maker()


def requests(count: int, **more: Any) -> list[Request]:
    kinds = ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "logprobs": 0})
    return [
        request(f"{index}", [7 * index % 90 + 1] * (1 + 5 * index % 23), seed=index, **(kinds[index % 3] | more))
        for index in range(count)
    ]


@pytest.mark.parametrize(("mode", "num_blocks", "adaptive"), [(GraphMode.FULL, 10, False), (GraphMode.NONE, 64, True)])
def test_on_the_parts_of_a_gpu(mode: GraphMode, num_blocks: int, adaptive: bool, make: MakeEngine) -> None:
    """Beside prefills and rows that the host samples, with preemption; the second time outputs are known."""
    engine = make(mode, SUFFIX._replace(adaptive_depth=adaptive), num_blocks=num_blocks)
    before = DraftCounts()
    for number in range(2):
        several = requests(6, max_tokens=16)
        for one in several:
            one.request_id += f" {number}"
        engine.run(*several)
        assert [one.output_token_ids for one in several] == [wanted(engine.model, one) for one in several]
        counts = engine.core.scheduler.stats.drafts
        gained, verified = counts.accepted - before.accepted, counts.verified - before.verified
        assert number == 0 or gained > 0.6 * verified > 0
        before = counts
    assert bool(engine.core.scheduler.stats.num_preemptions) == (num_blocks == 10)
    assert "full decode" in engine.core.runner.counts or mode is GraphMode.NONE


def test_steps_overlap_while_no_request_may_have_drafts(make: MakeEngine) -> None:
    """Others come and go meanwhile, in slots that are used again, and their drafts are of their own tokens."""
    engine = make(GraphMode.FULL, SUFFIX._replace(adaptive_depth=True))
    long = [free(name, speculate=False, max_tokens=60) for name in "xyz"]

    def reads_since(seen: int) -> set[str]:
        return {line for line in engine.log[seen:] if line.startswith("read")}

    engine.run(*long, steps=8)
    assert torch.cuda.is_available() or reads_since(0) == {"read 1"}
    for number in range(2):
        seen, several = len(engine.log), requests(3, max_tokens=12 - number)
        for one in several:
            one.request_id += f" {number}"
            engine.core.scheduler.add(one)
        while not all(one.finished for one in several):
            engine.core.step()
        assert [one.output_token_ids for one in several] == [wanted(engine.model, one) for one in several]
        assert torch.cuda.is_available() or "read 0" in reads_since(seen)
    seen = len(engine.log)
    engine.run()
    assert torch.cuda.is_available() or "read 1" in reads_since(seen)
    assert [one.output_token_ids for one in long] == [wanted(engine.model, one) for one in long]
    assert engine.core.scheduler.stats.drafts.accepted > 0


def test_rows_that_are_masked_behind_a_step(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a grammar have drafts too. The second time outputs are known, the third time masks take long."""
    engine, found = make(GraphMode.FULL, SUFFIX), list[tuple[int, int]]()
    for number in range(3):
        if number == 2:
            monkeypatch.setattr(grammar_masks, "_SLOW_SECONDS", 0.0)
        before, verified = len(engine.records), engine.core.scheduler.stats.drafts.verified
        for several in (
            [ruled("a", 40, temperature=1.0), ruled("c", 30, temperature=1.0)],
            [ruled("a", 7), free("b", temperature=0.0), ruled("c", 4, temperature=1.0), free("d", logprobs=0)],
        ):
            for one in several:
                one.request_id += f" {number}"
            engine.run(*several)
            assert [one.output_token_ids for one in several] == [wanted(engine.model, one) for one in several]
        found.append((len(engine.records) - before, engine.core.scheduler.stats.drafts.verified - verified))
    (steps, _), (fewer, most), (more, few) = found
    assert fewer < 0.6 * steps and more > 1.3 * fewer and few < 0.7 * most
