"""Programmatic dependent launch: a kernel may start while the one before it still ends (CUDA, from Hopper on).

Every kernel of a step begins with `pdl_begin` and is launched with `launch_pdl`: it lets the next one start, then waits
until the one before has ended and its writes are visible. Only constants of the model may be read before that, and what
the kernels at the head of a step wrote: `plan_decode` lets none start before it has ended. Since every kernel waits,
waiting for the one before is waiting for all.

Two kernels run side by side where the first begins with `pdl_wait_first` and the second waits at its end: what is
before both has ended when the second starts, and who waits for the second waits for both.
"""

# pyright: basic
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@functools.cache
def pdl_usable() -> bool:
    """Whether the current device has it."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def pdl_options() -> dict[str, bool]:
    """Returns the arguments of a launch that say whether the kernel waits, and may start, by itself."""
    usable = pdl_usable()
    return {"PDL": usable, "launch_pdl": usable}


@functools.cache
def gluon_usable() -> bool:
    """Whether the current device is a Hopper GPU, and this Triton is one whose Gluon our kernels for Hopper are written
    in: it is experimental, and changes from version to version."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    return triton.__version__.startswith("3.6.")


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """Lets the next kernel start, and waits for the one before."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()


@triton.jit
def pdl_wait_if(condition):
    """Waits for the kernel before, or does not, without a branch: one costs registers where it stands before a loop."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p griddepcontrol.wait; mov.u32 $0, 0; }",
        "=r,r",
        [condition.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def pdl_wait_first(PDL: tl.constexpr):
    """Waits for the kernel before, and only then lets the next one start."""
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
