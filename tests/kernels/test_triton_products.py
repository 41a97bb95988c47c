"""Matrix products in Triton against torch in float64: odd sizes, poisoned outputs, nothing written beside them."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.triton import gemv

EPS = 1e-5
LARGE = [(4096, 6144), (1024, 4096), (3584, 4608), (14336, 4096), (18944, 3584), (4096, 1001)]


def _random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


class Case:
    """Operands of one product, and an output inside a larger poisoned tensor, so that stray writes show."""

    def __init__(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, pairs: bool = False
    ) -> None:
        weight_rows = 2 * outputs if pairs else outputs
        self.dtype = dtype
        self.x = _random(rows, inputs, dtype=dtype, device=device, seed=1)
        self.weight = _random(weight_rows, inputs, dtype=dtype, device=device, seed=2) / inputs**0.5
        self.bias = _random(weight_rows, dtype=dtype, device=device, seed=3)
        self.norm = _random(inputs, dtype=dtype, device=device, seed=4) * 0.1 + 1
        self.residual = _random(rows, outputs, dtype=dtype, device=device, seed=5)
        self._around = torch.full((rows + 2, outputs + 16), float("nan"), dtype=dtype, device=device)
        self.out = self._around[1:-1, 8:-8]

    def normed(self) -> torch.Tensor:
        x = self.x.double()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double()

    def product(self, x: torch.Tensor, *, bias: bool) -> torch.Tensor:
        return x.double() @ self.weight.double().t() + (self.bias.double() if bias else 0)

    def check(self, reference: torch.Tensor) -> None:
        out = self.out.double()
        limit = 1e-2 if self.dtype is torch.bfloat16 else 2e-3 if self.dtype is torch.float16 else 1e-5
        assert (out - reference).norm() <= limit * reference.norm()
        assert torch.allclose(out, reference, rtol=0.05, atol=4 * limit)
        outside = self._around.clone()
        outside[1:-1, 8:-8] = float("nan")
        assert outside.isnan().all()


def _silu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _check_gemv(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
    case = Case(rows, outputs, inputs, dtype, device)
    bias_N = case.bias if bias else None
    gemv.gemv(case.x, case.weight, bias_N, case.out)
    case.check(case.product(case.x, bias=bias))

    case = Case(rows, outputs, inputs, dtype, device)
    gemv.gemv_norm(case.x, case.norm, EPS, case.weight, bias_N, case.out)
    case.check(case.product(case.normed(), bias=bias))

    case = Case(rows, outputs, inputs, dtype, device)
    case.out.copy_(case.residual)
    gemv.gemv_add(case.x, case.weight, bias_N, case.out)
    case.check(case.product(case.x, bias=bias) + case.residual.double())

    case = Case(rows, outputs, inputs, dtype, device, pairs=True)
    gemv.gemv_norm_silu(case.x, case.norm, EPS, case.weight, case.bias if bias else None, case.out)
    case.check(_silu(case.product(case.normed(), bias=bias)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 13, 200), (1, 8, 1100), (2, 6, 96), (4, 5, 64)])
def test_few_rows_with_every_epilogue(
    rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    _check_gemv(rows, outputs, inputs, dtype, device, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), LARGE)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_of_real_sizes(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
    _check_gemv(rows, outputs, inputs, dtype, device, bias=True)


def test_a_weight_in_the_middle_of_a_larger_matrix(device: torch.device) -> None:
    """Its rows are then further apart than they are long."""
    case = Case(1, 10, 64, torch.float16, device)
    wide = torch.full((10, 80), float("nan"), dtype=torch.float16, device=device)
    wide[:, :64] = case.weight
    gemv.gemv(case.x, wide[:, :64], None, case.out)
    case.check(case.product(case.x, bias=False))
