"""Products with FP8 weights and FP8 activations, against float64 of the rounded operands and of those in 16 bits."""

from __future__ import annotations

import pytest
import torch
from grouped_problem import GroupedCase, scratch_of
from product_problem import (
    EPS,
    gemm_device,
    linear,
    linear_add,
    linear_add_norm,
    linear_gated,
    plan_for,
    random_tensor,
    silu_of,
)

from phonograph.kernels.triton.elementwise.layers import silu_and_mul
from phonograph.kernels.triton.gemm.choose import MAX_16_BIT_ROWS, choose, has_fp8_products, takes_fp8_rows
from phonograph.kernels.triton.gemm.product import Product, format_of
from phonograph.kernels.triton.gemm.product_plan import (
    GemmDevice,
    GemmRingConfig,
    ProductPlan,
    ProductShape,
    WeightFormat,
    rows_class,
)
from phonograph.kernels.triton.gemm.run_product import MAX_PARTIALS, GemmScratch, run

# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SIZES = [(33, 48, 64), (40, 80, 336), (70, 32, 1008), (140, 48, 96)]


def case_of(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, pairs: bool = False
) -> GroupedCase:
    return GroupedCase(rows, outputs, inputs, dtype, device, group=inputs, kind="fp8", pairs=pairs)


def rounded(scratch: GemmScratch, x: torch.Tensor) -> torch.Tensor:
    """Return the activations of the last product in float64, which are close to `x`."""
    assert scratch.scaled is not None
    rows = scratch.scaled.values[: x.numel()].double().view(x.shape) * scratch.scaled.scales_T[: len(x), None].double()
    # The interpreter drops the carry where rounding fills the bits behind the point.
    assert (rows - x).norm() <= (0.03 if x.device.type == "cuda" else 0.2) * x.double().norm()
    return rows


def check(case: GroupedCase, got: torch.Tensor, exact: torch.Tensor) -> None:
    """Check the output against the product of the rounded operands, and on a GPU against that of the others."""
    case.check(got, limit=1e-2)
    if case.x.device.type == "cuda":
        assert (case.out.double() - exact).norm() <= 5e-2 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    scratch = scratch_of(rows, outputs, inputs, dtype, device)
    for bias in (True, False):
        plain = case_of(rows, outputs, inputs, dtype, device)
        linear(plain.x, plain.grouped, plain.bias if bias else None, plain.out, scratch=scratch)
        check(plain, plain.product(rounded(scratch, plain.x), bias=bias), plain.product(plain.x, bias=bias))
    added = case_of(rows, outputs, inputs, dtype, device)
    added.out.copy_(added.residual)
    linear_add(added.x, added.grouped, added.bias, added.out, scratch=scratch)
    residual = added.residual.double()
    wanted = added.product(rounded(scratch, added.x), bias=True) + residual
    check(added, wanted, added.product(added.x, bias=True) + residual)
    # The product may overlay its input.
    assert scratch.scaled is not None
    overlaid = case_of(rows, outputs, inputs, dtype, device)
    room = torch.empty(max(overlaid.x.numel(), rows * outputs), dtype=dtype, device=device)
    x = room[: overlaid.x.numel()].view(overlaid.x.shape).copy_(overlaid.x)
    overlaid.out.copy_(overlaid.residual)
    linear_add(
        x,
        added.grouped,
        added.bias,
        overlaid.out,
        scratch=scratch._replace(scaled=scratch.scaled._replace(product=room)),
    )
    assert torch.equal(overlaid.out, added.out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_products_of_real_sizes(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    case = case_of(2048, outputs, inputs, dtype, device)
    scratch = scratch_of(2048, outputs, inputs, dtype, device)
    for rows in (1, 8, 13, 33, 64, 128, 250, 500, 2048):
        x, out = case.x[:rows], torch.full((rows, outputs), torch.nan, dtype=dtype, device=device)
        linear(x, case.grouped, case.bias, out, scratch=scratch)
        for exact, limit in ((rounded(scratch, x), 1e-2), (x, 5e-2)):
            wanted = case.product(exact, bias=True)
            error = ((out.double() - wanted).norm() / wanted.norm()).item()
            assert error <= limit, (rows, limit, error)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
def test_gated_products_of_real_sizes(device: torch.device) -> None:
    for rows in (1, 13, 33, 100, 250):
        gated = case_of(rows, 14336, 4096, torch.bfloat16, device, pairs=True)
        scratch = scratch_of(rows, 28672, 4096, torch.bfloat16, device)
        assert linear_gated(gated.x, gated.grouped, gated.bias, gated.out, scratch=scratch)
        wanted = silu_of(gated.product(rounded(scratch, gated.x), bias=True))
        check(gated, wanted, silu_of(gated.product(gated.x, bias=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(37, 96, 144), pytest.param(256, 4096, 14336, marks=pytest.mark.gpu)]
)
def test_norm_behind_a_product(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    """The sum of product and residual is normed in one kernel, and nothing is deferred."""
    made = case_of(rows, outputs, inputs, dtype, device)
    scratch = scratch_of(rows, outputs, inputs, dtype, device)
    hidden, normed = made.residual.clone(), torch.full_like(made.residual, torch.nan)
    norm = random_tensor(outputs, dtype=dtype, device=device, seed=7) * 0.1 + 1
    arguments = made.x, made.grouped, made.bias, hidden, norm, EPS, normed
    assert linear_add_norm(*arguments, defer=True, scratch=scratch) is None
    made.out.copy_(hidden)
    residual = made.residual.double()
    wanted = made.product(rounded(scratch, made.x), bias=True) + residual
    check(made, wanted, made.product(made.x, bias=True) + residual)
    made.out.copy_(normed)
    exact = hidden.double()
    made.check(exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * norm.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(dtype: torch.dtype, device: torch.device) -> None:
    """It is a kernel of its own on GPUs other than Hopper's."""
    rows, outputs, inputs = 37, 48, 144
    gated = case_of(rows, outputs, inputs, dtype, device, pairs=True)
    scratch = scratch_of(rows, outputs, inputs, dtype, device)
    plan = plan_for(gated.x, gated.grouped, gated.out, scratch, gated=True, has_gluon=False)
    assert plan == ProductPlan(None, fp8_rows=True, gates_apart=True) and plan.name == "torch._scaled_mm"
    gate_up = torch.full((rows, 2 * outputs), torch.nan, dtype=dtype, device=device)
    run(plan, Product(gated.x, gated.grouped, gated.bias, gate_up), scratch)
    silu_and_mul(gate_up, gated.out)
    wanted = silu_of(gated.product(rounded(scratch, gated.x), bias=True))
    check(gated, wanted, silu_of(gated.product(gated.x, bias=True)))


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "batch_invariant"),
    [
        (MAX_16_BIT_ROWS, 48, 64, 64, False),
        (40, 40, 64, 64, False),
        (40, 48, 72, 72, False),
        (40, 48, 128, 64, False),
        (40, 48, 64, 64, True),
    ],
    ids=["few rows", "outputs", "inputs", "blocks", "batch-invariant"],
)
def test_activations_that_stay_in_16_bits(
    rows: int, outputs: int, inputs: int, group: int, batch_invariant: bool, device: torch.device
) -> None:
    case = GroupedCase(rows, outputs, inputs, torch.float16, device, group=group, kind="fp8")
    scratch = scratch_of(rows, outputs, inputs, torch.float16, device)
    plan = choose(
        ProductShape(outputs, inputs),
        format_of(case.grouped, torch.float16),
        rows_class(rows),
        gemm_device(scratch, has_gluon=False),
        batch_invariant=batch_invariant,
    )
    run(plan, Product(case.x, case.grouped, case.bias, case.out), scratch)
    case.check(case.product(case.x, bias=True))
    assert scratch.scaled is not None and scratch.scaled.values.float().isnan().all()


def gpu(*capability: int, has_gluon: bool = False) -> GemmDevice:
    major, minor = capability
    return GemmDevice.with_capability((major, minor))._replace(has_gluon=has_gluon)


ADA = gpu(8, 9)


def test_gpus_with_fp8_products() -> None:
    assert has_fp8_products(gpu(9, 0), "bfloat16") and has_fp8_products(gpu(8, 9), "bfloat16")
    assert not has_fp8_products(gpu(8, 6), "bfloat16") and not has_fp8_products(gpu(8, 9), "float16")
    assert not has_fp8_products(gpu(9, 0), "float32") and not has_fp8_products(gpu(0, 0), "bfloat16")


def test_rule() -> None:
    def takes(
        *sizes: int,
        gated: bool = False,
        rows: int = 32,
        group: int = 1 << 20,
        is_fp8: bool = True,
        device: GemmDevice = ADA,
    ) -> bool:
        weights = WeightFormat("bfloat16", bits=8, group=group, is_fp8=is_fp8)
        return takes_fp8_rows(ProductShape(*sizes, gated), weights, rows, device)

    assert takes(6144, 4096) and not takes(6144, 4104) and not takes(6152, 4096)
    assert takes(16, 1 << 16) and not takes(16, (1 << 16) + 16)
    # Gates and ups are one matrix.
    assert takes(72, 4096, gated=True) and not takes(72, 4096)
    assert takes(64, 128, group=128) and not takes(64, 256, group=128)
    assert not takes(64, 128, is_fp8=False) and not takes(64, 128, device=gpu(8, 0))
    few = [rows for rows in (1, 8, 16, 32, 4096) if takes(64, 128, rows=rows)]
    assert few == [32, 4096] and takes(64, 128, rows=1, device=gpu(9, 0, has_gluon=True))


def test_rings_of_fp8_rows_fit() -> None:
    """Up to 256 rows go through a ring, wide products up to 64; it has room in the shared memory of a program."""
    for num_outputs, num_inputs, gated in (
        (6144, 4096, False),
        (4096, 4096, False),
        (14336, 4096, True),
        (4096, 14336, False),
        (28672, 4096, False),
    ):
        shape, weights = ProductShape(num_outputs, num_inputs, gated), WeightFormat("bfloat16", 8, num_inputs, True)
        for rows in (1, 8, 16, 32, 64, 128, 256, 512):
            plan = choose(shape, weights, rows, gpu(9, 0, has_gluon=True))
            wide = num_outputs == 28672 and not gated
            assert plan.fp8_rows and not plan.defers_norms
            assert plan.name == ("gemm_ring" if rows <= (64 if wide else 256) else "torch._scaled_mm")
            assert plan.gates_apart == (gated and rows == 512)
            config = plan.kernel
            if isinstance(config, GemmRingConfig):
                step = config.block_k * (config.block_n * (1 + gated) + config.rows)
                assert config.lag < config.stages and step * config.stages + 1024 <= 227 << 10
                tiles = -(-num_outputs // config.block_n) * -(-rows // config.rows)
                assert config.splits == 1 or tiles * config.splits * config.block_n * config.rows <= MAX_PARTIALS
