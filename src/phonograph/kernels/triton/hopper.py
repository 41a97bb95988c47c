"""What kernels in Gluon share: waiting for kernels and programs, barriers of warps, and places in a ring.

Gluon is Triton's language for warps with different work. It is experimental (see `pdl.gluon_usable`), so this is
imported only where it is to run.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from phonograph.kernels.triton.signs import UNTIL_OTHER_SIGN


@gluon.jit
def let_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_kernel_before():
    """Until the kernel before has ended and its writes are visible; each group of warps for itself."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def order_for_copy_engine():
    """Between what threads wrote to memory and the copy engine's reads of it: by who wrote, and by who asks."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_other_sign(counter_ptr, known):
    """Until the counter's sign is another than that of `known`. The program's first thread asks, so this is for the
    warps that it is of; what it saw holds for all behind their barrier."""
    gl.inline_asm_elementwise(UNTIL_OTHER_SIGN, "=r,l,r", [counter_ptr, known], dtype=gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """In shared memory; a phase of each ends with COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(at), count=COUNT)
    return barriers


@gluon.jit
def behind(at, turn, STAGES: gl.constexpr):
    """The next place in a ring, and the parity of the turn that it belongs to."""
    wraps = at + 1 == STAGES
    return gl.where(wraps, 0, at + 1), gl.where(wraps, turn ^ 1, turn)


@gluon.jit
def before(at, STAGES: gl.constexpr):
    """The place before one in a ring. Computed: Triton takes a variable for constant in a loop that gets the value of
    another in it, if both began with one value."""
    return gl.where(at == 0, STAGES - 1, at - 1)
