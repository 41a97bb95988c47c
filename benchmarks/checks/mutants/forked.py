"""Processes for tests that begin with the libraries imported, which takes longer than most tests."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

TIMED_OUT = -1
VARIABLES = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "CI": ""}
"""A CPU's tests with one thread each; without CI=true, under which a test whose library is missing fails."""


def prepare() -> None:
    """Set the environment of the tests and import libraries; phonograph is imported by each child."""
    os.environ.update(VARIABLES)
    for library in ("numpy", "scipy", "tokenizers", "torch", "transformers", "triton", "zmq"):
        importlib.import_module(library)


def _child(root: Path, function: Callable[[], int], log: Path) -> None:
    os.setsid()
    os.chdir(root)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ["PYTHONPATH"] = str(root / "src")
    # A fault of the same length, planted within a second, would not be seen beside compiled modules.
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    sys.path.insert(0, str(root / "src"))
    sys.exit(function())


def run(root: Path, function: Callable[[], int], *, seconds: float, log: Path) -> int:
    """Call the function in a child process, with the package of the root.

    Returns:
        what the function returns, or TIMED_OUT after that many seconds.
    """
    child = multiprocessing.get_context("fork").Process(target=_child, args=(root, function, log))
    child.start()
    assert child.pid is not None
    try:
        child.join(seconds)
        return TIMED_OUT if child.exitcode is None else child.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # engines that a test started, too
        child.join()
