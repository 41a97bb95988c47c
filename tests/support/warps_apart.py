"""A kernel whose groups of warps have work of their own and share nothing, for a race checker.

What it reports of this one is of Triton's dispatch of warps, not of what a kernel does: see
`checks.check_races`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(out_ptr, TURNS: gl.constexpr):
    for turn in range(TURNS):
        gl.atomic_add(out_ptr, turn)


@gluon.jit
def _apart_kernel(out_ptr):
    # Without a barrier of the first warps before, the checker reports nothing of the dispatch.
    gl.thread_barrier()
    gl.warp_specialize(
        [(_add, (out_ptr, 3)), (_add, (out_ptr + 1, 4)), (_add, (out_ptr + 2, 5))],
        [1, 1],
        [24, 24],
    )


def check_warps_apart(device: torch.device) -> None:
    out = torch.zeros(3, dtype=torch.int32, device=device)
    _apart_kernel[(3,)](out, num_warps=4)
    assert out.tolist() == [9, 18, 30]
