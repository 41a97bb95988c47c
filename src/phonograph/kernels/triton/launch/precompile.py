"""Parallel compilation of a step's kernels, by running the step's Python without launching anything.

Triton compiles a kernel at its first launch, one after another, which would take most of the start. Inside
`compile_only` a launch only requests its kernel. If the kernel is missing from Triton's cache on disk, a child of the
helper process (`compile_helper`) begins to compile it. Threads of this process load the kernels when the block ends:
each of the step's calls of torch releases the interpreter lock, and would wait for all of those threads.
"""

# pyright: basic

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton import AsyncCompileMode, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction, JitFunctionInfo, compute_cache_key

from phonograph.core.host_resources import usable_cpus
from phonograph.kernels.triton.launch.compile_helper import Job, end_helper, helper
from phonograph.kernels.triton.launch.l1_carveout import set_carveout

log = logging.getLogger(__name__)

_MAX_THREADS = 32


class _CompileMode(AsyncCompileMode):
    """Collects the kernels of all launches inside; compiles and loads them at the end."""

    def __init__(self) -> None:
        threads, device = min(_MAX_THREADS, 2 * usable_cpus()), torch.cuda.current_device()
        super().__init__(ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)))
        target: Any = driver.active.get_current_target()
        self._arch: int = target.arch
        self._requests: list[tuple[str, Callable[[], CompiledKernel], Callable[[CompiledKernel], None]]] = []
        self._num_missing = 0
        self._unsent: list[tuple[Job, Future[str | None]]] = []

    def note_job(self, *, fn: JitFunctionInfo, compile: Mapping[str, Any], **_: Any) -> None:
        """Describe the kernel of the `submit` that follows; Triton calls it (`knobs.runtime.jit_cache_hook`)."""
        self._function = fn.jit_function
        self._specialization: str = compile["specialization_data"]

    def submit(
        self, key: str, compile_fn: Callable[[], CompiledKernel], finalize_fn: Callable[[CompiledKernel], None]
    ) -> None:
        function, answer = self._function, Future[str | None]()
        if _on_disk(key, function.__name__):
            answer.set_result(None)
        else:
            job = Job(function.module, function.__name__, function.cache_key, self._arch, self._specialization)
            self._num_missing += 1
            self._unsent.append((job, answer))
            compiler = helper(self._num_missing)
            while compiler is not None and self._unsent:
                compiler.send(*self._unsent.pop(0))
        self._requests.append((key, partial(_compiled, function, answer, compile_fn), finalize_fn))

    def __exit__(self, *error: Any) -> None:
        for _, answer in self._unsent:
            answer.set_result(None)
        for request in self._requests:
            super().submit(*request)
        try:
            super().__exit__(*error)
        finally:
            self.executor.shutdown()
            active_mode.set(None)  # Triton leaves it set where a kernel did not compile


def _compiled(
    function: JITFunction[Any], answer: Future[str | None], compile_fn: Callable[[], CompiledKernel]
) -> CompiledKernel:
    """Return a kernel, loaded, once the helper has answered."""
    problem = answer.result()
    if problem is not None:
        log.info("%s is compiled in this process: %s", function.__name__, problem)
    kernel = compile_fn()
    _load(function, kernel)
    return kernel


_loading = threading.Lock()


def _load(function: JITFunction[Any], kernel: CompiledKernel) -> None:
    """Make a kernel ready to launch: build or load the C module that launches it, and load its code.

    One at a time: all of Triton's launcher modules have one name, and a module that was loaded before fills the module
    that has the name at that moment. Another thread would get a launcher for other arguments.
    """
    with _loading:
        kernel._init_handles()
        set_carveout(function, kernel)


def is_compiling() -> bool:
    """Return True inside `compile_only`."""
    return active_mode.get() is not None


def _on_disk(key: str, name: str) -> bool:
    """Return True if Triton's cache has the kernel, by the rule of `triton.compile`."""
    metadata = f"{name[:150]}.json"
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(metadata)
    return metadata in (files or {})


_hashing: threading.Thread | None = None


def begin_hashing() -> None:
    """Hash the compiler in a thread, which the first look into Triton's cache needs."""
    global _hashing
    if _hashing is None:
        _hashing = threading.Thread(target=triton_key, name="hash-triton", daemon=True)
        _hashing.start()


def filed_under(function: JITFunction[Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """Return Triton's name, on the current device, for the kernel that a launch needs."""
    caches = function.device_caches[torch.cuda.current_device()]
    _, specialization, options = caches[-1](*arguments, **{"debug": function.debug, **keywords})
    return compute_cache_key(caches[1], specialization, options)


@contextmanager
def compile_only() -> Iterator[None]:
    """Compile the kernels of all launches inside the block instead of launching them, and load them at its end.

    One thread at a time may use it.

    Raises:
        triton.CompilationError: a kernel does not compile.
        triton.runtime.errors.OutOfResources: the device has not the memory or threads that a kernel needs.
    """
    launch = JITFunction.run
    seen: set[tuple[JITFunction[Any], str]] = set()
    complete = False

    def request(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = self, filed_under(self, args, kwargs)
        if kernel not in seen:
            seen.add(kernel)
            compiled_before: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
            if compiled_before is not None:
                _load(self, compiled_before)

    if _hashing is not None:
        _hashing.join()
    JITFunction.run = request  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with knobs.runtime.scope(), _CompileMode() as mode:
            knobs.runtime.jit_cache_hook = mode.note_job
            yield
        complete = True
    finally:
        JITFunction.run = launch
        end_helper(compiled_all=complete)
