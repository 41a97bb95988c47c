"""Compiles the kernels of a step in parallel, by running the step's Python without launching anything.

A kernel is compiled when it is first launched, one after another, which would take most of the start-up. Within
`compile_only` every launch is turned into the request to compile that kernel, in a pool of threads; what follows finds
them ready. (Triton's compiler leaves Python's lock while it works, and keeps what it made on disk.)

Each is also made ready to launch as soon as it is compiled: for that Triton builds a small C module where its cache has
none, which would otherwise wait for the slowest kernel to compile.
"""

# pyright: basic

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.compiler import CompiledKernel
from triton.runtime._async_compile import active_mode
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction, compute_cache_key

_THREADS = 32


class _Pool(ThreadPoolExecutor):
    """Threads that load the kernels that they compile."""

    def __init__(self, device: int) -> None:
        threads = min(_THREADS, 2 * (os.cpu_count() or 1))
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, fn: Callable[[], CompiledKernel], /) -> Future[CompiledKernel]:  # pyright: ignore[reportIncompatibleMethodOverride]
        def compile_and_load() -> CompiledKernel:
            kernel = fn()
            # What a device has no room for says so again where it is launched.
            with suppress(OutOfResources):
                kernel._init_handles()
            return kernel

        return super().submit(compile_and_load)


@contextmanager
def compile_only() -> Iterator[set[object]]:
    """Inside, launches of Triton kernels only have them compiled; yields the set of kernels seen, filled meanwhile.

    Everything compiled is ready at the end. Not for several threads at a time.

    Raises:
        triton.CompilationError: a kernel does not compile.
    """
    launch = JITFunction.run
    seen: set[object] = set()

    def request(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs["debug"] = kwargs.get("debug", self.debug)
        caches = self.device_caches[torch.cuda.current_device()]
        _, specialization, options = caches[-1](*args, **kwargs)
        key = self, compute_cache_key(caches[1], specialization, options)
        if key not in seen:
            seen.add(key)
            launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = request  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _Pool(torch.cuda.current_device()) as pool, AsyncCompileMode(pool):
            yield seen
    finally:
        JITFunction.run = launch
        active_mode.set(None)  # Triton leaves it set where a kernel did not compile
