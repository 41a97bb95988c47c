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

from phonograph.kernels.torch.grouped import Grouped

STORE, ADD, SILU, GELU, CLAMPED_SWIGLU = 0, 1, 2, 3, 4
MAX_SQUARE_TILES = 256
"""Sums of squares of a row, all of which each program that takes the row reads."""
Parts = tuple[torch.Tensor, torch.Tensor]
"""Partial sums of programs that share a tile, float32, and how many have arrived, int32, zero between products."""
Matrix = torch.Tensor | Grouped
"""Weights of a product: [outputs, inputs] in the type of the rows, or in groups."""


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


def norm_arguments(product: Product) -> tuple[tuple[torch.Tensor | None, ...], float, int, int]:
    """Return a kernel's arguments for deferred norms.

    They are pointers (squares of the input, weights, normed rows, squares of the result), eps, the stride of the normed
    rows, and the tiles of the input's squares, 0 without them.
    """
    sums, eps = product.norm or (None, 0.0)
    tiles, following = len(sums) if sums is not None else 0, product.next_norm
    if following is None:
        return (sums, None, None, None), eps, 0, tiles
    normed_MN = following.normed_MN
    return (sums, following.weight_N, normed_MN, following.squares.sums), eps, normed_MN.stride(0), tiles
