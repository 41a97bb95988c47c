"""A process that compiles kernels, in as many children of its own as there are cores for it.

Triton makes a kernel's intermediate code in Python, under Python's lock: in one process the kernels of a start take ten
seconds, however many threads they have. So a helper imports the compiler once and forks a child for each kernel. What
they make, and the C module that launches it, is in Triton's cache on disk, where the engine's process finds it; what a
child could not make it makes itself, and has the error.

The helper is a program of its own (`python -m phonograph.kernels.triton.launch.compile_helper`), as the children of
`multiprocessing` would run the user's script again. It ends when its standard input does. Both sides send pickles.
"""

# pyright: basic
from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phonograph.core.device import num_cores
from phonograph.kernels.triton.launch.frames import framed, read_frame

log = logging.getLogger(__name__)

STAMP = "phonograph-compiled"
"""In Triton's cache: the build whose kernels were compiled there."""
MODULES = (
    "attention.decode", "attention.decode_plan", "attention.prefill", "attention.prefill_plan", "sampling.bitmask",
    "gemm.gemm_small_m", "gemm.gemv", "elementwise.layers", "gemm.gemm_dispatch", "step.prepare",
    "attention.rope_and_kv_write", "sampling.sample", "step.pinned_words",
)  # fmt: skip
"""Imported before the first kernel is asked for: those of most steps."""
KERNELS = Path(__file__).parents[1]
"""Folder of our Triton kernels."""
_MOST_CHILDREN = 32
_CHILD_BYTES = 1 << 30
"""More than one takes."""
_POLL_SECONDS = 0.02
_PIPE_BYTES = 1 << 20
"""The most that Linux gives without asking further."""


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel as `triton.compile` takes it.

    module, name: where the function is
    key: the hash of its source in the engine's process. Triton's goes by which functions were hashed before (it takes
    over the global constants of a function that it calls only where that was), and what is compiled is filed under it.
    """

    module: str
    name: str
    key: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    target: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any, *about: Any) -> Job:
        return cls(function.module, function.__name__, function.cache_key, *about)


class CompileHelper:
    """The helper, from the engine's process. One thread asks; any may wait for the answers."""

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
        assert self._process.stdin is not None
        with contextlib.suppress(ImportError, AttributeError, OSError):  # Linux has it, and allows it mostly
            import fcntl

            # Room for all kernels of a start, so that whoever asks need not wait for the helper's imports.
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[str | None]] = {}
        self._number = 0
        self._ended = False
        threading.Thread(target=self._receive, name="compile-helper", daemon=True).start()

    def ask(self, job: Job) -> Future[str | None]:
        """Has it compiled. The future's result is None where it was, else why not; it raises nothing."""
        future: Future[str | None] = Future()
        try:
            data = pickle.dumps(job)
        except Exception as error:  # of what values a kernel may have been given
            future.set_result(f"cannot be sent: {error!r}")
            return future
        with self._lock:
            if self._ended:
                future.set_result("the helper has ended")
                return future
            self._number += 1
            number = self._number
            self._waiting[number] = future
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(framed(pickle.dumps((number, data))))
            self._process.stdin.flush()
        except OSError as error:
            self._told(number, f"the helper has ended: {error!r}")
        return future

    def close(self) -> None:
        """Ends the helper and its children. Closing again does nothing."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError):
            while True:
                self._told(*pickle.loads(read_frame(self._process.stdout)))
        with self._lock:
            self._ended = True
            waiting = list(self._waiting)
        for number in waiting:
            self._told(number, "the helper has ended")

    def _told(self, number: int, problem: str | None) -> None:
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is not None:
            future.set_result(problem)


ALONE = 8
"""Kernels that a process compiles by itself."""
_current: CompileHelper | None = None
_startable = True
_starting = threading.Lock()


def start_early() -> None:
    """Starts the helper beside the imports of this process, if a GPU is here and kernels may have to be compiled."""
    if Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton") is not None and not _is_stamped():
        helper(ALONE + 1)


def helper(num_missing: int) -> CompileHelper | None:
    """The one helper of this process. There is none yet where so few kernels are missing that importing the compiler
    again would take longer, and none where no process can be started."""
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
    """Ends it, if there is one. compiled_all: the next start of this build will hardly need one."""
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
    # As Triton has it, which takes seconds to import.
    folder = os.environ.get("TRITON_CACHE_DIR")
    return (Path(folder) if folder else Path.home() / ".triton" / "cache") / STAMP


def _build() -> str:
    """Changes with our kernels and with the compiler."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    newest = max(file.stat().st_mtime_ns for file in KERNELS.rglob("*.py"))
    return f"{triton} {newest} {KERNELS}"


# -- the helper's own process ------------------------------------------------------------------------------------------


def _compile(job: Job) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job.module), job.name)
    function.hash = job.key
    source_type: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    kernel = triton.compile(
        source_type(function, job.signature, job.constants, job.attributes),
        target=GPUTarget(*job.target),
        options=dict(job.options),
    )
    # Only to be built: in the engine's process, where they are loaded one after another, each would be waited for.
    with contextlib.suppress(Exception):
        CudaLauncher(kernel.src, kernel.metadata)


def _run_child(job: bytes, number: int, out: int) -> None:
    """In the child. What cannot be compiled is told in a few words; whoever asked will meet the whole error."""
    try:
        _compile(pickle.loads(job))
        problem = None
    except BaseException as error:
        problem = repr(error)[:500]
    _answer(out, number, problem)


def _answer(out: int, number: int, problem: str | None) -> None:
    # One write of less than a pipe takes at once, so that children need not take turns.
    os.write(out, framed(pickle.dumps((number, problem))))


def main() -> None:
    # What a compiler prints must not come between the answers.
    out = os.dup(1)
    os.dup2(2, 1)
    for module in MODULES:
        importlib.import_module(f"phonograph.kernels.triton.{module}")
    with contextlib.suppress(ImportError):  # a Triton whose Gluon is another
        for module in ("attention.prefill_hopper", "gemm.gemm_ring"):
            importlib.import_module(f"phonograph.kernels.triton.{module}")
    from triton.runtime.cache import triton_key

    triton_key()  # hashes the compiler, which every child would do again
    gc.collect()
    gc.freeze()
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(1, min(_MOST_CHILDREN, num_cores(), free_bytes // _CHILD_BYTES))
    # Without a buffer, in which a request could wait unseen.
    requests = os.fdopen(0, "rb", buffering=0)
    waiting, running = deque[tuple[int, bytes]](), dict[int, int]()
    while True:
        if select.select([requests], [], [], _POLL_SECONDS if running else None)[0]:
            try:
                waiting.append(pickle.loads(read_frame(requests)))
            except EOFError:
                return
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            number = running.pop(pid)
            if status != 0:
                _answer(out, number, f"a child ended with status {status}")
        while waiting and len(running) < most:
            number, job = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                _run_child(job, number, out)
                os._exit(0)
            running[pid] = number


if __name__ == "__main__":
    main()
