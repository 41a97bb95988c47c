"""Rows of several ranks side by side on each of them, over peer memory (`peer_buffers`): queries of all heads.

Shapes: T rows, F numbers of a rank's row, W ranks.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

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


def share_rows(x_TF: torch.Tensor, buffers: PeerBuffers, out_TWF: torch.Tensor) -> None:
    """Bring the rows of all ranks together on each of them.

    Args:
        x_TF: rows of this rank; numbers of a row lie together.
        buffers: of this rank.
        out_TWF: result, contiguous; -0.0 arrives as 0.0.
    """
    num_rows, width = x_TF.shape
    block = triton.next_power_of_2(width)
    _share_rows_kernel[(num_rows,)](
        x_TF, x_TF.stride(0), out_TWF, buffers.own, buffers.offsets, buffers.counters, buffers.limit, buffers.rank,
        WIDTH=width, BLOCK=block, NUM_RANKS=buffers.own.shape[1], MAX_ROWS=buffers.max_rows, **pdl_options(),
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def _share_rows_kernel(
    x_ptr,
    stride,
    out_ptr,
    own_ptr,
    offsets_ptr,
    counters_ptr,
    limit_ptr,
    rank,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program `row` sends a row of this rank and takes the same row of the others."""
    number: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    own = as_integers(own_ptr)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    pdl_begin(PDL)
    part = tl.load(counters_ptr + row)
    mine = sent_bits(tl.load(x_ptr + row * stride + column, valid, other=0.0))
    place = place_of(part, rank, row, NUM_RANKS, MAX_ROWS)
    send_to_all(own, offsets_ptr, place, column, mine, valid, rank, WIDTH, NUM_RANKS)
    for other in tl.static_range(NUM_RANKS):
        source = own + place_of(part, other, row, NUM_RANKS, MAX_ROWS) * WIDTH + column
        theirs, missing = received(source, mine, valid, other == rank, limit_ptr)
        theirs = tl.where(missing, float("nan"), theirs.to(number, bitcast=True).to(tl.float32)).to(number)
        tl.store(out_ptr + (row * NUM_RANKS + other) * WIDTH + column, theirs, valid)
    clear_before(own, part, row, column, valid, rank, WIDTH, NUM_RANKS, MAX_ROWS)
    next_part(counters_ptr, row, part)
