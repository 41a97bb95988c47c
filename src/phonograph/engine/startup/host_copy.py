"""Host memory that keeps a GPU's memory while an engine sleeps, made fast: page-locked, on huge pages, by threads."""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch

from phonograph.core.host_resources import free_memory, usable_cpus

_PIECE = 256 << 20
"""Bytes that a thread touches at a time."""
_SPARE_SHARE = 0.02
"""Share of the host's or the container's memory that a copy leaves to others."""

log = logging.getLogger(__name__)


class HostCopy:
    """Bytes on the host, which go back to the operating system with `close`.

    An allocator of page-locked memory touches its pages one after the other, which takes most of the time of a copy.
    Here threads begin to touch them at once, and the driver locks them when they are there.

    Args:
        nbytes: size.
        num_ranks: ranks of this machine, each of which makes a copy of this size.

    Attributes:
        bytes: uint8 [nbytes].

    Raises:
        MemoryError: the host has too little memory.
    """

    def __init__(self, nbytes: int, num_ranks: int = 1) -> None:
        free = free_memory()
        spare = _SPARE_SHARE * (free.limit or psutil.virtual_memory().total)
        if nbytes * num_ranks > free.available - spare:
            raise MemoryError(f"{free.available} bytes are free {free.place}, and a fiftieth of all stays free")
        self._pages = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._unlock: weakref.finalize[..., HostCopy] | None = None
        threads = ThreadPoolExecutor(min(8, usable_cpus()))
        for start in range(0, nbytes, _PIECE):
            threads.submit(ctypes.memset, self.bytes.data_ptr() + start, 0, min(_PIECE, nbytes - start))
        self._stop_touching = weakref.finalize(self, threads.shutdown, cancel_futures=True)
        self._threads = threads

    def wait(self, *, page_locked: bool) -> None:
        """Wait until all pages are there.

        Args:
            page_locked: lock the pages for the current device, so that it reads and writes them itself.
        """
        if not self._stop_touching.alive:
            return
        began = time.perf_counter()
        self._threads.shutdown()
        self._stop_touching.detach()
        touched = time.perf_counter()
        if page_locked:
            address, nbytes = self.bytes.data_ptr(), len(self.bytes)
            error = int(_runtime().cudaHostRegister(address, nbytes, 0))
            seconds = touched - began, time.perf_counter() - touched
            log.debug("%d bytes of host memory: %.2f s to wait for, %.2f s to lock", nbytes, *seconds)
            if error:
                log.warning("host memory of a sleeping engine is not page-locked (error %d): copies take longer", error)
            else:
                self._unlock = weakref.finalize(self, _unlock, address)
                self._unlock.atexit = False  # The driver may be gone.

    def close(self) -> None:
        """Give the memory back. Copies from it must have ended."""
        self._stop_touching()
        if self._unlock is not None:
            self._unlock()
        del self.bytes
        self._pages.close()


def _unlock(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()
