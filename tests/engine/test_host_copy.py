"""Host memory that keeps a sleeping engine's weights: locked for the GPU, and given back."""

from __future__ import annotations

import gc
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from fake_memory_driver import FakeMemoryDriver

from phonograph.engine.startup import host_copy
from phonograph.engine.startup.host_copy import HostCopy
from phonograph.engine.startup.virtual_memory import VirtualMemory

CHUNK = 4096
SIZE = 10_000


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that the driver has locked, by address; it refuses those of `SIZE + 1` bytes."""
    held: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if nbytes > SIZE:
            return 2
        held[address] = nbytes
        return 0

    runtime: Any = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=held.pop)
    monkeypatch.setattr(host_copy, "_runtime", lambda: runtime)
    return held


@pytest.mark.parametrize("closes", [True, False])
def test_pages_are_locked_until_the_end(locked: dict[int, int], closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_PIECE", 999)
    copy = HostCopy(SIZE)
    assert not locked
    for _ in range(2):
        copy.wait(page_locked=True)
    assert locked == {copy.bytes.data_ptr(): SIZE}
    assert len(copy.bytes) == SIZE and not copy.bytes.any()
    if closes:
        copy.close()
    del copy
    gc.collect()
    assert not locked


def test_memory_that_cannot_be_locked_serves(locked: dict[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        copy = HostCopy(SIZE + 1)
        copy.wait(page_locked=True)
    assert "not page-locked (error 2)" in caplog.text
    copy.bytes[SIZE] = 7
    copy.close()
    assert not locked


def test_a_second_sleep_finds_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(HostCopy):
        def __init__(self, nbytes: int, num_ranks: int) -> None:
            super().__init__(nbytes, num_ranks)
            made.append(nbytes)

    monkeypatch.setattr("phonograph.engine.startup.virtual_memory.HostCopy", Counted)
    memory = VirtualMemory(FakeMemoryDriver(10 * CHUNK), CHUNK)
    tensor = memory.empty((3 * CHUNK - 5,), dtype=torch.uint8)
    for value in (1, 2, 3):
        tensor.fill_(value)
        memory.release((), keep=True)
        memory.claim()
        assert bool((tensor == value).all())
    assert made == [3 * CHUNK]
    tensor.fill_(4)
    memory.release((), keep=False)
    memory.claim()
    tensor.fill_(5)
    memory.release((), keep=True)
    memory.claim()
    assert made == [3 * CHUNK] * 2 and bool((tensor == 5).all()), "level 2 gives the memory back"


def test_memory_is_made_before_the_first_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = VirtualMemory(FakeMemoryDriver(10 * CHUNK), CHUNK)
    memory.prepare()  # Nothing is allocated.
    tensor = memory.empty((3 * CHUNK - 5,), dtype=torch.uint8)
    memory.prepare()
    with monkeypatch.context() as patch:
        patch.setattr("phonograph.engine.startup.virtual_memory.HostCopy", None)
        for value in (1, 2):
            tensor.fill_(value)
            memory.release((), keep=True)
            memory.claim()
            assert bool((tensor == value).all())


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("missing", [1, 0])
def test_memory_that_others_may_need_is_taken_by_a_sleep_only(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, missing: int
) -> None:
    made: list[tuple[int, int]] = []
    memory = VirtualMemory(FakeMemoryDriver(10 * CHUNK), CHUNK, num_ranks)
    memory.empty((3 * CHUNK,), dtype=torch.uint8)
    available = num_ranks * 2 * 3 * CHUNK - missing
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=available))
    monkeypatch.setattr("phonograph.engine.startup.virtual_memory.HostCopy", lambda *sizes: made.append(sizes))
    memory.prepare()
    assert made == [(3 * CHUNK, num_ranks)] * (not missing)


@pytest.mark.parametrize("closes", [True, False])
def test_memory_ends_while_it_is_made(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    wait = threading.Event()

    def touch(address: int, value: int, nbytes: int) -> None:
        wait.wait(10)
        touched.append(nbytes)

    monkeypatch.setattr(host_copy, "_PIECE", 9)
    monkeypatch.setattr(host_copy.ctypes, "memset", touch)
    copy = HostCopy(SIZE)
    threading.Timer(0.05, wait.set).start()
    if closes:
        copy.close()
    del copy
    gc.collect()
    count = len(touched)
    assert count < SIZE // 9
    time.sleep(0.05)
    assert len(touched) == count, "no thread writes into memory that is gone"
