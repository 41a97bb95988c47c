"""Norms whose division is left to the next product: what products around one pass to each other, and to their kernels.

Shapes: M rows, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowSquares(NamedTuple):
    """What the rows of a matrix are still to be divided by, their root mean square over its columns.

    sums: [tiles, rows class] float32, of the squares of each tile's columns; eps: joins their mean
    """

    sums: torch.Tensor
    eps: float


class NextNorm(NamedTuple):
    """The norm behind a product: its weights, where the rows times those go, and where their squares do."""

    weight_N: torch.Tensor
    normed_MN: torch.Tensor
    squares: RowSquares


class NormArguments(NamedTuple):
    """What a kernel is launched with. pointers: squares of the input, weights, normed rows, squares of the result;
    tiles: of the input's squares, 0 where there are none."""

    pointers: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    eps: float
    normed_stride: int
    tiles: int


def norm_arguments(squares: RowSquares | None, norm: NextNorm | None) -> NormArguments:
    """squares: of the input"""
    sums, eps = squares or (None, 0.0)
    weight, normed, made = norm or (None, None, None)
    return NormArguments(
        (sums, weight, normed, made.sums if made is not None else None),
        eps,
        normed.stride(0) if normed is not None else 0,
        len(sums) if sums is not None else 0,
    )
