"""Products with weights in groups, against float64: odd sizes, poisoned outputs, nothing written beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grouped_problem import GroupedCase, check_products, grouped_scratch
from product_problem import gelu_of, linear, linear_gated, plan_for, poisoned, silu_of
from programs import report_of

from phonograph.kernels.torch.grouped import deinterleave, interleave
from phonograph.kernels.triton.gemm.choose import choose
from phonograph.kernels.triton.gemm.choose_grouped import is_supported
from phonograph.kernels.triton.gemm.grouped_operands import MAGIC, bfloat16_terms
from phonograph.kernels.triton.gemm.product import GELU
from phonograph.kernels.triton.gemm.product_plan import (
    GemmDevice,
    GemmGroupedSmallMConfig,
    GemmTiledConfig,
    ProductPlan,
    ProductShape,
    WeightFormat,
)

# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
CONFIGS = [
    GemmTiledConfig(16, 32, 32, 2, 4, 3, 0),
    GemmGroupedSmallMConfig(8, 16, 2, 2, 1, 2),
    GemmGroupedSmallMConfig(8, 32, 4, 1, 1, 4),
    GemmGroupedSmallMConfig(16, 16, 4, 3, 1, 1),
    GemmGroupedSmallMConfig(32, 32, 1, 2, 2, 1),
]


KINDS = (
    "int4",
    "int4 with zeros",
    "int4 reordered with offsets",
    "fp8",
    "int8",
    "int8 with zeros",
    "int8 with offsets",
)


SIZES = [
    (1, 40, 384, 128, "int4"),
    (7, 37, 200, 32, "int4 with zeros"),
    (8, 16, 520, 256, "int4 with zeros"),
    (5, 70, 100, 64, "int4"),
    (2, 21, 160, 32, "int4 with offsets"),
    (4, 37, 384, 128, "int4 interleaved"),
    (8, 40, 500, 256, "int4 interleaved with zeros"),
    (3, 40, 200, 200, "fp8"),
    (8, 37, 324, 128, "fp8"),
    (6, 37, 203, 203, "int8"),
    (8, 40, 324, 64, "int8 with zeros"),
    (4, 21, 160, 32, "int8 reordered with offsets"),
]
"""rows, outputs, inputs, group, kind"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group", "kind"), SIZES)
def test_products(
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
    kind: str,
    config: GemmGroupedSmallMConfig | GemmTiledConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    def case(*, pairs: bool = False) -> GroupedCase:
        return GroupedCase(rows, outputs, inputs, dtype, device, group=group, kind=kind, pairs=pairs)

    check_products(case, config, grouped_scratch(case()))


@pytest.mark.parametrize("kind", ["int4 with zeros", "int4 interleaved reordered"])
@pytest.mark.parametrize("rows", [2, 40, 300])
def test_products_by_their_size(rows: int, kind: str, device: torch.device) -> None:
    """Up to 256 rows have a kernel, and are put in order; for more the weights are written out for torch."""
    case = GroupedCase(rows, 40, 256, torch.float16, device, group=128, kind=kind)
    scratch, around = grouped_scratch(case), grouped_scratch(case)
    linear(case.x, case.grouped, case.bias, case.out, scratch=scratch)
    case.check(case.product(case.x, bias=True))
    assert scratch.dequantized is not None and around.dequantized is not None
    if rows > 256:
        around.dequantized[: case.weight.numel()] = case.weight.flatten()
    elif case.grouped.order_I is not None:
        around.dequantized[: case.x.numel()] = case.x[:, case.grouped.order_I].flatten()
    assert torch.allclose(scratch.dequantized, around.dequantized, rtol=1e-3, equal_nan=True)
    plan = plan_for(case.x, case.grouped, case.out, scratch)
    assert (plan.kernel is None) == (rows > 256) and not plan.fp8_rows


@pytest.mark.parametrize("pairs", [False, True])
def test_more_rows_of_fp8_with_odd_sizes(pairs: bool, device: torch.device) -> None:
    """One scale an output puts no bound on the columns of a step; tensor cores need 16, the interpreter does not."""
    case = GroupedCase(40, 24, 324, torch.float16, device, group=324, kind="fp8", pairs=pairs)
    config = plan_for(case.x, case.grouped, case.out, None, gated=pairs).kernel
    assert isinstance(config, GemmTiledConfig) and config.block_k == 128
    if pairs:
        assert linear_gated(case.x, case.grouped, case.bias, case.out, mode=GELU)
        case.check(gelu_of(case.product(case.x, bias=True)))
    else:
        linear(case.x, case.grouped, case.bias, case.out, scratch=poisoned(device))
        case.check(case.product(case.x, bias=True))


def test_types_in_bfloat16() -> None:
    """Kernels of all kinds have operands of one type where the interpreter does not look: in bfloat16."""
    assert report_of(Path(__file__).with_name("types_of_groups.py")) == {"kernels": 3 * len(SIZES)}


def test_every_byte_in_bfloat16() -> None:
    """The kernel's arithmetic on bits, by torch, since the interpreter has no numbers of this type."""
    integers = torch.arange(256, dtype=torch.uint8)
    for at in range(2):
        low, high = bfloat16_terms.fn(integers.view(torch.int32), MAGIC[torch.bfloat16], at)
        got = low.view(torch.bfloat16) - high.view(torch.bfloat16)
        assert torch.equal(got, integers.view(-1, 4)[:, at::2].flatten().bfloat16() - 128)


def test_interleaved_words() -> None:
    """Word w has columns 8 p + 2 w in its lower half and the columns after them in its upper half."""
    columns = torch.arange(32, dtype=torch.int64) % 16
    natural = (columns.view(4, 8) << (4 * torch.arange(8))).sum(1)
    words = interleave(natural.to(torch.int32).view(1, 4))
    for w in range(4):
        lower = [8 * p + 2 * w for p in range(4)]
        wanted = [columns[column] for column in lower] + [columns[column + 1] for column in lower]
        assert [(int(words[0, w]) >> (4 * place)) & 15 for place in range(8)] == wanted
    drawn = torch.randint(-(2**31), 2**31, (3, 16), dtype=torch.int32)
    assert torch.equal(deinterleave(interleave(drawn)), drawn)


def test_formats_without_kernels() -> None:
    """Their weights are written out for torch, as all are for rows in 32 bits."""
    int4 = WeightFormat("bfloat16", bits=4, group=128)
    int8, fp8 = int4._replace(bits=8), int4._replace(bits=8, is_fp8=True)
    taken = {
        int4: [32, 64, 128, 256, 384],
        int8: [32, 64, 128, 192, 256, 384, 400],
        fp8: [64, 128, 192, 256, 384, 400],
    }
    every = (16, 32, 40, 48, 64, 96, 128, 192, 256, 384, 400)
    for weights, groups in taken.items():
        assert [group for group in every if is_supported(weights._replace(group=group), 384)] == groups
    # A row of FP8 is whole words.
    assert is_supported(fp8._replace(group=130), 128) and not is_supported(fp8._replace(group=130), 130)
    device, shape = GemmDevice((8, 0), 163 << 10, has_gluon=False), ProductShape(64, 384)
    for weights in (int4, int8, fp8):
        assert choose(shape, weights, 8, device).kernel is not None
        for other in (weights._replace(group=40), weights._replace(dtype="float32")):
            assert choose(shape, other, 8, device) == ProductPlan(None)
            assert choose(shape._replace(gated=True), other, 8, device) == ProductPlan(None, gates_apart=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int4 interleaved reordered", "fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 32, 100])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4608, 3584), (3584, 3584), (18944, 3584), (3584, 18944), (6144, 4096), (4096, 14336)]
)
def test_products_of_real_sizes(outputs: int, inputs: int, rows: int, kind: str, device: torch.device) -> None:
    """As configured for the sizes."""
    group = 128 if "int4" in kind else inputs
    case = GroupedCase(rows, outputs, inputs, torch.bfloat16, device, group=group, kind=kind)
    scratch = grouped_scratch(case)
    assert plan_for(case.x, case.grouped, case.out, scratch).kernel is not None
    linear(case.x, case.grouped, case.bias, case.out, scratch=scratch)
    case.check(case.product(case.x, bias=True))
    if outputs > inputs:
        gated = GroupedCase(rows, outputs, inputs, torch.bfloat16, device, group=group, kind=kind, pairs=True)
        assert linear_gated(gated.x, gated.grouped, gated.bias, gated.out, scratch=scratch)
        gated.check(silu_of(gated.product(gated.x, bias=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
def test_random_cases(part: int, device: torch.device) -> None:
    """500 products of random sizes, groups and rows, in ten parts that processes share."""
    draw = torch.Generator().manual_seed(torch.seed() % 2**32)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    for _ in range(50):
        rows, outputs, inputs = number(1, 33), number(1, 700), number(1, 3000)
        group, kind = (32, 64, 128, 256)[number(0, 4)], KINDS[number(0, len(KINDS))]
        if kind == "fp8":
            inputs, group = 4 * inputs, max(64, group) if number(0, 2) else 4 * inputs
        elif "int8" in kind and number(0, 2):
            group = inputs
        case = GroupedCase(rows, outputs, inputs, torch.bfloat16, device, group=group, kind=kind)
        linear(case.x, case.grouped, case.bias, case.out, scratch=grouped_scratch(case))
        case.check(case.product(case.x, bias=True))
