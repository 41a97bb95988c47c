"""Compiles the kernels of a step in parallel, by running the step's Python without launching anything.

A kernel is compiled when it is first launched, one after another, which would take most of the start-up. Within
`compile_only` every launch is turned into the request to compile that kernel; what follows finds them ready. Half of a
compilation holds Python's lock, so where many kernels are missing from Triton's cache on disk, processes make them
(`compile_helper`), and threads of this one only load. The processes begin as soon as a kernel is asked for, the threads
when the step's Python is done: each of its calls of torch lets go of the lock and would have to wait for them all.

Each is also made ready to launch as soon as it is compiled: its code is loaded, and so is a small C module of Triton's
that launches it, which the helper has built too.
"""

# pyright: basic

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.compiler import compile as compile_here
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction, compute_cache_key

from phonograph.core.device import num_cores
from phonograph.kernels.triton.launch.compile_helper import Job, end_helper, helper

log = logging.getLogger(__name__)

_THREADS = 32
_Load = Callable[[], CompiledKernel]


class _Pool(ThreadPoolExecutor):
    """Threads that load the kernels asked for, from `begin` on."""

    def __init__(self, device: int) -> None:
        threads = min(_THREADS, 2 * num_cores())
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))
        self._begun = threading.Event()

    def submit(self, fn: Callable[[], _Load], /) -> Future[CompiledKernel]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """fn: what Triton would have the pool call, which calls a `_Compiler`: it is called here."""
        load = fn()

        def compile_and_load() -> CompiledKernel:
            self._begun.wait()
            kernel = load()
            # What a device has no room for says so again where it is launched.
            with suppress(OutOfResources):
                kernel._init_handles()
            return kernel

        return super().submit(compile_and_load)

    def begin(self) -> None:
        self._begun.set()


@dataclass(slots=True)
class _Asked:
    """A kernel that is not on disk. answer: why the helper could not compile it, or None; there once it was asked."""

    job: Job
    answer: Future[str | None] | None = None


class _Compiler:
    """Has the helper's children compile what is not on disk. A call is one of `triton.compile`, but only asks; what it
    returns waits for the kernel."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []

    def __call__(self, src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> _Load:
        asked = None
        if isinstance(src, ASTSource) and not _on_disk(src, target, options, _env_vars):
            about = target.backend, target.arch, target.warp_size
            asked = _Asked(Job.of(src.fn, src.signature, src.constants, src.attrs, about, options))
            self._asked.append(asked)
            there = helper(len(self._asked))
            if there is not None:
                for each in self._asked:
                    if each.answer is None:
                        each.answer = there.ask(each.job)

        def load() -> CompiledKernel:
            if asked is not None and asked.answer is not None:
                problem = asked.answer.result()
                if problem is not None:
                    log.info("%s is compiled in this process: %s", src.name, problem)
            return compile_here(src, target=target, options=options, _env_vars=_env_vars)

        return load


_hashing: threading.Thread | None = None


def begin_hashing() -> None:
    """Hashes the compiler in a thread, a third of a second that the first look into Triton's cache would take."""
    global _hashing
    if _hashing is None:
        _hashing = threading.Thread(target=triton_key, name="hash-triton", daemon=True)
        _hashing.start()


def _on_disk(src: ASTSource, target: Any, options: Any, env_vars: Any) -> bool:
    """Whether Triton's cache has it: as `triton.compile` looks."""
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    key = get_cache_key(src, backend, parsed, env_vars=env_vars)
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    metadata = f"{src.name[:150]}.json"
    return metadata in (files.get_group(metadata) or {})


@contextmanager
def launchers_in_turn() -> Iterator[None]:
    """Inside, threads make the modules that launch kernels one after another.

    Python files them all under one name. One that was loaded before it does not load again but puts its functions into
    the module that has the name, which may be the one that another thread has just loaded and not yet looked into:
    that thread would get the launcher of other arguments. It was seen once, in a start on a busy host.
    """
    active: Any = driver.active
    lock = threading.Lock()
    make = active.launcher_cls

    def make_alone(*about: Any) -> Any:
        with lock:
            return make(*about)

    active.launcher_cls = make_alone
    try:
        yield
    finally:
        active.launcher_cls = make


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

    if _hashing is not None:
        _hashing.join()
    JITFunction.run = request  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with launchers_in_turn(), _Pool(torch.cuda.current_device()) as pool, AsyncCompileMode(pool):
            try:
                yield seen
            finally:
                pool.begin()
        complete = True
    finally:
        JITFunction.run = launch
        for function, _ in seen:
            function.compile = compile_here
        end_helper(compiled_all=complete)
        active_mode.set(None)  # Triton leaves it set where a kernel did not compile
