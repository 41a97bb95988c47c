"""One-shot sums of rows over ranks, by stores to the memory of other GPUs.

Shapes: T rows, E hidden size, W ranks, R most rows of a sum.

1. Each rank has a buffer [3, W, R, E] that the others can write, filled with -0.0, which no sum has: a part of -0.0 is
   sent as 0.0. The program of a row stores the row's part into the place of its rank in every other rank's buffer.
2. It then reads the parts of the others from its own buffer until none of their numbers is -0.0. A number that is not
   is complete, so that nothing is ordered by fences, and one trip is enough.
3. It adds the parts in the order of the ranks in float32: all ranks get the same bits. It adds the sum to the residual
   stream, and norms the result for the product that follows.
4. A row takes the three parts of the buffer in turn; its counter in device memory says which. A sum fills the part of
   the sum before with -0.0 again. Its own rank has read all of it, and no other rank writes there until it has the
   rank's row of the next sum, which is sent by a later kernel.
5. A spin ends when `limit` times have passed, which another stream can lower. The row is NaN then, and `limit` 0.

    buffer of rank 1, part t     | from rank 0, row 0 | row 1 | ... | from rank 1: unused | from rank 2, row 0 | ...
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from phonograph.kernels.fp8_activations import Rows, numbers_and_scales
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_row
from phonograph.kernels.triton.elementwise.layers import normal, weighted
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

PARTS = 3
_PARTS = tl.constexpr(PARTS)


class PeerBuffers(NamedTuple):
    """Memory of the sums of a rank.

    Attributes:
        own: [3, W, R, E], in the type of the rows; all of it is -0.0 at first.
        offsets: int64 [W], from the buffer of this rank to those of all ranks, in numbers of a row; multiples of 8.
        counters: int32 [R], the part that a row takes next; 0 at first.
        limit: int32 [1], times that a program looks for a part.
        rank: number of this rank.
    """

    own: torch.Tensor
    offsets: torch.Tensor
    counters: torch.Tensor
    limit: torch.Tensor
    rank: int

    @property
    def max_rows(self) -> int:
        """Most rows of a sum."""
        return self.own.shape[2]

    def take(self, x_TE: torch.Tensor) -> bool:
        """Return True if rows of this size and type can be summed here, `max_rows` at a time."""
        return x_TE.ndim == 2 and x_TE.shape[1] == self.own.shape[3] and x_TE.dtype == self.own.dtype


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
    """Program `row` sums a row. Rows of 16 bits travel as int16, of 32 bits as int32, -0.0 as the lowest of these."""
    number: tl.constexpr = x_ptr.dtype.element_ty
    bits: tl.constexpr = tl.int16 if number.primitive_bitwidth == 16 else tl.int32
    empty: tl.constexpr = -(1 << 15) if number.primitive_bitwidth == 16 else -(1 << 31)
    row = tl.program_id(0).to(tl.int64)
    own = own_ptr.to(tl.pointer_type(bits))
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    # Constants, so before the wait.
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, valid, other=0.0)
    pdl_begin(PDL)
    part = tl.load(counters_ptr + row)
    mine = tl.load(x_ptr + row * WIDTH + column, valid, other=0.0).to(bits, bitcast=True)
    mine = tl.where(mine == empty, tl.zeros_like(mine), mine)
    to = ((part * NUM_RANKS + rank) * MAX_ROWS + row) * WIDTH
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            there = own + (tl.multiple_of(tl.load(offsets_ptr + other), 8) + to)
            tl.store(there + column, mine, valid)

    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(NUM_RANKS):
        source = own + ((part * NUM_RANKS + other) * MAX_ROWS + row) * WIDTH + column
        theirs = mine
        # 1 while numbers are missing, 2 from the limit on. Threads may read unlike limits; all get the maximum.
        missing = tl.where(other == rank, 0, 1)
        times = 0
        while missing == 1:
            times += 1
            state = tl.where(times < tl.load(limit_ptr, volatile=True), 1, 2)
            theirs = tl.load(source, valid, other=0, volatile=True)
            missing = tl.max(tl.where(theirs == empty, state, 0), 0)
        if missing > 0:
            tl.store(limit_ptr, 0)
        added = theirs.to(number, bitcast=True).to(tl.float32)
        total += tl.where(missing > 0, float("nan"), added)

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

    before = (part + _PARTS - 1) % _PARTS
    for other in tl.static_range(NUM_RANKS):
        source = own + ((before * NUM_RANKS + other) * MAX_ROWS + row) * WIDTH + column
        tl.store(source, tl.full([BLOCK], empty, bits), valid & (other != rank))
    # All threads have read the counter: the loops above join them.
    tl.store(counters_ptr + row, (part + 1) % _PARTS)
