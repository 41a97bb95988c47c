"""The benchmark of attention kernels: what it runs is the case it names, and a wrong kernel gets no time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.attention import (
    CASES,
    Case,
    bench_attention,
    default_cases,
    graph_key,
    make_inputs,
    parse_case,
)
from phonograph.attention.attention_spec import KVLayout
from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.models.spec import read_model_spec


def _quiet(*_: object) -> None:
    pass


def _plan(**settings: Any) -> EnginePlan:
    return make_plan(EngineConfig(model="demo", **settings), read_model_spec("demo"), known_device("cpu"))


def test_every_kind_of_batch() -> None:
    progress: list[tuple[str, int, int]] = []
    names = ["1@40", "3*1@33+2*5@70", "20@20", "4*3@50"]
    rows = list(bench_attention(_plan(block_size=32), names, lambda *one: progress.append(one)))
    assert [row.case for row in rows] == names
    assert progress == [("attention cases", done, 4) for done in range(4)]
    for row in rows:
        assert row.facts["provider"] == "reference" and row.facts["page"] == 32
        assert row.facts["us"] > 0 and row.facts["err"] < 1e-5


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_kernel_that_computes_something_else_has_no_time(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    forward = ReferenceBackend.forward

    def wrong(self: ReferenceBackend, query: Any, call: Any, out: torch.Tensor) -> None:
        forward(self, query, call, out)
        out[-1] *= factor

    monkeypatch.setattr(ReferenceBackend, "forward", wrong)
    first, second = bench_attention(_plan(), ["1@40", "5@9"], _quiet)
    for row in (first, second):
        assert "us" not in row.facts and "computes something else" in row.facts["error"]


def test_a_case_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ReferenceBackend.schedule

    def failing(self: ReferenceBackend, metadata: Any) -> None:
        if len(metadata.common.seq_lens) == 2:
            raise RuntimeError("no such kernel\nand much more")
        schedule(self, metadata)

    monkeypatch.setattr(ReferenceBackend, "schedule", failing)
    first, second = bench_attention(_plan(), ["2*1@40", "1@40"], _quiet)
    assert first.facts["error"] == "RuntimeError: no such kernel"
    assert "us" in second.facts


@pytest.mark.parametrize("layout", list(KVLayout))
def test_inputs_are_of_their_case(layout: KVLayout) -> None:
    spec = _plan(kv_cache_layout=layout.value).attention
    lengths = parse_case("7@20+2*1@33").lengths
    assert lengths == [(1, 33), (1, 33), (7, 20)]
    inputs = make_inputs(spec, lengths, torch.device("cpu"), num_copies=3)
    common = inputs.common
    assert (common.num_reqs, common.num_decodes, common.num_tokens, common.max_seq_len) == (3, 2, 9, 33)
    assert common.query_start_loc.tolist() == [0, 1, 2, 9] and common.seq_lens.tolist() == [33, 33, 20]
    used = np.concatenate([common.block_table[row, :blocks] for row, blocks in enumerate((3, 3, 2))])
    assert sorted(used) == list(range(8)), "a block of two sequences"
    first, *others = inputs.kv_caches
    assert len(others) == 2 and first.isfinite().all()
    for other in others:
        assert torch.equal(other, first) and other.stride() == first.stride()
        assert other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert not inputs.query.is_contiguous(), "a model's queries are a view of its projections"


def test_a_shared_prefix() -> None:
    name = "9*1@90^70"
    plan = _plan()
    rows = list(bench_attention(plan, ["1@40", name], _quiet))
    assert [row.case for row in rows] == ["1@40", name]
    for row in rows:
        assert row.facts["us"] > 0 and row.facts["err"] < 1e-5
    inputs = make_inputs(plan.attention, parse_case(name).lengths, torch.device("cpu"), num_copies=1, prefix_len=64)
    table = inputs.common.block_table
    assert (table[:, :4] == table[0, :4]).all() and inputs.kv_caches[0].shape[1] == 4 + 9 * 2
    own = table[:, 4:].flatten().tolist()
    assert len(set(own)) == 18 and set(own).isdisjoint(table[0, :4].tolist())


def test_the_graph_of_a_case() -> None:
    assert graph_key(CASES["decode_8x1k"].lengths) == GraphKey(GraphSet.DECODE, 8, 8, 1)
    assert graph_key(CASES["spec4_32x2k"].lengths) == GraphKey(GraphSet.DECODE, 128, 32, 4)
    assert graph_key(CASES["prefill_8x1k"].lengths) == GraphKey(GraphSet.MIXED, 8192, 8)
    assert graph_key(CASES["mixed_1dec64k_1x5"].lengths) == GraphKey(GraphSet.MIXED, 6, 2)


def test_cases() -> None:
    assert parse_case("mixed_1dec64k_1x5") == Case([(1, 65536), (5, 5)])
    assert parse_case("8*1@50^49") == Case([(1, 50)] * 8, prefix_len=49)
    for text in ("", "1", "2@1", "0*1@5", "1@5+", "decode", "1@5^5", "1@5^", "1@5^0", "1@50+3@5^3", "1@5^-1"):
        with pytest.raises(ConfigError, match=r"^cases="):
            parse_case(text)
    names, left_out = default_cases(_plan())
    assert "decode_1x1k" in names and "prefill_1x16k" not in names
    assert len(names) + len(left_out) == len(CASES)
