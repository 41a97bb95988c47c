"""How the programs of a `span` pass rows to one another: memory that says of itself whether it has been written.

A barrier between two products costs what its parts cost one after another: what a program wrote must have reached the
second-level cache before its arrival may (half a microsecond on an H200), the arrival must reach it too, someone must
see it, and only then are the rows asked for. Here nobody waits for what was written to arrive. All of it begins as ones
in every bit, which no result is: what cannot be a number is written with a zero sign. So whoever reads sees what has
not come yet, and looks again. A counter that all programs add to, in no order with what they wrote, tells when looking
is worth it.

What was passed must be ones again before it is passed next. Each launch clears what the one before it used: that has
ended, and the next to use it has not begun. So there are at least two of everything, and launches take turns.

The counter is zero when a launch begins and when it has ended. Arrivals add up to 2^31, so the last one turns the sign
and leaves the other bits zero. Nothing has to be reset, and where the number of turns is odd, a last arrival that no
one waits for turns the sign back.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ALIGNED = 16
"""Values that begin every row, so that eight can be read at once."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one launch passes: rows [most rows, E or I], sums of squares float32 [tiles * most rows], and all of it as
    int32 words."""

    mlp_normed: torch.Tensor
    inner: torch.Tensor
    next_normed: torch.Tensor
    mlp_squares: torch.Tensor
    next_squares: torch.Tensor
    words: torch.Tensor


@dataclass(frozen=True, slots=True)
class Mail:
    """Rooms that launches use in turn, and the counter. For one stream."""

    rooms: list[Room]
    counter: torch.Tensor
    hidden: int
    intermediate: int
    most_rows: int


def make_mail(
    num_layers: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    most_rows: int = 16,
) -> Mail:
    """For launches of `num_layers` layers in turn, over and over: so many rooms that the first layer's is not the last
    layer's. Two for an even number of layers: 0.4 MB at E = 1024 and I = 3072. E and I are multiples of 8."""
    assert hidden % 8 == 0 and intermediate % 8 == 0, "rows are looked at again in eights"
    assert num_layers > 1, "a layer's launch clears what the layer before it used"
    count = next((count for count in range(2, num_layers) if num_layers % count == 0), max(2, num_layers))
    rooms = [_make_room(hidden, intermediate, dtype, device, most_rows) for _ in range(count)]
    return Mail(rooms, torch.zeros(1, dtype=torch.int32, device=device), hidden, intermediate, most_rows)


def _make_room(hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device, rows: int) -> Room:
    widths = [-(-size // _ALIGNED) * _ALIGNED for size in (hidden, intermediate, hidden)]
    # A tile has eight outputs at least.
    squares = -(-hidden // 8) * rows
    sizes = [rows * width // 2 for width in widths] + [squares, squares]
    words = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
    parts = words.split(sizes)
    tables = [part.view(dtype).view(rows, width) for part, width in zip(parts, widths, strict=False)]
    return Room(*tables, parts[3].view(torch.float32), parts[4].view(torch.float32), words)


@triton.jit
def clear(word_ptr, WORDS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The program's share of a room."""
    SHARE: tl.constexpr = (WORDS + PROGRAMS - 1) // PROGRAMS
    own = tl.arange(0, triton.next_power_of_2(SHARE))
    word = tl.program_id(0) * SHARE + own
    tl.store(word_ptr + word, tl.full((triton.next_power_of_2(SHARE),), -1, tl.int32), (own < SHARE) & (word < WORDS))


@triton.jit
def seen_rows(x, base_ptr, offset):
    """`x`, 16-bit, which was read from base + offset in eights at multiples of eight, once all of it has been written;
    those that are not read at all must be other than ones. `offset`: of the first of the eight."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred %there;
        .reg .b32 %most, %other;
        .reg .b64 %at;
        mov.b32 $0, $4;
        mov.b32 $1, $5;
        mov.b32 $2, $6;
        mov.b32 $3, $7;
        look_again:
        max.u16x2 %most, $0, $1;
        max.u16x2 %other, $2, $3;
        max.u16x2 %most, %most, %other;
        shr.u32 %other, %most, 16;
        and.b32 %most, %most, 0xffff;
        max.u32 %most, %most, %other;
        setp.ne.u32 %there, %most, 0xffff;
        @%there bra all_there;
        mad.wide.s32 %at, $8, 2, $16;
        ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [%at];
        bra look_again;
        all_there:
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,l,l,l,l,l,l,l,l",
        [x.to(tl.int16, bitcast=True), offset, base_ptr.to(tl.int64)],
        dtype=tl.int16,
        is_pure=False,
        pack=8,
    ).to(x.dtype, bitcast=True)


@triton.jit
def seen_words(x, ptr):
    """`x`, float32, which was read from `ptr`, once all of it has been written."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred %there;
        mov.b32 $0, $1;
        look_again:
        setp.ne.u32 %there, $0, 0xffffffff;
        @%there bra all_there;
        ld.relaxed.gpu.global.b32 $0, [$2];
        bra look_again;
        all_there:
        }
        """,
        "=&r,r,l",
        [x.to(tl.int32, bitcast=True), ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    ).to(tl.float32, bitcast=True)


@triton.jit
def arrive(counter_ptr, PROGRAMS: tl.constexpr):
    """Lets the others know that the program has written, though not that it can be seen."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, arrival(PROGRAMS), sem="relaxed", scope="gpu")


@triton.jit
def arrival(PROGRAMS: tl.constexpr):
    """2^31 in all."""
    return tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - (PROGRAMS - 2), 1)


@triton.jit
def wait(counter_ptr, TURNED: tl.constexpr):
    """Until the counter's sign is set (or is not). One thread asks, for all behind the program's own barrier."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred %wait;
        .reg .s32 %now;
        mov.u32 %now, %tid.x;
        setp.ne.s32 %wait, %now, 0;
        @%wait bra all_arrived;
        ask_again:
        ld.relaxed.gpu.global.s32 %now, [$1];
        xor.b32 %now, %now, $2;
        setp.ge.s32 %wait, %now, 0;
        @%wait bra ask_again;
        all_arrived:
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [counter_ptr, 0 if TURNED else -1],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
