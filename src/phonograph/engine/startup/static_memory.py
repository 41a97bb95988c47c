"""Protocol of memory whose tensors keep their addresses while the memory itself is given back, and that of a CPU."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from phonograph.core.host_resources import free_memory
from phonograph.errors import ConfigError, MemoryLimitError


class StaticMemory(Protocol):
    """Memory of tensors that live as long as the engine. Graphs stay valid, because no address changes.

    empty: allocates a tensor; called as `torch.empty`. After `claim` it returns the same addresses in the same order,
        so that weights can be loaded again into the tensors that graphs read
    """

    empty: Callable[..., torch.Tensor]

    def prepare(self) -> None:
        """Begin to make what a first `release` with `keep` needs, which takes seconds. All tensors are allocated."""
        ...

    def release(self, storages: Iterable[torch.UntypedStorage], *, keep: bool) -> None:
        """Give the memory back. With `keep` the contents are in host memory afterwards.

        A second call without `keep` drops the contents that an earlier one kept.

        Args:
            storages: those of all tensors in this memory.
            keep: see above.

        Raises:
            MemoryLimitError: the host has too little memory; nothing has changed.
        """
        ...

    def claim(self) -> None:
        """Take memory for all tensors again, with the contents that were kept. Others are undefined.

        Raises:
            MemoryLimitError: the device has too little memory; nothing has changed.
        """
        ...


class HostMemory:
    """Memory of a CPU. Pages that were given back come with the next write.

    Args:
        num_ranks: ranks of this machine, each of which has as much memory.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        if sys.platform != "linux":
            raise ConfigError("enable_sleep_mode", True, f"needs Linux on a CPU; this is {sys.platform}")
        self.empty = torch.empty
        self._released, self._num_ranks = 0, num_ranks
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def prepare(self) -> None:
        pass  # Contents stay where they are.

    def release(self, storages: Iterable[torch.UntypedStorage], *, keep: bool) -> None:
        if keep:  # It is host memory.
            return
        self._released = 0
        for storage in storages:
            self._released += storage.nbytes()
            # Other arrays may have a part of the first and the last page.
            start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end and self._madvise(start, end - start, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise")

    def claim(self) -> None:
        free, needed = free_memory(), self._released * self._num_ranks
        if needed > free.available:
            problem = f"{needed} bytes are needed, and {free.available} are free {free.place}"
            raise MemoryLimitError(f"no memory to wake up: {problem}; end other programs and wake up again")
        self._released = 0
