"""Rounding of rows to FP8 (e4m3) with one scale a row, for products on FP8 tensor cores.

Shapes: M rows, K columns.

The scale is the row's largest magnitude divided by 448, the largest of the type. A program takes one row:

    programs   | row 0, K columns | row 1, K columns | ...
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.fp8_activations import Fp8Rows
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_LARGEST = tl.constexpr(448.0)
_SMALLEST_ROW = tl.constexpr(1e-30)
"""Lower bound of a row's largest magnitude. A row of zeros stays one, and the inverse of its scale is finite."""


def quantize_rows(x_MK: torch.Tensor, out: Fp8Rows) -> None:
    """Compute scales = max(abs(x)) / 448 of each row, and values = x / scale.

    Args:
        x_MK: columns contiguous, rows at any stride.
        out: the result.
    """
    num_rows, width = x_MK.shape
    assert x_MK.stride(1) == 1 and out.values_MK.is_contiguous() and out.values_MK.shape == x_MK.shape
    block = triton.next_power_of_2(width)
    _quantize_rows_kernel[(num_rows,)](
        x_MK,
        *out,
        x_MK.stride(0),
        WIDTH=width,
        BLOCK=block,
        **pdl_options(),
        num_warps=warps_of_row(block),
    )


def warps_of_row(block: int) -> int:
    """Return the warps of a program that holds a row of that many elements."""
    return min(16 if block < 1 << 15 else 32, max(1, block // 256))


@triton.jit
def quantize_row(wide, kind: tl.constexpr):
    """Return a row in FP8 and its scale, from the row in float32. Numbers that are not a number remain so."""
    largest = tl.maximum(tl.max(tl.abs(wide), 0), _SMALLEST_ROW)
    scaled = wide * (_LARGEST / largest)
    # The quotient may round to a number above the largest.
    return tl.clamp(scaled, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(kind), largest / _LARGEST


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, valid, other=0.0)
    rounded, scale = quantize_row(x.to(tl.float32), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, rounded, valid)
    tl.store(scales_ptr + row, scale)
