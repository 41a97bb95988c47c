"""Division of a multiprocessor's memory between L1 cache and shared memory, which Triton has no setting for."""

# pyright: basic

from __future__ import annotations

import ctypes
from typing import Any

from triton.compiler import CompiledKernel

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""Attribute number in the driver's CUfunction_attribute."""
_carveouts: dict[object, int] = {}


def prefer_l1(function: Any, *, carveout: int) -> Any:
    """Mark a kernel that loads past shared memory, so that its bytes in flight fit the L1 cache.

    A multiprocessor changes its division only between kernels, and only if the next kernel cannot run with the present
    division. Without the mark, the L1 cache would stay as small as attention leaves it.

    Args:
        function: the kernel
        carveout: per cent of an H200's 228 KB that stay shared memory (3 gives 8 KB, 7 gives 16 KB); no less than the
            kernel's programs need to run at the same time
    """
    _carveouts[function] = carveout
    return function


def set_carveout(function: object, kernel: CompiledKernel) -> None:
    """Apply the mark of a function to one of its kernels, which is loaded."""
    carveout = _carveouts.get(function)
    if carveout is not None:
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _PREFERRED_SHARED_MEMORY_CARVEOUT, carveout)
        if error:
            raise RuntimeError(f"cuFuncSetAttribute: error {error} of the CUDA driver")
