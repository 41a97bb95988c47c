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


def rms_norm(
    x_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    out: Rows,
    second: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Compute out = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x_TE: rows.
        weight_E: weights, of their type or float32.
        eps: added to the mean.
        out: result.
        second: weights of another norm of the same rows, and its result, of their type.
    """
    _norm(x_TE, None, weight_E, eps, None, out, second=second)


def add_and_norm(
    x_TE: torch.Tensor,
    hidden_TE: torch.Tensor,
    weight_E: torch.Tensor | None,
    eps: float,
    normed: Rows | None,
    *,
    x_weight_E: torch.Tensor | None = None,
    factor: float = 1.0,
    scalar: torch.Tensor | None = None,
) -> None:
    """Compute hidden = (hidden + factor * y) * scalar, in place, and normed = rms_norm(hidden).

    Args:
        x_TE: the rows y, or those whose norm y is; may overlay `normed`.
        hidden_TE: the stream.
        weight_E: weights of the norm of the sum; None for no norm, and nothing in `normed`.
        eps: of both norms.
        normed: result, or None.
        x_weight_E: weights of the norm of `x_TE`; None for y = x.
        factor: factor of y.
        scalar: [1], factor of the sum; None for 1.
    """
    _norm(
        hidden_TE,
        None,
        weight_E,
        eps,
        hidden_TE,
        normed,
        added=x_TE,
        added_weight=x_weight_E,
        factor=factor,
        scalar=scalar,
    )


def gather_and_norm(
    hidden_TE: torch.Tensor, rows_N: torch.Tensor, weight_E: torch.Tensor, eps: float, out_NE: torch.Tensor
) -> None:
    """Compute out = rms_norm(hidden[rows]); rows int64."""
    _norm(hidden_TE, rows_N, weight_E, eps, None, out_NE)


def gather_rows(source_TX: torch.Tensor, rows_N: torch.Tensor, out_NX: torch.Tensor) -> None:
    """Compute out = source[rows]; rows int32 or int64, any strides between rows."""
    _gather(_gather_kernel, source_TX, rows_N, out_NX, None, None)


def gather_part(source_PX: torch.Tensor, rows_N: torch.Tensor, first: int, out_NX: torch.Tensor) -> None:
    """Compute out = source[rows - first], and zeros for rows that `source`, a part of a table, does not have.

    Args:
        source_PX: rows from `first` on.
        rows_N: int32 or int64.
        first: number of the first row.
        out_NX: result; any strides between rows.
    """
    _gather(_gather_kernel, source_PX, rows_N, out_NX, first, len(source_PX))


def gather_columns(source_TX: torch.Tensor, columns_I: torch.Tensor, out_TI: torch.Tensor) -> None:
    """Compute out = source[:, columns]; columns int64, a constant of the model; any strides between rows."""
    _gather(_gather_columns_kernel, source_TX, columns_I, out_TI)


def _gather(kernel: Any, source: torch.Tensor, index: torch.Tensor, out: torch.Tensor, *part: int | None) -> None:
    num_rows, width = out.shape
    block = min(_PIECE, triton.next_power_of_2(width))
    kernel[(num_rows, triton.cdiv(width, block))](
        source, index, out, source.stride(0), out.stride(0), *part, WIDTH=width, BLOCK=block, **pdl_options(),
        num_warps=max(1, block // 256),
    )  # fmt: skip


def _norm(
    source: torch.Tensor,
    rows: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    kept: torch.Tensor | None,
    out: Rows | None,
    *,
    added: torch.Tensor | None = None,
    added_weight: torch.Tensor | None = None,
    factor: float = 1.0,
    scalar: torch.Tensor | None = None,
    second: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    values, scales = (None, None) if out is None else numbers_and_scales(out)
    num_rows, width = source.shape if values is None else values.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        source, rows, added, added_weight, scalar, weight, kept, values, scales, *second, eps, FACTOR=factor,
        WIDTH=width, BLOCK=block, **pdl_options(), num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def weighted(normal, weight, dtype: tl.constexpr):
    """Return float32 numbers times weights, in `dtype`. They are rounded first if the weights are in `dtype`."""
    if weight.dtype == dtype:
        return normal.to(dtype) * weight
    return (normal * weight).to(dtype)


@triton.jit
def normal(x, eps, width):
    """Return a row over the root of its mean square, in float32. Numbers after the first `width` are 0."""
    wide = x.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)


@triton.jit
def gelu_slope(x):
    """Return y such that x * sigmoid(y) is GELU's approximation by tanh (Hendrycks 2016, arXiv:1606.08415)."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit(do_not_specialize=["first", "num_rows"])
def _gather_kernel(
    source_ptr,
    rows_ptr,
    out_ptr,
    source_stride,
    out_stride,
    first,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows_ptr + row).to(tl.int64)
    valid = column < WIDTH
    if first is not None:
        source -= first
        valid &= (source >= 0) & (source < num_rows)
    x = tl.load(source_ptr + source * source_stride + column, valid, other=0.0)
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
    added_weight_ptr,
    scalar_ptr,
    weight_ptr,
    kept_ptr,
    out_ptr,
    scales_ptr,
    second_weight_ptr,
    second_ptr,
    eps,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    # Constants, so before the wait.
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, valid, other=0.0)
    if added_weight_ptr is not None:
        added_weight = tl.load(added_weight_ptr + column, valid, other=0.0)
    if scalar_ptr is not None:
        scalar = tl.load(scalar_ptr)
    if second_ptr is not None:
        second_weight = tl.load(second_weight_ptr + column, valid, other=0.0)
    pdl_begin(PDL)
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row).to(tl.int64)
    x = tl.load(source_ptr + source * WIDTH + column, valid, other=0.0)
    if added_ptr is not None:
        added = tl.load(added_ptr + row * WIDTH + column, valid, other=0.0).to(tl.float32)
        if added_weight_ptr is not None:
            added = weighted(normal(added, eps, WIDTH), added_weight, x.dtype).to(tl.float32)
        if FACTOR != 1.0:
            added *= FACTOR
        x = (x.to(tl.float32) + added).to(x.dtype)
    if scalar_ptr is not None:
        x = x * scalar
    if kept_ptr is not None:
        tl.store(kept_ptr + row * WIDTH + column, x, valid)
    if weight_ptr is not None:
        row_normal = normal(x, eps, WIDTH)
        out = weighted(row_normal, weight, x.dtype)
        if scales_ptr is not None:
            out, scale = quantize_row(out.to(tl.float32), out_ptr.dtype.element_ty)
            tl.store(scales_ptr + row, scale)
        tl.store(out_ptr + row * WIDTH + column, out, valid)
        if second_ptr is not None:
            tl.store(second_ptr + row * WIDTH + column, weighted(row_normal, second_weight, x.dtype), valid)


def norm_queries_and_keys(qkv_TF: torch.Tensor, weights_XD: torch.Tensor, num_query_heads: int, eps: float) -> None:
    """Norm a token's queries together, and its keys together, in place.

    Args:
        qkv_TF: query heads, key heads, value heads; rows at any stride.
        weights_XD: [H + K, D] weights, query heads first.
        num_query_heads: H.
        eps: of the norms.
    """
    heads, head_size = weights_XD.shape
    queries, keys = num_query_heads * head_size, (heads - num_query_heads) * head_size
    block = triton.next_power_of_2(max(queries, keys))
    _joint_norm_kernel[(qkv_TF.shape[0], 2)](
        qkv_TF, weights_XD, eps, qkv_TF.stride(0), QUERIES=queries, KEYS=keys, BLOCK=block, **pdl_options(),
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def _joint_norm_kernel(
    qkv_ptr,
    weight_ptr,
    eps,
    qkv_stride,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    is_keys = tl.program_id(1)
    width = QUERIES + is_keys * (KEYS - QUERIES)
    column = tl.arange(0, BLOCK)
    valid = column < width
    column += is_keys * QUERIES
    weight = tl.load(weight_ptr + column, valid, other=0.0)  # a constant, so before the wait
    pdl_begin(PDL)
    pointer = qkv_ptr + tl.program_id(0).to(tl.int64) * qkv_stride + column
    x = tl.load(pointer, valid, other=0.0)
    tl.store(pointer, weighted(normal(x, eps, width), weight, x.dtype), valid)


def silu_and_mul(gate_up_T2I: torch.Tensor, out: Rows) -> None:
    """Compute out = silu(gate) * up; gates are the first I columns, and `out` may overlay them."""
    _activate(gate_up_T2I, out, gelu=False)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor, out: Rows) -> None:
    """Compute out = gelu(gate) * up, with the approximation by tanh; as `silu_and_mul`."""
    _activate(gate_up_T2I, out, gelu=True)


ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
"""Activations of gates by their names in a model's specification."""


def _activate(gate_up_T2I: torch.Tensor, out: Rows, *, gelu: bool) -> None:
    # FP8 results have one scale a row, so a program takes a whole row.
    values, scales = numbers_and_scales(out)
    num_rows, width = values.shape
    block = triton.next_power_of_2(width)
    if scales is None:
        block = min(_PIECE if num_rows > 8 else 256, block)
    _activation_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up_T2I,
        values,
        scales,
        values.stride(0),
        WIDTH=width,
        BLOCK=block,
        GELU=gelu,
        **pdl_options(),
        num_warps=warps_of_row(block),
    )


@triton.jit
def _activation_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + column, valid, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + column, valid, other=0.0)
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:
        slope = gelu_slope(wide)
    # The activation is rounded before the product, as torch does it.
    out = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype) * up
    if scales_ptr is not None:
        out, scale = quantize_row(out.to(tl.float32), out_ptr.dtype.element_ty)
        tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * out_stride + column, out, valid)
