"""Operands of matrix products, with outputs and scratch that show what is read or written where it should not be."""

from __future__ import annotations

import torch

from phonograph.kernels.triton.linear import LinearScratch, make_scratch

EPS = 1e-5


def random_tensor(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


class Case:
    """Operands of one product, and an output inside a larger poisoned tensor, so that stray writes show."""

    def __init__(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, pairs: bool = False
    ) -> None:
        weight_rows = 2 * outputs if pairs else outputs
        self.dtype = dtype
        self.x = random_tensor(rows, inputs, dtype=dtype, device=device, seed=1)
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

    def check(self, reference: torch.Tensor) -> None:
        out = self.out.double()
        limit = 1e-2 if self.dtype is torch.bfloat16 else 2e-3 if self.dtype is torch.float16 else 1e-5
        assert (out - reference).norm() <= limit * reference.norm()
        assert torch.allclose(out, reference, rtol=0.05, atol=4 * limit)
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
