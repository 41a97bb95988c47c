"""The products between two attention launches, in one launch, against torch in float64 and the products one by one."""

from __future__ import annotations

import pytest
import torch
from span_layer import EPS, Layer, check_launches_in_a_row, poisoned_scratch

from phonograph.kernels.triton.layers import silu_and_mul
from phonograph.kernels.triton.linear import LinearScratch, linear, linear_add_norm, takes_squares
from phonograph.kernels.triton.span_plan import MEASURED, ProductConfig, SpanConfig, SpanSizes, choose_span, make_plan

QWEN3_600M = SpanSizes(attended=2048, hidden=1024, intermediate=3072, qkv=4096)
ODD = SpanSizes(attended=70, hidden=45, intermediate=52, qkv=77)
"""No multiple of any tile; rows at odd addresses."""
LONG = ODD._replace(intermediate=400)
"""Of 16 rows more steps of the down product than are on their way together."""
SMALL = {1: ProductConfig(8, 64, 2), 2: ProductConfig(16, 32, 1), 3: ProductConfig(32, 64, 1)}


def small_config(rows: int, *, tiles: tuple[int, int, int, int], ahead: int) -> SpanConfig:
    return SpanConfig(rows, 1, ahead, ahead, *(SMALL[tile] for tile in tiles))


def real_config(rows: int, *, before: int = 64, ahead: int = 128) -> SpanConfig:
    rows, long = 8 if rows <= 8 else 16, ProductConfig(8, 1024, 4)
    pairs = ProductConfig(8, 1024, 2 if rows == 8 else 1)
    return SpanConfig(rows, 8, before, ahead, long, pairs, long, ProductConfig(32, 1024, 1))


def check_small(
    rows: int,
    sizes: SpanSizes,
    tiles: tuple[int, int, int, int],
    ahead: int,
    bias: bool,
    device: torch.device,
    num_programs: int = 1,
) -> None:
    scratch = poisoned_scratch(device)
    config = small_config(8 if rows <= 8 else 16, tiles=tiles, ahead=ahead)
    for last in (False, True, False):  # the next finds what the one before left in the scratch
        layer = Layer(rows, sizes, torch.float16, device, bias=bias, seed=rows)
        layer.run(config, scratch, num_programs, last=last)
        layer.check(last=last)
        assert not scratch.barrier.any()


CASES = [
    (1, ODD, (1, 2, 1, 3), 64, False),
    (2, ODD, (1, 1, 1, 1), 64, False),
    (5, ODD, (1, 2, 1, 3), 0, True),
    (8, ODD, (3, 1, 2, 1), 256, True),
    (9, ODD, (1, 1, 1, 3), 100, True),
    (16, LONG, (2, 3, 3, 2), 32, False),
]
"""rows, sizes, tiles, registers ahead, bias"""


@pytest.mark.parametrize(("rows", "sizes", "tiles", "ahead", "bias"), CASES)
def test_one_program_does_everything(
    rows: int,
    sizes: SpanSizes,
    tiles: tuple[int, int, int, int],
    ahead: int,
    bias: bool,
    device: torch.device,
) -> None:
    """As the interpreter has it: programs that wait for one another must run together."""
    check_small(rows, sizes, tiles, ahead, bias, device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", [3, 64])
@pytest.mark.parametrize(("rows", "sizes", "tiles", "ahead", "bias"), CASES)
def test_programs_meet(
    rows: int,
    sizes: SpanSizes,
    tiles: tuple[int, int, int, int],
    ahead: int,
    bias: bool,
    num_programs: int,
    device: torch.device,
) -> None:
    """Most of 64 have nothing to do but to meet."""
    check_small(rows, sizes, tiles, ahead, bias, device, num_programs)


def run_one_by_one(layer: Layer, scratch: LinearScratch) -> None:
    """The same, as `FusedDecoder` does it otherwise."""
    (output, output_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias, next_norm, qkv, qkv_bias) = layer.weights
    assert next_norm is not None and qkv is not None
    rows, dtype = len(layer.hidden), layer.dtype
    defer_mlp, defer_qkv = (takes_squares(rows, *weight.shape, dtype) for weight in (gate_up, qkv))
    product = layer.attended, output, output_bias, layer.hidden
    squares = linear_add_norm(*product, mlp_norm, EPS, layer.normed, defer=defer_mlp, scratch=scratch)
    pairs = torch.empty(rows, len(gate_up), dtype=dtype, device=gate_up.device)
    linear(layer.normed, gate_up, gate_up_bias, pairs, squares=squares, scratch=scratch)
    silu_and_mul(pairs, layer.inner)
    product = layer.inner, down, down_bias, layer.hidden
    squares = linear_add_norm(*product, next_norm, EPS, layer.normed, defer=defer_qkv, scratch=scratch)
    linear(layer.normed, qkv, qkv_bias, layer.qkv, squares=squares, scratch=scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11, 16])
def test_real_sizes(rows: int, bias: bool, device: torch.device) -> None:
    scratch, config = poisoned_scratch(device), real_config(rows)
    span_layer, single = (Layer(rows, QWEN3_600M, torch.bfloat16, device, bias=bias) for _ in range(2))
    span_layer.run(config, scratch)
    assert not scratch.barrier.any()
    span_layer.check()
    run_one_by_one(single, scratch)
    for name in ("inner", "hidden", "qkv"):
        got, wanted = getattr(span_layer, name).double(), getattr(single, name).double()
        assert (got - wanted).norm() <= 1e-2 * wanted.norm(), name
    last = Layer(rows, QWEN3_600M, torch.bfloat16, device, bias=bias)
    last.run(config, scratch, last=True)
    last.check(last=True)
    assert torch.equal(last.hidden, span_layer.hidden) and not scratch.barrier.any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16])
def test_launches_in_a_row(rows: int, device: torch.device) -> None:
    check_launches_in_a_row(QWEN3_600M, real_config(rows), rows, device, num_layers=4, launches=200)


def test_only_what_was_measured_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_span(8, ODD, torch.bfloat16) is None
    config = real_config(8)
    monkeypatch.setitem(MEASURED, (8, ODD), config)
    for rows in range(1, 18):
        assert choose_span(rows, ODD, torch.bfloat16) == (config if 2 <= rows <= 8 else None)
    monkeypatch.setitem(MEASURED, (1, ODD), real_config(8, ahead=64))
    assert choose_span(1, ODD, torch.bfloat16) == real_config(8, ahead=64)
    assert choose_span(8, ODD, torch.float16) is None and choose_span(8, LONG, torch.bfloat16) is None


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("before", "ahead"), [(0, 0), (16, 64), (64, 128), (128, 96), (1000, 1000)])
def test_weights_are_asked_for_within_limits(before: int, ahead: int, last: bool) -> None:
    config = real_config(8, before=before, ahead=ahead)
    plan = make_plan(QWEN3_600M, config, 132, last=last)
    # Registers of a thread: 8, 16, 8 and 32 rows of weights by 1024 columns of two bytes, over 256 threads.
    pieces = [size for size, count in ((16, 2), (32, 3), (16, 3), (64, 1))[: 3 if last else 4] for _ in range(count)]
    ends = [end for end, count in ((2, 2), (5, 3), (8, 3), (9, 1)) for _ in range(count)]
    assert len(plan.until) == len(pieces) + 1 and plan.until[-1] == len(pieces)
    assert list(plan.until) == sorted(plan.until)
    for piece, asked in enumerate(plan.until[:-1]):
        assert asked > piece
        assert asked <= max(ends[piece], plan.until[0])
        assert asked == max(piece + 1, plan.until[0]) or sum(pieces[piece:asked]) <= ahead
    assert plan.until[0] == 1 or sum(pieces[: plan.until[0]]) <= before
