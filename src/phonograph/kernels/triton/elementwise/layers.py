"""Norms, activation, embedding and gathers between a decoder's matrix products, each in one kernel.

Shapes: T tokens, N rows, E hidden size, I intermediate size, V vocabulary. Rows are contiguous. Sizes are constants of
the model, so they are compiled in; the number of rows is the grid.

The arithmetic is the same as in `kernels/torch/layers.py`: RMSNorm (Zhang and Sennrich, 2019) in float32, with the
normalised value rounded to the model's dtype before the weight. Results for products with FP8 activations are rounded
in the same kernel.

    norm, FP8 activation   | row 0 | row 1 | ...                            a program a row, because of its sum or scale
    activation, gather     | row 0, piece 0 | row 0, piece 1 | row 1, ...   a program 1024 columns
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from phonograph.kernels.fp8_activations import Rows, numbers_and_scales
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_row, warps_of_row
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_PIECE = 1024
"""Elements of a program: 16 bytes a thread and operand, so that all loads are in flight at the same time."""


def embed_and_norm(
    input_ids_T: torch.Tensor,
    embedding_VE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    hidden_TE: torch.Tensor,
    normed: Rows,
) -> None:
    """Compute hidden = embedding[input_ids] and normed = rms_norm(hidden)."""
    _norm(embedding_VE, input_ids_T, weight_E, eps, hidden_TE, normed)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: Rows) -> None:
    """Compute out = x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    _norm(x_TE, None, weight_E, eps, None, out)


def add_and_norm(x_TE: torch.Tensor, hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, normed: Rows) -> None:
    """Compute hidden += x, in place, and normed = rms_norm(hidden)."""
    _norm(hidden_TE, None, weight_E, eps, hidden_TE, normed, added=x_TE)


def gather_and_norm(
    hidden_TE: torch.Tensor, rows_N: torch.Tensor, weight_E: torch.Tensor, eps: float, out_NE: torch.Tensor
) -> None:
    """Compute out = rms_norm(hidden[rows]); rows int64."""
    _norm(hidden_TE, rows_N, weight_E, eps, None, out_NE)


def gather_rows(source_TX: torch.Tensor, rows_N: torch.Tensor, out_NX: torch.Tensor) -> None:
    """Compute out = source[rows]; rows int64, any strides between rows."""
    _gather(_gather_kernel, source_TX, rows_N, out_NX)


def gather_columns(source_TX: torch.Tensor, columns_I: torch.Tensor, out_TI: torch.Tensor) -> None:
    """Compute out = source[:, columns]; columns int64, a constant of the model; any strides between rows."""
    _gather(_gather_columns_kernel, source_TX, columns_I, out_TI)


def _gather(kernel: Any, source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    num_rows, width = out.shape
    block = min(_PIECE, triton.next_power_of_2(width))
    kernel[(num_rows, triton.cdiv(width, block))](
        source, index, out, source.stride(0), out.stride(0), WIDTH=width, BLOCK=block, **pdl_options(),
        num_warps=max(1, block // 256),
    )  # fmt: skip


def _norm(
    source: torch.Tensor,
    rows: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kept: torch.Tensor | None,
    out: Rows,
    *,
    added: torch.Tensor | None = None,
) -> None:
    values, scales = numbers_and_scales(out)
    num_rows, width = values.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        source, rows, added, weight, kept, values, scales, eps, WIDTH=width, BLOCK=block, **pdl_options(),
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    source_ptr,
    rows_ptr,
    out_ptr,
    source_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows_ptr + row)
    x = tl.load(source_ptr + source * source_stride + column, column < WIDTH)
    tl.store(out_ptr + row * out_stride + column, x, column < WIDTH)


@triton.jit
def _gather_columns_kernel(
    source_ptr,
    columns_ptr,
    out_ptr,
    source_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(columns_ptr + column, column < WIDTH, other=0)  # a constant, so before the wait
    pdl_begin(PDL)
    x = tl.load(source_ptr + row * source_stride + source, column < WIDTH)
    tl.store(out_ptr + row * out_stride + column, x, column < WIDTH)


@triton.jit
def _norm_kernel(
    source_ptr,
    rows_ptr,
    added_ptr,
    weight_ptr,
    kept_ptr,
    out_ptr,
    scales_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    weight = tl.load(weight_ptr + column, valid, other=0.0)  # a constant, so before the wait
    pdl_begin(PDL)
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row).to(tl.int64)
    x = tl.load(source_ptr + source * WIDTH + column, valid, other=0.0)
    if added_ptr is not None:
        added = tl.load(added_ptr + row * WIDTH + column, valid, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    if kept_ptr is not None:
        tl.store(kept_ptr + row * WIDTH + column, x, valid)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    out = (wide * inverse).to(x.dtype) * weight
    if scales_ptr is not None:
        out, scale = quantize_row(out.to(tl.float32), out_ptr.dtype.element_ty)
        tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * WIDTH + column, out, valid)


def silu_and_mul(gate_up_T2I: torch.Tensor, out: Rows) -> None:
    """Compute out = silu(gate) * up; gates are the first I columns, and `out` may overlay them."""
    # FP8 results have one scale a row, so a program takes a whole row.
    values, scales = numbers_and_scales(out)
    num_rows, width = values.shape
    block = triton.next_power_of_2(width)
    if scales is None:
        block = min(_PIECE if num_rows > 8 else 256, block)
    _silu_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up_T2I,
        values,
        scales,
        values.stride(0),
        WIDTH=width,
        BLOCK=block,
        **pdl_options(),
        num_warps=warps_of_row(block),
    )


@triton.jit
def _silu_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + column, valid, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + column, valid, other=0.0)
    wide = gate.to(tl.float32)
    # The activation is rounded before the product, as torch does it.
    out = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
    if scales_ptr is not None:
        out, scale = quantize_row(out.to(tl.float32), out_ptr.dtype.element_ty)
        tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * out_stride + column, out, valid)
