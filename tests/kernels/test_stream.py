"""The products between two attention launches with weights on their way all the time, against torch in float64."""

from __future__ import annotations

import random

import gluon_on_threads
import pytest
import torch
from span_layer import Layer, check_launches_in_a_row, poisoned_scratch

from phonograph.kernels.triton import span_plan
from phonograph.kernels.triton.linear import LinearScratch
from phonograph.kernels.triton.span_plan import (
    MEASURED,
    STREAM_TILE,
    SpanSizes,
    StreamConfig,
    choose_span,
    make_stream_plan,
)

stream = pytest.importorskip("phonograph.kernels.triton.stream")

LLAMA3_8B = SpanSizes(attended=4096, hidden=4096, intermediate=14336, qkv=6144)
SMALL = SpanSizes(attended=200, hidden=136, intermediate=264, qkv=328)
"""No multiple of a tile or a step."""
NARROW = SpanSizes(attended=64, hidden=64, intermediate=72, qkv=64)
"""Fewer units than programs, in each product."""
CASES = [
    (1, SMALL, StreamConfig(8, 64, 3, 2, (1, 1, 1, 1)), False),
    (8, SMALL, StreamConfig(8, 128, 2, 5, (2, 1, 2, 1)), True),
    (11, SMALL, StreamConfig(16, 64, 4, 3, (2, 2, 4, 2)), True),
    (16, SMALL, StreamConfig(16, 64, 3, 4, (4, 2, 4, 1)), False),
    (32, SMALL, StreamConfig(32, 64, 2, 2, (4, 1, 1, 2)), True),
    (50, SMALL, StreamConfig(64, 64, 3, 2, (2, 2, 4, 1)), False),
    (64, SMALL, StreamConfig(64, 128, 3, 2, (2, 1, 2, 2)), True),
    (30, SMALL, StreamConfig(32, 64, 3, 2, (1, 2, 4, 2)), True),
    (5, NARROW, StreamConfig(8, 64, 3, 3, (1, 1, 2, 1)), False),
    (20, NARROW, StreamConfig(32, 64, 2, 2, (1, 1, 1, 1)), True),
]
"""rows, sizes, config, bias"""


def real_config(rows: int) -> StreamConfig:
    """As full as shared memory can be."""
    rows = max(8, 1 << (rows - 1).bit_length())
    block_k, row_stages = (128, 12 if rows <= 16 else 6) if rows <= 32 else (64, 5)
    config = StreamConfig(rows, block_k, 0, row_stages, (2, 1, 2, 1))  # about a unit for each processor
    return config._replace(weight_stages=(222_000 - config.shared_bytes) // (2 * block_k * STREAM_TILE))


def random_case(seed: int) -> tuple[int, SpanSizes, StreamConfig, bool]:
    """As in CASES, for four programs and more."""
    rng = random.Random(seed)
    attended, hidden, intermediate, qkv = (8 * rng.randint(6, 40) for _ in range(4))
    rows, block_k, splits = rng.choice([8, 16, 32, 64]), rng.choice([64, 128]), []
    for inputs in (attended, hidden, intermediate, hidden):
        splits.append(rng.choice([count for count in (1, 2, 4) if count <= -(-inputs // block_k)]))
    config = StreamConfig(rows, block_k, rng.randint(2, 6), rng.randint(2, 5), tuple(splits))
    return rng.randint(1, rows), SpanSizes(attended, hidden, intermediate, qkv), config, rng.random() < 0.5


def check(
    rows: int, sizes: SpanSizes, config: StreamConfig, bias: bool, device: torch.device, num_programs: int | None
) -> None:
    scratch = poisoned_scratch(device)
    for last in (False, True, False):  # the next finds what the one before left in the scratch
        layer = Layer(rows, sizes, torch.bfloat16, device, bias=bias, seed=rows)
        layer.run(config, scratch, num_programs, last=last)
        layer.check(last=last)
        assert not scratch.barrier.any() and not scratch.arrived.any()


@pytest.mark.parametrize("num_programs", [4, 5, 9])
@pytest.mark.parametrize(("rows", "sizes", "config", "bias"), CASES)
def test_on_threads(
    rows: int, sizes: SpanSizes, config: StreamConfig, bias: bool, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares, rings and barriers as they are written, but not layouts or the visibility of writes."""
    monkeypatch.setattr(stream, "_stream_kernel", gluon_on_threads.launcher(stream, "_stream_kernel"))
    monkeypatch.setattr("phonograph.kernels.triton.span._num_processors", lambda device: num_programs)
    check(rows, sizes, config, bias, torch.device("cpu"), num_programs)


@pytest.mark.parametrize("seed", range(12))
def test_any_case_on_threads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_on_threads(*random_case(seed), 4 + seed % 6, monkeypatch)


@pytest.mark.parametrize("broken", ["arrive", "wait"])
def test_threads_show_what_is_broken(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring whose places are never free stops; one that is overwritten too soon gives wrong sums."""
    monkeypatch.setattr(gluon_on_threads, "_PATIENCE", 0.5)
    if broken == "arrive":
        monkeypatch.setattr(gluon_on_threads._Mbarrier, "arrive", lambda barrier, **_: None)
    else:
        monkeypatch.setattr(gluon_on_threads._Mbarrier, "wait", lambda barrier, parity: None)
    with pytest.raises((AssertionError, gluon_on_threads._Stuck)):
        test_on_threads(11, *CASES[2][1:], 4, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", [4, 100])
@pytest.mark.parametrize(("rows", "sizes", "config", "bias"), CASES)
def test_small_sizes(
    rows: int, sizes: SpanSizes, config: StreamConfig, bias: bool, num_programs: int, device: torch.device
) -> None:
    check(rows, sizes, config, bias, device, num_programs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "bias"), [(2, True), (5, False), (8, False), (11, True), (16, False), (32, True), (64, False)]
)
def test_real_sizes(rows: int, bias: bool, device: torch.device) -> None:
    check(rows, LLAMA3_8B, real_config(rows), bias, device, None)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "sizes"), [key for key, one in MEASURED.items() if isinstance(one, StreamConfig)])
def test_what_was_measured(rows: int, sizes: SpanSizes, device: torch.device) -> None:
    config = MEASURED[rows, sizes]
    assert isinstance(config, StreamConfig)
    check(rows - 1, sizes, config, False, device, None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_launches_in_a_row(rows: int, device: torch.device) -> None:
    check_launches_in_a_row(LLAMA3_8B, real_config(rows), rows, device, num_layers=3, launches=60)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_scratch_is_large_enough(rows: int, last: bool) -> None:
    scratch: LinearScratch = poisoned_scratch(torch.device("cpu"))
    config = real_config(rows)
    plan = make_stream_plan(LLAMA3_8B, config, last=last)
    assert plan.num_partials <= scratch.partials.numel() and plan.num_squares <= scratch.squares.numel()
    assert config.weight_stages >= 3


def test_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = real_config(8)
    monkeypatch.setitem(MEASURED, (8, NARROW), config)
    for usable in (True, False):
        monkeypatch.setattr(span_plan, "gluon_usable", lambda usable=usable: usable)
        assert choose_span(5, NARROW, torch.bfloat16) == (config if usable else None)
