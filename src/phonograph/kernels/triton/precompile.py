"""Compiles the kernels of a step in parallel, by running the step's Python without launching anything.

A kernel is compiled when it is first launched, one after another, which would take most of the start-up. Within
`compile_only` every launch is turned into the request to compile that kernel, in a pool of threads; what follows finds
them ready. Half of a compilation holds Python's lock, so where many kernels are missing from Triton's cache on disk,
processes make them (`compile_helper`) and the threads only load.

Each is also made ready to launch as soon as it is compiled: for that Triton builds a small C module where its cache has
none, which would otherwise wait for the slowest kernel to compile.
"""

# pyright: basic

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.compiler import compile as compile_here
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction, compute_cache_key

from phonograph.device import num_cores
from phonograph.kernels.triton.compile_helper import Job, end_helper, helper

log = logging.getLogger(__name__)

_THREADS = 32


class _Pool(ThreadPoolExecutor):
    """Threads that load the kernels that they compile."""

    def __init__(self, device: int) -> None:
        threads = min(_THREADS, 2 * num_cores())
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, fn: Callable[[], CompiledKernel], /) -> Future[CompiledKernel]:  # pyright: ignore[reportIncompatibleMethodOverride]
        def compile_and_load() -> CompiledKernel:
            kernel = fn()
            # What a device has no room for says so again where it is launched.
            with suppress(OutOfResources):
                kernel._init_handles()
            return kernel

        return super().submit(compile_and_load)


class _Compiler:
    """Compiles with the helper's children what is not on disk; a call is one of `triton.compile`."""

    def __init__(self) -> None:
        self._missing = itertools.count(1)

    def __call__(self, src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> CompiledKernel:
        if isinstance(src, ASTSource) and not _on_disk(src, target, options, _env_vars):
            there = helper(next(self._missing))
            if there is not None:
                function: Any = src.fn
                named = function.module, function.__name__
                about = target.backend, target.arch, target.warp_size
                problem = there.compile(Job(*named, src.signature, src.constants, src.attrs, about, options))
                if problem is not None:
                    log.info("%s is compiled in this process: %s", src.name, problem)
        return compile_here(src, target=target, options=options, _env_vars=_env_vars)


def _on_disk(src: ASTSource, target: Any, options: Any, env_vars: Any) -> bool:
    """Whether Triton's cache has it: as `triton.compile` looks."""
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    key = get_cache_key(src, backend, parsed, env_vars=env_vars)
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    metadata = f"{src.name[:150]}.json"
    return metadata in (files.get_group(metadata) or {})


def filed_under(function: JITFunction[Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """The name by which Triton knows, on the current device, the kernel that a launch needs."""
    caches = function.device_caches[torch.cuda.current_device()]
    _, specialization, options = caches[-1](*arguments, **{"debug": function.debug, **keywords})
    return compute_cache_key(caches[1], specialization, options)


@contextmanager
def compile_only() -> Iterator[set[tuple[JITFunction[Any], object]]]:
    """Inside, launches of Triton kernels only have them compiled; yields the set of kernels seen, filled meanwhile.

    Everything compiled is ready at the end. Not for several threads at a time.

    Raises:
        triton.CompilationError: a kernel does not compile.
    """
    launch = JITFunction.run
    seen: set[tuple[JITFunction[Any], object]] = set()
    compiler = _Compiler()
    complete = False

    def request(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        key = self, filed_under(self, args, kwargs)
        if key not in seen:
            seen.add(key)
            self.compile = compiler
            launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = request  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _Pool(torch.cuda.current_device()) as pool, AsyncCompileMode(pool):
            yield seen
        complete = True
    finally:
        JITFunction.run = launch
        for function, _ in seen:
            function.compile = compile_here
        end_helper(compiled_all=complete)
        active_mode.set(None)  # Triton leaves it set where a kernel did not compile
