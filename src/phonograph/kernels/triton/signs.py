"""How a program waits for others of its launch: for a counter whose sign the last one to arrive turns (see `span`)."""

from __future__ import annotations

from triton.language import constexpr

UNTIL_OTHER_SIGN = constexpr(
    """
    {
    .reg .pred %wait;
    .reg .s32 %now;
    mov.u32 %now, %tid.x;
    setp.ne.s32 %wait, %now, 0;
    @%wait bra all_arrived;
    ask_again:
    ld.acquire.gpu.global.s32 %now, [$1];
    xor.b32 %now, %now, $2;
    setp.ge.s32 %wait, %now, 0;
    @%wait bra ask_again;
    all_arrived:
    mov.u32 $0, 0;
    }
    """
)
"""PTX, of a counter's address and a number: until their signs differ. Only the program's first thread asks."""
