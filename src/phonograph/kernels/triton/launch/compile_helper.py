"""Helper process that compiles kernels on all cores.

Triton generates a kernel's intermediate code in Python, under the interpreter lock, so threads of one process hardly
help. The helper imports the compiler once and forks a pool of children. They fill Triton's cache on disk with the
kernels and with the C modules that launch them, and the engine's process loads both from there. Where a child fails,
the engine's process compiles the kernel itself, and so raises the child's error.

The helper is a separate program (`python -m phonograph.kernels.triton.launch.compile_helper`), because a process
started by `multiprocessing` imports the user's script again. It ends when its standard input does. Requests and answers
are pickles.
"""

# pyright: basic
from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import multiprocessing
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from phonograph.core.host_resources import available_memory, usable_cpus

log = logging.getLogger(__name__)

STAMP = "phonograph-compiled"
"""File in Triton's cache that names the build whose kernels are all there."""
KERNELS = Path(__file__).parents[1]
"""Folder of our Triton kernels."""
ALONE = 8
"""Largest number of missing kernels for which the engine's process starts no helper."""
_MAX_CHILDREN = 32
_CHILD_BYTES = 1 << 30
"""Upper bound of a child's memory."""
_PIPE_BYTES = 1 << 20
"""Largest pipe that Linux grants without privileges."""
_ENDED = "the helper has ended"


class Job(NamedTuple):
    """Kernel to compile.

    module, name: location of the function
    key: hash of the function's source in the engine's process, under which Triton files the kernel. It depends on which
        functions were hashed before: the constants of a called function join the hash only if that one was.
    arch: compute capability, 90 for 9.0
    specialization: JSON that `JITFunction.preload` reads
    """

    module: str
    name: str
    key: str
    arch: int
    specialization: str


class CompileHelper:
    """Client of the helper process. One thread sends jobs; any thread may wait for the answers."""

    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phonograph.kernels.triton.launch.compile_helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            # Ctrl-C is for the engine's process, which ends this one.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self._results = self._process.stdin, self._process.stdout
        with contextlib.suppress(ImportError, AttributeError, OSError):  # absent outside Linux, or refused
            import fcntl

            # Room for all jobs of a start, so that sending does not wait for the helper's imports.
            fcntl.fcntl(self._jobs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._lock = threading.Lock()
        self._answers: list[Future[str | None]] = []
        self._ended = False
        threading.Thread(target=self._receive, name="compile-helper", daemon=True).start()

    def send(self, job: Job, answer: Future[str | None]) -> None:
        """Request a kernel. The answer becomes None once it is on disk, else the reason why it is not."""
        with self._lock:
            if self._ended:
                answer.set_result(_ENDED)
                return
            self._answers.append(answer)
            with contextlib.suppress(OSError):  # `_receive` sees the end too, and answers
                pickle.dump((len(self._answers) - 1, job), self._jobs)
                self._jobs.flush()

    def close(self) -> None:
        """End the helper and its children. Closing again does nothing."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                number, problem = pickle.load(self._results)
                self._answers[number].set_result(problem)
        with self._lock:
            self._ended = True
        for answer in self._answers:
            if not answer.done():
                answer.set_result(_ENDED)


_current: CompileHelper | None = None
_startable = True
_starting = threading.Lock()


def start_early() -> None:
    """Start the helper during this process's imports, if there is a GPU and kernels may be missing."""
    if Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton") is not None and not _is_stamped():
        helper(ALONE + 1)


def helper(num_missing: int) -> CompileHelper | None:
    """Return this process's helper, started if more than ALONE kernels are missing; None if there is none.

    For fewer kernels, importing the compiler a second time takes longer than compiling them here.
    """
    global _current, _startable
    with _starting:
        if _current is None and num_missing > ALONE and _startable:
            try:
                _current = CompileHelper()
            except OSError as error:
                _startable = False
                log.warning("kernels are compiled in this process alone, as no other can be started: %s", error)
        return _current


def end_helper(*, compiled_all: bool) -> None:
    """End the helper, if there is one. `compiled_all` marks the cache, so that the next start begins without one."""
    global _current
    if _current is None:
        return
    _current.close()
    _current = None
    if compiled_all:
        with contextlib.suppress(OSError):
            _stamp_file().write_text(_build(), encoding="utf-8")


def _is_stamped() -> bool:
    try:
        return _stamp_file().read_text(encoding="utf-8") == _build()
    except OSError:
        return False


def _stamp_file() -> Path:
    # Triton's rule, repeated here because importing Triton takes seconds.
    folder = os.environ.get("TRITON_CACHE_DIR")
    return (Path(folder) if folder else Path.home() / ".triton" / "cache") / STAMP


def _build() -> str:
    """Return a text that changes with our kernels and with the compiler."""
    from importlib.metadata import version

    newest = max(file.stat().st_mtime_ns for file in KERNELS.rglob("*.py"))
    return f"{version('triton')} {newest} {KERNELS}"


# -- the helper's own process ------------------------------------------------------------------------------------------


def _compile(job: Job) -> str | None:
    """Compile a kernel and its launcher into Triton's cache, in a child. Returns the error's text, or None."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.runtime import driver

        # Compiling asks the driver for its target alone. Triton's own driver would make a context on the GPU.
        target: Any = SimpleNamespace(
            get_current_device=lambda: 0, get_current_target=lambda: GPUTarget("cuda", job.arch, 32)
        )
        driver.set_active(target)
        function = getattr(importlib.import_module(job.module), job.name)
        function.hash = job.key
        kernel = function.preload(job.specialization)
    except Exception as error:
        return repr(error)[:500]
    # Built here because the engine's process loads launchers one at a time.
    with contextlib.suppress(Exception):
        CudaLauncher(kernel.src, kernel.metadata)
    return None


def _answer(out: int, number: int, compiled: Future[str | None]) -> None:
    """Write a child's answer in one call: it is shorter than the largest atomic write of a pipe."""
    if not compiled.cancelled():
        error = compiled.exception()
        with contextlib.suppress(OSError):  # the engine's process has ended
            os.write(out, pickle.dumps((number, repr(error) if error else compiled.result())))


def main() -> None:
    # Standard output becomes standard error, as the compiler's prints must not come between the answers.
    out = os.dup(1)
    os.dup2(2, 1)
    for module in pkgutil.walk_packages([str(KERNELS)], "phonograph.kernels.triton."):
        with contextlib.suppress(ImportError):  # the installed Triton has another Gluon
            importlib.import_module(module.name)
    from triton.runtime.cache import triton_key

    triton_key()  # hashes the compiler, once for all children
    gc.collect()
    gc.freeze()
    children = max(1, min(_MAX_CHILDREN, usable_cpus(), available_memory() // _CHILD_BYTES))
    pool = ProcessPoolExecutor(children, multiprocessing.get_context("fork"))
    pool.submit(os.getpid)  # forks the children, before the first job
    with contextlib.suppress(EOFError, BrokenProcessPool):
        while True:
            number, job = pickle.load(sys.stdin.buffer)
            pool.submit(_compile, job).add_done_callback(partial(_answer, out, number))
    pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
