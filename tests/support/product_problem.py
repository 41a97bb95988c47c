"""Operands of matrix products, with outputs and scratch that show what is read or written where it should not be."""

from __future__ import annotations

import torch

from phonograph.kernels.fp8_activations import Rows
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm.choose import choose
from phonograph.kernels.triton.gemm.product import (
    ADD,
    GELU,
    MAX_SQUARE_TILES,
    SILU,
    STORE,
    DeferredNorm,
    Matrix,
    NextNorm,
    Product,
    format_of,
)
from phonograph.kernels.triton.gemm.product_plan import (
    GemmDevice,
    GemmRingConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    KernelConfig,
    ProductPlan,
    ProductShape,
    rows_class,
)
from phonograph.kernels.triton.gemm.run_product import GemmScratch, run

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


def gelu_of(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gemm_device(scratch: GemmScratch | None = None, *, has_gluon: bool | None = None) -> GemmDevice:
    """Return the GPU in use, or on a CPU one with the memory of an H200, without FP8 products if `scratch` has no room.

    `has_gluon` replaces whether kernels for Hopper run.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    found = GemmDevice.with_capability(capability)
    gluon = torch.cuda.is_available() and found.has_gluon if has_gluon is None else has_gluon
    without = scratch is None or scratch.scaled is None
    return found._replace(has_gluon=gluon, capability=(8, 0) if without else capability)


def plan_for(
    x: Rows,
    weight: Matrix,
    out_MN: torch.Tensor,
    scratch: GemmScratch | None,
    *,
    gated: bool = False,
    has_gluon: bool | None = None,
) -> ProductPlan:
    """Return the plan of a product on the device in use (`gemm_device`)."""
    (num_rows, num_outputs), dtype = out_MN.shape, out_MN.dtype
    num_inputs = (x if isinstance(x, torch.Tensor) else x.values_MK).shape[1]
    shape = ProductShape(num_outputs, num_inputs, gated)
    return choose(shape, format_of(weight, dtype), rows_class(num_rows), gemm_device(scratch, has_gluon=has_gluon))


def linear(
    x: Rows,
    weight: Matrix,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    squares: DeferredNorm | None = None,
    scratch: GemmScratch | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Compute out = x @ weight^T + bias, by the chosen kernel or by another one."""
    plan = plan_for(x, weight, out_MN, scratch) if config is None else ProductPlan(config)
    run(plan, Product(x, weight, bias_N, out_MN, STORE, squares), scratch or GemmScratch.make(out_MN.device))


def linear_add(
    x: Rows,
    weight: Matrix,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    *,
    scratch: GemmScratch | None = None,
    config: KernelConfig | None = None,
) -> None:
    """Compute hidden += x @ weight^T + bias, in place."""
    plan = plan_for(x, weight, hidden_MN, scratch) if config is None else ProductPlan(config)
    rest = run(plan, Product(x, weight, bias_N, hidden_MN, ADD), scratch or GemmScratch.make(hidden_MN.device))
    if rest is not None:
        hidden_MN.add_(rest)


def linear_add_norm(
    x: Rows,
    weight: Matrix,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    normed: Rows,
    *,
    defer: bool,
    scratch: GemmScratch | None,
    config: KernelConfig | None = None,
) -> DeferredNorm | None:
    """Compute hidden += x @ weight^T + bias, then normed = rms_norm(hidden), deferred if that is possible."""
    scratch = scratch or GemmScratch.make(hidden_MN.device)
    plan = plan_for(x, weight, hidden_MN, scratch) if config is None else ProductPlan(config)
    num_rows, num_outputs = hidden_MN.shape
    kernel = plan.kernel
    if defer and isinstance(kernel, GemmSmallMConfig | GemmRingConfig | GemmTiledConfig) and not plan.fp8_rows:
        tiles = -(-num_outputs // kernel.block_n)
        if num_rows <= kernel.rows and tiles <= MAX_SQUARE_TILES and not isinstance(weight, Grouped):
            squares = DeferredNorm(scratch.squares[: tiles * kernel.rows].view(tiles, kernel.rows), eps)
            norm = NextNorm(norm_weight_N, normed, squares)
            run(plan, Product(x, weight, bias_N, hidden_MN, ADD, next_norm=norm), scratch)
            return squares
    rest = run(plan, Product(x, weight, bias_N, hidden_MN, ADD), scratch)
    if rest is None:
        layers.rms_norm(hidden_MN, norm_weight_N, eps, normed)
    else:
        layers.add_and_norm(rest, hidden_MN, norm_weight_N, eps, normed)
    return None


def linear_gated(
    x: Rows,
    gate_up_2IK: Matrix,
    bias_2I: torch.Tensor | None,
    out_MI: torch.Tensor,
    *,
    squares: DeferredNorm | None = None,
    scratch: GemmScratch | None = None,
    config: KernelConfig | None = None,
    mode: int = SILU,
) -> bool:
    """Compute out = activation(gate) * up; return False, with nothing computed, if it takes a kernel of its own."""
    plan = plan_for(x, gate_up_2IK, out_MI, scratch, gated=True) if config is None else ProductPlan(config)
    if plan.gates_apart:
        return False
    run(plan, Product(x, gate_up_2IK, bias_2I, out_MI, mode, squares), scratch or GemmScratch.make(out_MI.device))
    return True


def poisoned(device: torch.device) -> GemmScratch:
    scratch = GemmScratch.make(device)
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
    config: KernelConfig | None,
    scratch: GemmScratch | None,
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
    if linear_gated(case.x, case.weight, case.bias if bias else None, case.out, scratch=scratch, config=config):
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
    config: KernelConfig | None,
    scratch: GemmScratch | None,
) -> None:
    """Check a product with a norm behind it and the product that reads it, with a deferred division where possible."""
    case = Case(rows, outputs, inputs, dtype, device)
    hidden, normed = case.residual.clone(), torch.full_like(case.residual, float("nan"))
    norm = random_tensor(outputs, dtype=dtype, device=device, seed=7) * 0.1 + 1
    shape, weights = ProductShape(outputs, outputs), format_of(case.weight, dtype)
    defer = config is not None or choose(shape, weights, rows_class(rows), gemm_device()).defers_norms
    squares = linear_add_norm(
        case.x, case.weight, None, hidden, norm, EPS, normed, defer=defer, scratch=scratch, config=config
    )  # fmt: skip
    plan = plan_for(case.x, case.weight, hidden, scratch) if config is None else ProductPlan(config)
    chosen = plan.kernel
    deferred = defer and isinstance(chosen, GemmSmallMConfig | GemmRingConfig | GemmTiledConfig)
    deferred = deferred and rows <= chosen.rows and -(-outputs // chosen.block_n) <= 256
    assert (squares is not None) == deferred
    case.out.copy_(hidden)
    case.check(case.product(case.x, bias=False) + case.residual.double())

    taker = Case(rows, outputs, outputs, dtype, device)
    wanted = hidden.double() * torch.rsqrt(hidden.double().square().mean(-1, keepdim=True) + EPS) * norm.double()
    linear(normed, taker.weight, taker.bias, taker.out, squares=squares, scratch=scratch, config=config)
    taker.check(taker.product(wanted, bias=True))
    taker = Case(rows, outputs, outputs, dtype, device, pairs=True)
    if linear_gated(
        normed, taker.weight, taker.bias, taker.out, squares=squares, scratch=scratch, config=config, mode=GELU
    ):
        taker.check(gelu_of(taker.product(wanted, bias=True)))
