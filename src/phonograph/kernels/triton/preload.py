"""Makes compiled kernels ready to launch, in parallel.

A compiled kernel still needs two things, which Triton does when it is first launched, one kernel after another: a small
C module that launches it (built by the C compiler where Triton's cache has none), and its code on the device. A capture
is no place for either.
"""

# pyright: basic

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_THREADS = 32


def load_kernels(kernels: Iterable[object]) -> None:
    """Loads onto the current device what `compile_only` had compiled and yielded the names of.

    Raises:
        triton.runtime.errors.OutOfResources: the device does not have what a kernel needs.
    """
    device = torch.cuda.current_device()
    functions = {function for function, _ in cast("Iterable[tuple[JITFunction[Any], str]]", kernels)}
    # All variants of each: Triton files them under other names than it is asked for them by.
    compiled = [kernel for function in functions for kernel in function.device_caches[device][0].values()]
    threads = min(_THREADS, 2 * (os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        list(pool.map(_load, (kernel for kernel in compiled if isinstance(kernel, CompiledKernel))))


def _load(kernel: CompiledKernel) -> None:
    kernel._init_handles()
