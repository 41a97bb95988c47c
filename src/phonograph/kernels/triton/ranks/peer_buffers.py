"""Memory that ranks on GPUs write for each other, and how programs send their rows and take the rows of others.

Shapes: W ranks that exchange rows, R most rows at a time, F numbers of a row.

1. Each rank has a buffer [3, W, R, F] that the others can write, filled with -0.0, which no row has: a -0.0 is sent as
   0.0. The program of a row stores it into the place of its rank in another rank's buffer.
2. That rank reads its own buffer until none of the row's numbers is -0.0. A number that is not is complete, so that
   nothing is ordered by fences, and one trip is enough.
3. A row takes the three parts of the buffer in turn; its counter in device memory says which. A program fills the part
   of the time before with -0.0 again. Its own rank has read all of it, and no other rank writes there until it has the
   rank's row of the next time, which is sent by a later kernel.
4. A spin ends when `limit` times have passed, which another stream can lower. The row is NaN then, and `limit` 0.

    buffer of rank 1, part t     | from rank 0, row 0 | row 1 | ... | from rank 1: unused | from rank 2, row 0 | ...
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PARTS = 3
_PARTS = tl.constexpr(PARTS)


class PeerBuffers(NamedTuple):
    """Memory by which a rank exchanges rows with others.

    Attributes:
        own: [3, W, R, F], in the type of the rows; all of it is -0.0 at first.
        offsets: int64 [W], from this rank's buffer to the buffer of each rank, in numbers of a row; multiples of 8.
        counters: int32 [R], the part that a row takes next; 0 at first.
        limit: int32 [1], times that a program looks for a row.
        rank: number of this rank among the W.
    """

    own: torch.Tensor
    offsets: torch.Tensor
    counters: torch.Tensor
    limit: torch.Tensor
    rank: int

    @property
    def max_rows(self) -> int:
        """Most rows at a time."""
        return self.own.shape[2]

    def take(self, x_TF: torch.Tensor) -> bool:
        """Return True if rows of this size and type can be exchanged here, `max_rows` at a time."""
        return x_TF.ndim == 2 and x_TF.shape[1] == self.own.shape[3] and x_TF.dtype == self.own.dtype


@triton.jit
def as_integers(own_ptr):
    """Return this rank's buffer as a pointer to integers, which have the same size as its numbers."""
    bits: tl.constexpr = tl.int16 if own_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    return own_ptr.to(tl.pointer_type(bits))


@triton.jit
def sent_bits(x):
    """Return the bits of numbers as integers of the same size. -0.0 becomes 0.0."""
    bits: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    empty: tl.constexpr = -(1 << 15) if x.dtype.primitive_bitwidth == 16 else -(1 << 31)
    x = x.to(bits, bitcast=True)
    return tl.where(x == empty, tl.zeros_like(x), x)


@triton.jit
def place_of(part, rank, row, NUM_RANKS: tl.constexpr, MAX_ROWS: tl.constexpr):
    """Return the number of the row that a rank sends, among all rows of a buffer."""
    return (part * NUM_RANKS + rank) * MAX_ROWS + row


@triton.jit
def to_peer(own, offsets_ptr, other):
    """Return the address of another rank's buffer, as integers like `own`."""
    return own + tl.multiple_of(tl.load(offsets_ptr + other), 8)


@triton.jit
def send_to_all(own, offsets_ptr, place, column, mine, valid, rank, WIDTH: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Store integers of this rank's row into the buffers of all other ranks."""
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            tl.store(to_peer(own, offsets_ptr, other) + place * WIDTH + column, mine, valid)


@triton.jit
def received(source, mine, valid, is_own, limit_ptr):
    """Return the integers that another rank has sent, or `mine` for this rank, and whether some never came.

    Args:
        source: pointers to this rank's buffer.
        mine: integers of this rank.
        valid: mask of both.
        is_own: the row comes from this rank.
        limit_ptr: see `PeerBuffers`.
    """
    empty: tl.constexpr = -(1 << 15) if mine.dtype.primitive_bitwidth == 16 else -(1 << 31)
    theirs = mine
    # 1 while numbers are missing, 2 from the limit on. Threads may read unlike limits; all get the maximum.
    missing = tl.where(is_own, 0, 1)
    times = 0
    while missing == 1:
        times += 1
        state = tl.where(times < tl.load(limit_ptr, volatile=True), 1, 2)
        theirs = tl.load(source, valid, other=0, volatile=True)
        found = tl.where(theirs == empty, state, 0)
        missing = tl.max(found)
    if missing > 0:
        tl.store(limit_ptr, 0)
    return theirs, missing > 0


@triton.jit
def clear_before(
    own, part, row, column, valid, rank, WIDTH: tl.constexpr, NUM_RANKS: tl.constexpr, MAX_ROWS: tl.constexpr
):
    """Fill what other ranks sent for the row the time before with -0.0."""
    bits: tl.constexpr = own.dtype.element_ty
    empty: tl.constexpr = -(1 << 15) if bits.primitive_bitwidth == 16 else -(1 << 31)
    for other in tl.static_range(NUM_RANKS):
        place = place_of((part + _PARTS - 1) % _PARTS, other, row, NUM_RANKS, MAX_ROWS)
        tl.store(own + place * WIDTH + column, tl.full(column.shape, empty, bits), valid & (other != rank))


@triton.jit
def next_part(counters_ptr, row, part):
    """Let the row take the next part. All threads must have read the counter: a loop of `received` joins them."""
    tl.store(counters_ptr + row, (part + 1) % _PARTS)
