"""For all tests: those marked `gpu` are skipped where there is no GPU, those marked `index` where CI is not true.

A slow machine is no failure.

What the output of a run holds, and which tests may skip, is in support/suite_rules.py.

Triton kernels run in Triton's interpreter where there is no GPU: the variable must be set before triton is imported.

One thread: models this small only lose by sharing their work out (thirty times, beside other busy processes). torch
and numpy read the variable when they are imported, which no test has done yet.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from quick_interpreter import make_quick

pytest_plugins = ["suite_rules"]
# A shell starts what runs in the background with SIGINT ignored, and so would the tests of Ctrl-C and their children.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_KEPT = 1 << 29
"""Bytes that a test may leave with torch."""
settings.register_profile("phonograph", deadline=None)
settings.load_profile("phonograph")


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker begin its imports at another place, and read what the others have compiled when it gets there."""
    worker, tests = getattr(config, "workerinput", None), Path(__file__).parent
    if worker is None or [Path(name).absolute() for name in config.args] != [tests]:
        return
    paths = sorted({str(path.parent) if path.parent != tests else str(path) for path in tests.rglob("test_*.py")})
    first = int(worker["workerid"].removeprefix("gw")) * len(paths) // worker["workercount"]
    config.args = paths[first:] + paths[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By path too: workers collect in other orders.
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, item.path))
    if os.environ.get("CI") != "true":
        for item in items:
            if item.get_closest_marker("index"):
                item.add_marker(pytest.mark.skip(reason="makes an environment with pip; runs under CI=true"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def every_row_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a product is numpy's, which on some CPUs sums a row by where it stands in the tile."""
    if torch.cuda.is_available():
        return

    def product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for index in range(a.shape[-1]):
            total += a[..., index, None].astype(dtype) * b[..., index, None, :].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", product)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without the garbage collector: nothing that they import is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Take what all tests have imported out of the garbage collector's way: engines collect at their end."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    make_quick()


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> None:
    """Each client of httpx reads all of them, also for plain HTTP, which takes 30 ms."""
    transports: Any = import_module("httpx._transports.default")
    transports.create_ssl_context = cache(transports.create_ssl_context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Give the memory of a large test back: some thirty processes may share the GPU, beside engines."""
    yield
    if item.get_closest_marker("gpu") and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT:
        gc.collect()
        torch.cuda.empty_cache()
