"""Operands of matrix products, with outputs and scratch that show what is read or written where it should not be."""

from __future__ import annotations

import torch

from phonograph.kernels.triton.gemm.gemm_dispatch import (
    LinearScratch,
    linear,
    linear_add,
    linear_add_norm,
    linear_silu,
    make_scratch,
    takes_squares,
)
from phonograph.kernels.triton.gemm.tuning import ProductConfig, choose, rows_class

EPS = 1e-5


def random_tensor(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def rows_in_memory(rows: int) -> int:
    """Return how many rows lie where `rows` are: behind an odd number are others, to be loaded perhaps, not used."""
    return rows + rows % 2 * 16


class Case:
    """Operands of one product, and an output inside a larger poisoned tensor, so that stray writes show."""

    def __init__(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, pairs: bool = False
    ) -> None:
        weight_rows = 2 * outputs if pairs else outputs
        self.dtype = dtype
        memory = torch.full((rows_in_memory(rows), inputs), float("nan"), dtype=dtype, device=device)
        self.x = memory[:rows].copy_(random_tensor(rows, inputs, dtype=dtype, device=device, seed=1))
        self.weight = random_tensor(weight_rows, inputs, dtype=dtype, device=device, seed=2) / inputs**0.5
        self.bias = random_tensor(weight_rows, dtype=dtype, device=device, seed=3)
        self.norm = random_tensor(inputs, dtype=dtype, device=device, seed=4) * 0.1 + 1
        self.residual = random_tensor(rows, outputs, dtype=dtype, device=device, seed=5)
        self._around = torch.full((rows + 2, outputs + 16), float("nan"), dtype=dtype, device=device)
        self.out = self._around[1:-1, 8:-8]

    def normed(self) -> torch.Tensor:
        x = self.x.double()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm.double()

    def product(self, x: torch.Tensor, *, bias: bool) -> torch.Tensor:
        return x.double() @ self.weight.double().t() + (self.bias.double() if bias else 0)

    def check(self, reference: torch.Tensor, limit: float | None = None) -> None:
        """Check the output, within the limit of the type or another relative error.

        A single element may be near zero where an output's others are large, as behind an activation. Its error is
        compared with the size of its output.
        """
        out = self.out.double()
        if limit is None:
            limit = 1e-2 if self.dtype is torch.bfloat16 else 2e-3 if self.dtype is torch.float16 else 1e-5
        assert (out - reference).norm() <= limit * reference.norm()
        size_N = reference.square().mean(0).sqrt().clamp(min=1)
        assert ((out - reference).abs() <= 0.05 * reference.abs() + 4 * limit * size_N).all()
        outside = self._around.clone()
        outside[1:-1, 8:-8] = float("nan")
        assert outside.isnan().all()


def silu_of(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def poisoned(device: torch.device) -> LinearScratch:
    scratch = make_scratch(device)
    scratch.partials.fill_(float("nan"))
    scratch.squares.fill_(float("nan"))
    return scratch


def check_linear(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    bias: bool,
    config: ProductConfig | None,
    scratch: LinearScratch | None,
) -> None:
    """Check a product that is stored, one that is added, one with a fused gated activation, and those around a norm."""
    for _ in range(2):  # the second finds what the first left in the scratch
        case = Case(rows, outputs, inputs, dtype, device)
        bias_N = case.bias if bias else None
        linear(case.x, case.weight, bias_N, case.out, scratch=scratch, config=config)
        case.check(case.product(case.x, bias=bias))
        assert scratch is None or not scratch.arrived.any()

    case = Case(rows, outputs, inputs, dtype, device)
    case.out.copy_(case.residual)
    linear_add(case.x, case.weight, case.bias if bias else None, case.out, scratch=scratch, config=config)
    case.check(case.product(case.x, bias=bias) + case.residual.double())

    case = Case(rows, outputs, inputs, dtype, device, pairs=True)
    if linear_silu(case.x, case.weight, case.bias if bias else None, case.out, scratch=scratch, config=config):
        case.check(silu_of(case.product(case.x, bias=bias)))
    else:
        assert config is None and case.out.isnan().all()
    assert scratch is None or not scratch.arrived.any()

    check_norm(rows, outputs, inputs, dtype, device, config, scratch)
    assert scratch is None or not scratch.arrived.any()


def check_norm(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    config: ProductConfig | None,
    scratch: LinearScratch | None,
) -> None:
    """Check a product with a norm behind it and the product that reads it, with a deferred division where possible."""
    case = Case(rows, outputs, inputs, dtype, device)
    hidden, normed = case.residual.clone(), torch.full_like(case.residual, float("nan"))
    norm = random_tensor(outputs, dtype=dtype, device=device, seed=7) * 0.1 + 1
    defer = config is not None or takes_squares(rows, outputs, outputs, case.weight, dtype)
    squares = linear_add_norm(
        case.x, case.weight, None, hidden, norm, EPS, normed, defer=defer, scratch=scratch, config=config
    )  # fmt: skip
    chosen = config or (choose(rows_class(rows), outputs, inputs) if dtype is not torch.float32 and rows > 1 else None)
    deferred = defer and scratch is not None and chosen is not None
    deferred = deferred and rows <= chosen.rows and -(-outputs // chosen.block_n) <= 256
    assert (squares is not None) == deferred
    case.out.copy_(hidden)
    case.check(case.product(case.x, bias=False) + case.residual.double())

    taker = Case(rows, outputs, outputs, dtype, device)
    wanted = hidden.double() * torch.rsqrt(hidden.double().square().mean(-1, keepdim=True) + EPS) * norm.double()
    linear(normed, taker.weight, taker.bias, taker.out, squares=squares, scratch=scratch, config=config)
    taker.check(taker.product(wanted, bias=True))
    taker = Case(rows, outputs, outputs, dtype, device, pairs=True)
    if linear_silu(normed, taker.weight, taker.bias, taker.out, squares=squares, scratch=scratch, config=config):
        taker.check(silu_of(taker.product(wanted, bias=True)))
