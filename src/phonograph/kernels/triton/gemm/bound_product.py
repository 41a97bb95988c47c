"""A matrix bound to a device: its products of any number of rows, each by the plan for the rows.

Shapes: M rows, N outputs, K inputs (`product`).
"""

from __future__ import annotations

from functools import cache, partial

import torch

from phonograph.kernels.fp8_activations import Rows
from phonograph.kernels.triton.gemm.choose import choose
from phonograph.kernels.triton.gemm.product import (
    ADD,
    GATED_MODES,
    MAX_SQUARE_TILES,
    STORE,
    DeferredNorm,
    Matrix,
    NextNorm,
    Norm,
    Product,
)
from phonograph.kernels.triton.gemm.product_plan import (
    GemmDevice,
    GemmRingConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    ProductPlan,
    ProductShape,
    WeightFormat,
    cdiv,
    rows_class,
)
from phonograph.kernels.triton.gemm.run_product import GemmScratch, run


class BoundProduct:
    """Products with one matrix.

    Args:
        weight: the matrix.
        bias_N: constants of the outputs, or None.
        shape: sizes of the product.
        weights: format of the matrix.
        device: GPU that runs it.
        scratch: scratch of products that follow one another.
        activation: of the gates of a gated product, "silu" or "gelu_tanh".
        batch_invariant: the result of a row does not depend on other rows.
        summed: the inputs are those of one rank, so that the sum of all ranks is the result.
    """

    def __init__(
        self,
        weight: Matrix,
        bias_N: torch.Tensor | None,
        shape: ProductShape,
        weights: WeightFormat,
        *,
        device: GemmDevice,
        scratch: GemmScratch,
        activation: str = "silu",
        batch_invariant: bool = False,
        summed: bool = False,
    ) -> None:
        self.scratch, self.summed = scratch, summed
        self._weight, self._bias_N, self._shape = weight, bias_N, shape
        self._gated = GATED_MODES[activation] if shape.gated else STORE
        self._plans = cache(partial(choose, shape, weights, device=device, batch_invariant=batch_invariant))

    def plan(self, num_rows: int) -> ProductPlan:
        """Return how products of a number of rows are computed."""
        return self._plans(rows_class(num_rows))

    def store(self, x: Rows, out_MN: torch.Tensor, norm: Norm | DeferredNorm | None = None) -> None:
        """Compute out = x @ weight^T + bias, or, if the plan is gated, out = activation(gate) * up of it."""
        plan = self.plan(len(out_MN))
        mode = self._gated if self._shape.gated and not plan.gates_apart else STORE
        run(plan, Product(x, self._weight, self._bias_N, out_MN, mode, norm), self.scratch)

    def add(self, x: Rows, hidden_MN: torch.Tensor, next_norm: NextNorm | None = None) -> torch.Tensor | None:
        """Compute hidden += x @ weight^T + bias, and begin the next norm.

        Returns:
            A product in scratch that the caller adds to `hidden`, or None.
        """
        product = Product(x, self._weight, self._bias_N, hidden_MN, ADD, next_norm=next_norm)
        return run(self.plan(len(hidden_MN)), product, self.scratch)

    def deferred_norm(self, num_rows: int, eps: float) -> DeferredNorm | None:
        """Return the memory of the norm that the product of `num_rows` rows can begin; None if it can not."""
        plan = self.plan(num_rows)
        if not plan.defers_norms:
            return None
        assert isinstance(plan.kernel, GemmSmallMConfig | GemmRingConfig | GemmTiledConfig)
        rows, tiles = plan.kernel.rows, cdiv(self._shape.num_outputs, plan.kernel.block_n)
        if num_rows > rows or tiles > MAX_SQUARE_TILES:
            return None
        return DeferredNorm(self.scratch.squares[: tiles * rows].view(tiles, rows), eps)
