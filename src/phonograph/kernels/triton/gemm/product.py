"""Description of a matrix product that all kernels take, and the RMSNorms around it that they compute.

A norm can be deferred: its division by the root mean square is a factor of a whole row. So the product that makes a row
leaves it times the norm's weights, with the sums of its squares, and the product that takes the row multiplies its own
sums by the factor. On an H200 this makes a decode step of 2 to 16 sequences 2% shorter for Llama-3.1-8B and 4% for
Qwen3-0.6B. Kernels of quantized weights, which gain 0.4%, do not take it.

Shapes: M rows, N outputs, K inputs. Weights lie [outputs, inputs], rows contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from phonograph.kernels.fp8_activations import numbers_and_scales
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.gemm.product_plan import WeightFormat

STORE, ADD, SILU, GELU, CLAMPED_SWIGLU, RELU2 = 0, 1, 2, 3, 4, 5
GATED_MODES = {"silu": SILU, "gelu_tanh": GELU, "clamped_swiglu": CLAMPED_SWIGLU}
"""Modes of gated products by the activation of their gates in a model's specification."""
EXPERT_MODES = {**GATED_MODES, "relu2": RELU2}
"""Modes of experts' first products. Those of relu2 have no gates."""
MAX_SQUARE_TILES = 256
"""Most sums of squares of a row; each program that takes the row reads all of them."""
Parts = tuple[torch.Tensor, torch.Tensor]
"""Partial sums of programs that share a tile, float32, and how many have arrived, int32, zero between products."""
Matrix = torch.Tensor | Grouped
"""Weights of a product: [outputs, inputs] in the type of the rows, or in groups."""


def format_of(weight: Matrix, dtype: torch.dtype) -> WeightFormat:
    """Return the format of a matrix that rows of `dtype` are multiplied with."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(weight, Grouped):
        return WeightFormat(name)
    return WeightFormat(name, weight.bits, weight.group, weight.is_fp8(), weight.interleaved)


class Norm(NamedTuple):
    """Norm of one row before its product (`gemv`): the weights [K], and the number that joins the mean square."""

    weight_K: torch.Tensor
    eps: float


class DeferredNorm(NamedTuple):
    """Deferred division of a matrix's rows by their root mean square over its columns.

    sums: [tiles, rows class] float32, of the squares of each tile's columns; eps: joins their mean
    """

    sums: torch.Tensor
    eps: float


class NextNorm(NamedTuple):
    """Deferred norm of a product's result: its weights, the rows times those weights, and the squares of the rows."""

    weight_N: torch.Tensor
    normed_MN: torch.Tensor
    squares: DeferredNorm


class Product(NamedTuple):
    """x @ weight^T + bias, summed in float32.

    x: `Rows`; each kernel takes one of its types, and of `weight`, a `Matrix`
    mode: STORE writes it to `out`, ADD adds it to `out`, the others write activation(gate) * up; their weights are
        [2N, K], gates first
    norm: `Norm` or `DeferredNorm` of the rows of `x` that the kernel computes, or ends; None for none
    next_norm: norm of the result that the kernel begins
    """

    x: Any
    weight: Any
    bias_N: torch.Tensor | None
    out_MN: torch.Tensor
    mode: int = STORE
    norm: Any = None
    next_norm: NextNorm | None = None

    @property
    def rows(self) -> torch.Tensor:
        """Rows, [M, K]; of FP8 the numbers without their scales."""
        return numbers_and_scales(self.x)[0]

    @property
    def row_scales(self) -> torch.Tensor | None:
        """Scales of FP8 rows, [M, 1]."""
        return numbers_and_scales(self.x)[1]

    @property
    def grouped(self) -> Grouped | None:
        """Weights, if they are in groups."""
        return self.weight if isinstance(self.weight, Grouped) else None

    @property
    def matrix(self) -> torch.Tensor:
        """Weights in memory: numbers, or words of 32 bits."""
        weight = self.grouped
        return weight.packed_OW.view(torch.int32) if weight is not None else self.weight
