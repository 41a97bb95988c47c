"""Activations in FP8, with one scale a row, and the scratch of their products."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Fp8Rows(NamedTuple):
    """Rows of activations in FP8, value * scale.

    Attributes:
        values_MK: float8_e4m3fn, contiguous.
        scales_M1: float32, contiguous.
    """

    values_MK: torch.Tensor
    scales_M1: torch.Tensor


Rows = torch.Tensor | Fp8Rows
"""Activations: in 16 or 32 bits, or in FP8."""


def numbers_and_scales(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the numbers of rows, and the scales of rows in FP8."""
    return rows if isinstance(rows, Fp8Rows) else (rows, None)


def rows_of(rows: Rows, part: slice) -> Rows:
    """Return some of the rows, without a copy."""
    return Fp8Rows(*(one[part] for one in rows)) if isinstance(rows, Fp8Rows) else rows[part]


class ScaledScratch(NamedTuple):
    """Scratch of products with FP8 activations.

    Attributes:
        values: room for the largest rows, float8_e4m3fn.
        scales_T: their scales, float32.
        product: room for a result that is then added to other rows. It may overlay a product's input.
    """

    values: torch.Tensor
    scales_T: torch.Tensor
    product: torch.Tensor

    def rows(self, num_rows: int, width: int) -> Fp8Rows:
        """Return the room for rows, which the next product reads; there is room for one product's rows at a time."""
        return Fp8Rows(self.values[: num_rows * width].view(num_rows, width), self.scales_T[:num_rows].view(-1, 1))

    def product_like(self, hidden_MN: torch.Tensor) -> torch.Tensor:
        """Return the room for a product that is then added to `hidden`."""
        return self.product[: hidden_MN.numel()].view(hidden_MN.shape)
