"""Makes sure that compiled kernels are ready to launch.

A compiled kernel still needs two things, which Triton does when it is first launched, one kernel after another: a small
C module that launches it (built by the C compiler where Triton's cache has none), and its code on the device. A capture
is no place for either. `compile_only` does both beside compiling; what it could not do fails here, by name.

What Triton has no word for is said here too: how a multiprocessor divides its memory between L1 cache and shared memory
(`prefer_l1`).
"""

# pyright: basic

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, cast

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""Of the driver's CUfunction_attribute."""
_prefer_l1: dict[object, int] = {}
LARGE = 1 << 23
"""Weights of a layer that takes so long that changing the size of the L1 cache is worth its time: every one of an 8B
model and none of a 0.6B one, whose steps of one row get 5% longer by it."""


def prefer_l1(function: Any, *, carveout: int) -> Any:
    """Marks a kernel whose loads go past shared memory: what it has under way has its place in the L1 cache.

    carveout: per cent of an H200's 228 KB that stay shared memory: with 3 it is 8 KB, with 7 16. With less than the few
    kilobytes that the programs take they keep one another off a multiprocessor.

    The division is made where a multiprocessor changes kernels and stays as it was where the next one can run with it,
    so that after attention, which takes most of the memory, the L1 cache would be small: on an H200 the gated product
    of one row then takes 67 us instead of 53.
    """
    _prefer_l1[function] = carveout
    return function


def load_kernels(kernels: Iterable[object]) -> None:
    """Makes sure that what `compile_only` had compiled and yielded the names of is on the current device.

    It is there already, but for what the device has no room for.

    Raises:
        triton.runtime.errors.OutOfResources: the device does not have what a kernel needs.
    """
    device = torch.cuda.current_device()
    functions = {function for function, _ in cast("Iterable[tuple[JITFunction[Any], str]]", kernels)}
    for function in functions:
        # All variants of each: Triton files them under other names than it is asked for them by.
        for kernel in function.device_caches[device][0].values():
            if isinstance(kernel, CompiledKernel):
                kernel._init_handles()
                if function in _prefer_l1:
                    _set_carveout(kernel, _prefer_l1[function])


def _set_carveout(kernel: CompiledKernel, carveout: int) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _PREFERRED_SHARED_MEMORY_CARVEOUT, carveout)
    if error:
        raise RuntimeError(f"cuFuncSetAttribute: error {error} of the CUDA driver")
