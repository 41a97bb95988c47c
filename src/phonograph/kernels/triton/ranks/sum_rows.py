"""One-shot sums of rows over ranks, by stores to the memory of other GPUs (`peer_buffers`).

Shapes: T rows, E hidden size, W ranks, R most rows of a sum.

A program adds the parts of a row in the order of the ranks in float32: all ranks get the same bits. It adds the sum to
the residual stream, and norms the result for the product that follows.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.fp8_activations import Rows, numbers_and_scales
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_row
from phonograph.kernels.triton.elementwise.layers import normal, weighted
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options
from phonograph.kernels.triton.ranks.peer_buffers import (
    PeerBuffers,
    as_integers,
    clear_before,
    next_part,
    place_of,
    received,
    send_to_all,
    sent_bits,
)


def sum_rows(
    x_TE: torch.Tensor,
    buffers: PeerBuffers,
    hidden_TE: torch.Tensor | None = None,
    *,
    factor: float = 1.0,
    weight_E: torch.Tensor | None = None,
    eps: float = 0.0,
    normed: Rows | None = None,
) -> None:
    """Compute x = sum(x), or hidden += factor * sum(x) and normed = rms_norm(hidden).

    Args:
        x_TE: part of this rank, contiguous; may overlay `normed`. It is overwritten without `hidden_TE` only.
        buffers: of this rank.
        hidden_TE: the stream, or None.
        factor: factor of the sum.
        weight_E: weights of the norm; None for no norm, and nothing in `normed`.
        eps: of the norm.
        normed: result, or None.
    """
    values, scales = (None, None) if normed is None else numbers_and_scales(normed)
    num_rows, width = x_TE.shape
    num_ranks = buffers.own.shape[1]
    block = triton.next_power_of_2(width)
    _sum_rows_kernel[(num_rows,)](
        x_TE, hidden_TE, weight_E, values, scales, buffers.own, buffers.offsets, buffers.counters, buffers.limit,
        buffers.rank, eps, FACTOR=factor, WIDTH=width, BLOCK=block, NUM_RANKS=num_ranks, MAX_ROWS=buffers.max_rows,
        **pdl_options(), num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def _sum_rows_kernel(
    x_ptr,
    hidden_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    own_ptr,
    offsets_ptr,
    counters_ptr,
    limit_ptr,
    rank,
    eps,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `row` sums a row."""
    number: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    own = as_integers(own_ptr)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    # Constants, so before the wait.
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, valid, other=0.0)
    pdl_begin(PDL)
    part = tl.load(counters_ptr + row)
    mine = sent_bits(tl.load(x_ptr + row * WIDTH + column, valid, other=0.0))
    place = place_of(part, rank, row, NUM_RANKS, MAX_ROWS)
    send_to_all(own, offsets_ptr, place, column, mine, valid, rank, WIDTH, NUM_RANKS)

    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(NUM_RANKS):
        source = own + place_of(part, other, row, NUM_RANKS, MAX_ROWS) * WIDTH + column
        theirs, missing = received(source, mine, valid, other == rank, limit_ptr)
        total += tl.where(missing, float("nan"), theirs.to(number, bitcast=True).to(tl.float32))

    if hidden_ptr is None:
        tl.store(x_ptr + row * WIDTH + column, total.to(number), valid)
    else:
        if FACTOR != 1.0:
            total *= FACTOR
        x = (tl.load(hidden_ptr + row * WIDTH + column, valid, other=0.0).to(tl.float32) + total).to(number)
        tl.store(hidden_ptr + row * WIDTH + column, x, valid)
        if weight_ptr is not None:
            out = weighted(normal(x, eps, WIDTH), weight, number)
            if scales_ptr is not None:
                out, scale = quantize_row(out.to(tl.float32), out_ptr.dtype.element_ty)
                tl.store(scales_ptr + row, scale)
            tl.store(out_ptr + row * WIDTH + column, out, valid)

    clear_before(own, part, row, column, valid, rank, WIDTH, NUM_RANKS, MAX_ROWS)
    next_part(counters_ptr, row, part)
