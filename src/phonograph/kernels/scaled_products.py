"""Rule of products with FP8 activations, apart from the kernels so that memory can be planned without Triton.

The weights are FP8 with one scale an output. Rows of activations are rounded to FP8 with one scale a row, and
the FP8 tensor cores multiply both: through a kernel of ours for Hopper (`gemm_ring`), or by `torch._scaled_mm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MULTIPLE = 16
_MAX_INPUTS = 1 << 16
"""Columns of a row that one program rounds."""
_CUDA = tuple(int(part) for part in (torch.version.cuda or "13.0").split(".")[:2])


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


def max_16_bit_rows(has_ring: bool) -> int:
    """Return the rows up to which activations stay in 16 bits.

    None do where products go through `gemm_ring`, which reads FP8 weights for FP8 rows faster than another kernel does
    for rows in 16 bits. `torch._scaled_mm` is slower with so few rows.
    """
    return 0 if has_ring else 16


def device_has_scaled_products(capability: tuple[int, int], dtype: str) -> bool:
    """Return True if a GPU multiplies FP8 rows and weights with a scale each, into `dtype`.

    Float16 needs the product of cuBLAS; torch's own, for other GPUs and for CUDA before 12.9, writes bfloat16.
    """
    if dtype == "float16":
        return capability[0] == 9 and _CUDA >= (12, 9)
    return dtype == "bfloat16" and capability >= (8, 9)


def takes_scaled_product(num_outputs: int, num_inputs: int) -> bool:
    """Return True if `torch._scaled_mm` multiplies FP8 weights of these sizes."""
    return num_outputs % _MULTIPLE == 0 and num_inputs % _MULTIPLE == 0 and num_inputs <= _MAX_INPUTS
