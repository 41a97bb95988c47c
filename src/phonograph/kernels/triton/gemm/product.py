"""Description of a matrix product that all kernels take, and the RMSNorms around it that they compute.

A norm can be deferred: its division by the root mean square is a factor of a whole row. So the product that makes a row
leaves it times the norm's weights, with the sums of its squares, and the product that takes the row multiplies its own
sums by the factor.

Shapes: M rows, N outputs, K inputs. Weights lie [outputs, inputs], rows contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

STORE, ADD, SILU = 0, 1, 2
MAX_SQUARE_TILES = 256
"""Sums of squares of a row, all of which each program that takes the row reads."""
Parts = tuple[torch.Tensor, torch.Tensor]
"""Partial sums of programs that share a tile, float32, and how many have arrived, int32, zero between products."""


class RowSquares(NamedTuple):
    """Deferred division of a matrix's rows by their root mean square over its columns.

    sums: [tiles, rows class] float32, of the squares of each tile's columns; eps: joins their mean
    """

    sums: torch.Tensor
    eps: float


class NextNorm(NamedTuple):
    """Norm of a product's result: its weights, the rows times those weights, and the squares of the rows."""

    weight_N: torch.Tensor
    normed_MN: torch.Tensor
    squares: RowSquares


class Product(NamedTuple):
    """x @ weight^T + bias, summed in float32.

    mode: STORE writes it to `out`, ADD adds it to `out`, SILU writes silu(gate) * up; its weights
        are [2N, K], gates first
    squares: deferred division of the rows of `x`
    norm: of the result, deferred
    """

    x_MK: torch.Tensor
    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    out_MN: torch.Tensor
    mode: int = STORE
    squares: RowSquares | None = None
    norm: NextNorm | None = None


def norm_arguments(product: Product) -> tuple[tuple[torch.Tensor | None, ...], float, int, int]:
    """Return a kernel's arguments for the norms.

    They are pointers (squares of the input, weights, normed rows, squares of the result), eps, the stride of the normed
    rows, and the tiles of the input's squares, 0 without them.
    """
    sums, eps = product.squares or (None, 0.0)
    weight, normed, made = product.norm or (None, None, None)
    return (
        (sums, weight, normed, made.sums if made is not None else None),
        eps,
        normed.stride(0) if normed is not None else 0,
        len(sums) if sums is not None else 0,
    )
