"""Asking the L2 cache for rows of a matrix ahead of time."""

# pyright: basic
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(pointer, stride_bytes, count, num_bytes):
    """Asks the L2 cache for `num_bytes` (a multiple of 16) of each of `count` rows, and goes on.

    One thread asks for a row. The hardware takes such requests one lane after another, so they are dealt to the warps.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred %own;
        .reg .u32 %row, %warp, %warps;
        .reg .u64 %address;
        mov.u32 %warp, %tid.x;
        mov.u32 %warps, %ntid.x;
        and.b32 %row, %warp, 31;
        shr.u32 %warp, %warp, 5;
        shr.u32 %warps, %warps, 5;
        mad.lo.u32 %row, %row, %warps, %warp;
        setp.lt.u32 %own, %row, $3;
        mad.wide.u32 %address, %row, $2, $1;
        @%own cp.async.bulk.prefetch.L2.global [%address], $4;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r",
        [pointer, stride_bytes, count, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
