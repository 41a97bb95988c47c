"""Helpers of kernels in Gluon: waits for the predecessor, barriers of warps, and stages of a ring.

Gluon is Triton's language for warps with different work. It is experimental (see `pdl.gluon_usable`), so this module is
imported only where it runs.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def let_next_kernel_start():
    """Let the next kernel start (programmatic dependent launch)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_kernel_before():
    """Wait until the predecessor has ended and its writes are visible; each group of warps waits for itself."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Return NUMBER barriers in shared memory; a phase of each ends with COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(stage), count=COUNT)
    return barriers


@gluon.constexpr_function
def powers(first, end):
    """Return `first` times the powers of two, up to `end`: bases of a linear layout."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of a ring of STAGES, and the phase of its barriers, 0 or 1 in turn."""
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)
