"""Rows of encoders between matrix products, each in one kernel: layer norms, embeddings, activations, and means.

Shapes: T tokens, R prompts, E hidden size, I intermediate size. Rows are contiguous. The arithmetic is that of
`kernels/torch/layers.py`, in float32 inside a kernel.

    layer norm, embedding  | row 0 | row 1 | ...                                a program a row, because of its sums
    activation             | row 0, piece 0 | row 0, piece 1 | row 1, ...       a program 1024 columns
    mean                   | prompt 0, piece 0 | prompt 0, piece 1 | prompt 1   a program 128 columns of a prompt, whose
                                                                                rows it adds in their order
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.core.token_types import ID_MASK, TYPE_SHIFT
from phonograph.kernels.triton.elementwise.layers import gelu_slope
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_PIECE = 1024
_MEAN_PIECE = 128
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}


def layer_norm(
    source_TE: torch.Tensor,
    weight_2E: torch.Tensor,
    eps: float,
    out_NE: torch.Tensor,
    *,
    rows_N: torch.Tensor | None = None,
    added_TE: torch.Tensor | None = None,
    kept_TE: torch.Tensor | None = None,
) -> None:
    """Compute x = source[rows] + added, and out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    Args:
        source_TE: the stream.
        weight_2E: weight and bias.
        eps: added to the variance.
        out_NE: result; may be the stream, or what is added.
        rows_N: int32 or int64, rows of the stream; None for all.
        added_TE: rows that are added, or None.
        kept_TE: gets x, or None.
    """
    num_rows, width = out_NE.shape
    block = triton.next_power_of_2(width)
    _layer_norm_kernel[(num_rows,)](
        source_TE, rows_N, added_TE, kept_TE, weight_2E, out_NE, eps, WIDTH=width, BLOCK=block, **pdl_options(),
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


def embed(
    input_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    words_VE: torch.Tensor,
    positions_PE: torch.Tensor | None,
    types_XE: torch.Tensor | None,
    weight_2E: torch.Tensor | None,
    eps: float,
    out_TE: torch.Tensor,
) -> None:
    """Compute out = layer_norm(words[id] + positions[position] + types[type]); None for what there is not.

    Args:
        input_ids_T: int32, tokens with their types (`core.token_types`) if there are types.
        positions_T: int64, row of each token's position.
        words_VE: embeddings of tokens.
        positions_PE: learned positions, or None.
        types_XE: types of tokens, or None.
        weight_2E: weight and bias of the norm, or None.
        eps: of the norm.
        out_TE: result.
    """
    num_rows, width = out_TE.shape
    block = triton.next_power_of_2(width)
    _embed_kernel[(num_rows,)](
        input_ids_T, positions_T, words_VE, positions_PE, types_XE, weight_2E, out_TE, eps, WIDTH=width, BLOCK=block,
        MASK=ID_MASK, SHIFT=TYPE_SHIFT, **pdl_options(), num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


def activate(x_TX: torch.Tensor, out_TI: torch.Tensor, activation: str) -> None:
    """Compute out = activation(x) of [T, I], or activation(gate) * up of [T, 2I], gates first; out may overlay them."""
    num_rows, width = out_TI.shape
    block = min(_PIECE, triton.next_power_of_2(width))
    _activate_kernel[(num_rows, triton.cdiv(width, block))](
        x_TX, out_TI, x_TX.stride(0), out_TI.stride(0), WIDTH=width, GATED=x_TX.shape[1] > width, BLOCK=block,
        ACTIVATION=_ACTIVATIONS[activation], **pdl_options(), num_warps=max(1, block // 256),
    )  # fmt: skip


def mean_rows(rows_TE: torch.Tensor, query_start_loc: torch.Tensor, out_RE: torch.Tensor) -> None:
    """Compute the mean of the rows of each prompt; int32 [R+1] starts, float32 results, 0 for an empty slot."""
    num_prompts, width = out_RE.shape
    _mean_kernel[(num_prompts, triton.cdiv(width, _MEAN_PIECE))](
        rows_TE, query_start_loc, out_RE, WIDTH=width, BLOCK=_MEAN_PIECE, ROWS=8, **pdl_options(), num_warps=4
    )


@triton.jit
def _normed(x, weight, bias, eps, valid, WIDTH: tl.constexpr):
    """Return the layer norm of a row of float32 numbers."""
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(valid, x - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    return centred * inverse * weight + bias


@triton.jit
def _layer_norm_kernel(
    source_ptr,
    rows_ptr,
    added_ptr,
    kept_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    # Constants, so before the wait.
    weight = tl.load(weight_ptr + column, valid, other=0.0).to(tl.float32)
    bias = tl.load(weight_ptr + WIDTH + column, valid, other=0.0).to(tl.float32)
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
    out = _normed(x.to(tl.float32), weight, bias, eps, valid, WIDTH)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), valid)


@triton.jit
def _embed_kernel(
    ids_ptr,
    positions_ptr,
    words_ptr,
    table_ptr,
    types_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, valid, other=0.0).to(tl.float32)
        bias = tl.load(weight_ptr + WIDTH + column, valid, other=0.0).to(tl.float32)
    pdl_begin(PDL)
    token = tl.load(ids_ptr + row).to(tl.int64)
    word = token
    if types_ptr is not None:
        word = token & MASK
    x = tl.load(words_ptr + word * WIDTH + column, valid, other=0.0)
    if types_ptr is not None:
        x += tl.load(types_ptr + (token >> SHIFT) * WIDTH + column, valid, other=0.0)
    if table_ptr is not None:
        position = tl.load(positions_ptr + row).to(tl.int64)
        x += tl.load(table_ptr + position * WIDTH + column, valid, other=0.0)
    if weight_ptr is not None:
        out = _normed(x.to(tl.float32), weight, bias, eps, valid, WIDTH).to(x.dtype)
        tl.store(out_ptr + row * WIDTH + column, out, valid)
    else:
        tl.store(out_ptr + row * WIDTH + column, x, valid)


@triton.jit
def _activate_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, valid, other=0.0)
    wide = x.to(tl.float32)
    if ACTIVATION == 0:
        out = wide / (1.0 + tl.exp(-wide))
    elif ACTIVATION == 1:
        out = wide / (1.0 + tl.exp(-gelu_slope(wide)))
    elif ACTIVATION == 2:
        out = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        out = tl.maximum(wide, 0.0)
        if ACTIVATION == 4:
            out *= out
    # The activation is rounded before the product, as torch does it.
    out = out.to(x.dtype)
    if GATED:
        out *= tl.load(x_ptr + row * x_stride + WIDTH + column, valid, other=0.0)
    tl.store(out_ptr + row * out_stride + column, out, valid)


@triton.jit
def _mean_kernel(
    rows_ptr,
    starts_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    prompt = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    start = tl.load(starts_ptr + prompt)
    end = tl.load(starts_ptr + prompt + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & valid[None, :]
        x = tl.load(rows_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], inside, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    count = tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out_ptr + prompt * WIDTH + column, total / count, valid)
