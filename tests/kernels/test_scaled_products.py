"""Products with FP8 weights and FP8 activations, against float64 of the rounded operands and of those in 16 bits."""

from __future__ import annotations

import pytest
import torch
from grouped_problem import GroupedCase, scratch_of
from product_problem import EPS, random_tensor, silu_of

from phonograph.kernels.fp8_activations import device_has_scaled_products, max_16_bit_rows, takes_scaled_product
from phonograph.kernels.triton.elementwise.layers import silu_and_mul
from phonograph.kernels.triton.gemm import gemm_dispatch
from phonograph.kernels.triton.gemm.gemm_dispatch import (
    LinearScratch,
    linear,
    linear_add,
    linear_add_norm,
    linear_silu,
)
from phonograph.kernels.triton.gemm.gemm_scaled import takes
from phonograph.kernels.triton.gemm.tuning import BATCH_INVARIANT

# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SIZES = [(33, 48, 64), (40, 80, 336), (70, 32, 1008), (140, 48, 96)]


@pytest.fixture
def without_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs other than Hopper's."""
    monkeypatch.setattr(gemm_dispatch, "gluon_usable", lambda: False)
    monkeypatch.setattr(gemm_dispatch, "choose_scaled", lambda *_: None)


def case_of(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, pairs: bool = False
) -> GroupedCase:
    return GroupedCase(rows, outputs, inputs, dtype, device, group=inputs, kind="fp8", pairs=pairs)


def rounded(scratch: LinearScratch, x: torch.Tensor) -> torch.Tensor:
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
        assert linear_silu(gated.x, gated.grouped, gated.bias, gated.out, scratch=scratch)
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


@pytest.mark.usefixtures("without_ring")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(dtype: torch.dtype, device: torch.device) -> None:
    """It is a kernel of its own."""
    rows, outputs, inputs = 37, 48, 144
    gated = case_of(rows, outputs, inputs, dtype, device, pairs=True)
    scratch = scratch_of(rows, outputs, inputs, dtype, device)
    assert not linear_silu(gated.x, gated.grouped, gated.bias, gated.out, scratch=scratch)
    gate_up = torch.full((rows, 2 * outputs), torch.nan, dtype=dtype, device=device)
    linear(gated.x, gated.grouped, gated.bias, gate_up, scratch=scratch)
    silu_and_mul(gate_up, gated.out)
    wanted = silu_of(gated.product(rounded(scratch, gated.x), bias=True))
    check(gated, wanted, silu_of(gated.product(gated.x, bias=True)))


@pytest.mark.usefixtures("without_ring")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "change"),
    [
        (max_16_bit_rows(has_ring=False), 48, 64, {}),
        (40, 40, 64, {}),
        (40, 48, 72, {}),
        (40, 48, 128, {"group": 64}),
        (40, 48, 64, {"config": BATCH_INVARIANT}),
        (40, 48, 64, {"scaled": None}),
    ],
    ids=["few rows", "outputs", "inputs", "blocks", "given tiles", "no scratch"],
)
def test_activations_that_stay_in_16_bits(
    rows: int, outputs: int, inputs: int, change: dict[str, object], device: torch.device
) -> None:
    config = change.get("config")
    case = GroupedCase(rows, outputs, inputs, torch.float16, device, group=change.get("group", inputs), kind="fp8")
    scratch = scratch_of(rows, outputs, inputs, torch.float16, device)
    kept = scratch.scaled
    linear(
        case.x, case.grouped, case.bias, case.out,
        scratch=scratch._replace(scaled=change.get("scaled", kept)), config=config,
    )  # fmt: skip
    case.check(case.product(case.x, bias=True))
    assert kept is not None and kept.values.float().isnan().all()


def test_rule() -> None:
    assert device_has_scaled_products((9, 0), "bfloat16") and device_has_scaled_products((8, 9), "bfloat16")
    assert not device_has_scaled_products((8, 6), "bfloat16") and not device_has_scaled_products((8, 9), "float16")
    assert not device_has_scaled_products((9, 0), "float32") and not device_has_scaled_products((0, 0), "bfloat16")
    assert takes_scaled_product(6144, 4096) and not takes_scaled_product(6144, 4104)
    assert not takes_scaled_product(16, 1 << 17)
    weight = case_of(1, 48, 64, torch.float16, torch.device("cpu")).grouped
    assert takes(weight) and not takes(weight._replace(scales_OG=weight.scales_OG.half()))
