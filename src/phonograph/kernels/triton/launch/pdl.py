"""Programmatic dependent launch: a kernel may start while its predecessor still ends (CUDA, from Hopper on).

Every kernel of a step begins with `pdl_begin` and is launched with `pdl_options`: it lets the next kernel start, then
waits until its predecessor has ended and the writes are visible. Before that it may read only constants of the model,
results of the kernels at the head of a step and of earlier steps, because `plan_decode` lets no kernel start before it
has ended. Schedules of other backends may not (`AttentionBackend.schedule_is_barrier`).
Every kernel waits, so a kernel that waits for its predecessor waits for all earlier kernels.

Two kernels run at the same time if the first begins with `pdl_wait_first` and the second waits at its end: all earlier
kernels have ended when the second starts, and a dependent of the second waits for both. For that reason the second may
read results of all earlier kernels before it waits for the first.

    kernel 0   |====== work ======|
    kernel 1        | constants   |== work ======|      starts early, waits for kernel 0
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
    """Return True if the current device has programmatic dependent launch."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def pdl_options() -> dict[str, bool]:
    """Return arguments of a launch: with PDL the kernel waits by itself, otherwise the device orders kernels."""
    usable = pdl_usable()
    return {"PDL": usable, "launch_pdl": usable}


@functools.cache
def gluon_usable() -> bool:
    """Return True on a Hopper GPU with the Triton that our Gluon kernels are written for.

    Gluon is experimental, and changes from version to version.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    return triton.__version__.startswith("3.6.")


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the predecessor."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()


@triton.jit
def pdl_let_next_start(PDL: tl.constexpr):
    """Let the next kernel start. `pdl_wait` follows, after what needs no predecessor."""
    if PDL:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the predecessor."""
    if PDL:
        tl_cuda.gdc_wait()


@triton.jit
def pdl_wait_if(condition):
    """Wait for the predecessor if `condition`, without a branch, which would cost registers before a loop."""
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
    """Wait for the predecessor, and only then let the next kernel start."""
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
