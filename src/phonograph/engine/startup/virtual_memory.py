"""Memory of a GPU on virtual addresses that outlive it, by the driver's functions for virtual memory.

A range of addresses is reserved once. Physical memory is mapped into it in chunks of one size, as tensors are made. To
sleep, every chunk is unmapped and released; to wake, new chunks are mapped at the same addresses.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from phonograph.core.host_resources import available_memory
from phonograph.engine.startup.host_copy import HostCopy
from phonograph.errors import MemoryLimitError, cause_text

CHUNK_BYTES = 32 << 20
"""Bytes of a chunk: a multiple of the driver's granularity."""
_PREPARED_SHARE = 0.5
"""Share of the host's available memory that is taken before the first sleep needs it."""
_ALIGNMENT = 512
"""Alignment of a tensor, that of torch's allocator."""


class MemoryDriver(Protocol):
    """Functions of a driver for virtual memory. Tests have one of their own.

    device_bytes: memory of the device
    """

    device_bytes: int

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses without memory, and return the first."""
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Return reserved addresses."""
        ...

    def map(self, address: int, nbytes: int) -> int:
        """Allocate a chunk at an address, and return its handle.

        Raises:
            MemoryLimitError: the device has too little memory.
        """
        ...

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Release a chunk, when all work of the device is done."""
        ...

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Return memory as a tensor of bytes, which keeps `owner` alive."""
        ...


class VirtualMemory:
    """`StaticMemory` of a GPU.

    Args:
        driver: of the GPU.
        chunk_bytes: bytes of a chunk.
        num_ranks: ranks of this machine, which share its host memory, with a GPU each.
    """

    def __init__(self, driver: MemoryDriver, chunk_bytes: int = CHUNK_BYTES, num_ranks: int = 1) -> None:
        self._driver = driver
        self._num_ranks = num_ranks
        self._chunk_bytes = chunk_bytes
        self._reserved = -(-driver.device_bytes // chunk_bytes) * chunk_bytes
        self._address = driver.reserve(self._reserved)
        self._used = 0
        self._num_chunks = 0
        self._handles: dict[int, int] = {}  # by address
        self._host_copy: HostCopy | None = None  # made early and kept while awake, because it takes time to make
        self._holds_contents = False
        finalizer = weakref.finalize(
            self, _give_back, driver, self._address, self._reserved, chunk_bytes, self._handles
        )
        finalizer.atexit = False  # The driver may be gone; it frees the memory of a process itself.

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Allocate a tensor on the driver's device; see `StaticMemory`.

        Raises:
            MemoryLimitError: the device has too little memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(*shape, dtype=dtype, device=device)
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = start + nbytes
        if end > self._reserved:
            raise MemoryLimitError(f"{end} bytes do not fit the device, which has {self._driver.device_bytes}")
        while self._num_chunks * self._chunk_bytes < end:
            self._map(self._num_chunks)
            self._num_chunks += 1
        self._used = end
        return self._driver.tensor(self._address + start, nbytes, self).view(dtype).view(*shape)

    def prepare(self) -> None:
        nbytes = self._num_chunks * self._chunk_bytes
        if 0 < nbytes * self._num_ranks <= available_memory() * _PREPARED_SHARE:
            with suppress(MemoryError, OSError):  # A sleep that needs the memory tries again.
                self._host_copy = HostCopy(nbytes, self._num_ranks)

    def release(self, storages: Iterable[torch.UntypedStorage], *, keep: bool) -> None:
        if not keep:
            self._drop()
        elif self._handles and self._num_chunks:
            try:
                self._keep()
            except (MemoryError, OSError) as error:
                problem = f"no host memory to keep {self._num_chunks * self._chunk_bytes} bytes while the engine sleeps"
                raise MemoryLimitError(f"{problem} ({cause_text(error)}); level 2 keeps nothing") from error
        self._unmap()

    def claim(self) -> None:
        try:
            for number in range(self._num_chunks):
                self._map(number)
        except MemoryLimitError as error:
            self._unmap()
            needed = self._num_chunks * self._chunk_bytes
            problem = f"no memory to wake up: {needed} bytes are needed, and other programs use the GPU"
            raise MemoryLimitError(f"{problem} ({error}); end them and wake up again") from error
        if self._host_copy is not None and self._holds_contents:
            self._copy(self._host_copy, back=True)
        self._used, self._holds_contents = 0, False

    def _keep(self) -> None:
        nbytes = self._num_chunks * self._chunk_bytes
        if self._host_copy is None or len(self._host_copy.bytes) != nbytes:
            self._drop()
            self._host_copy = HostCopy(nbytes, self._num_ranks)
        self._host_copy.wait(page_locked=self._chunk(self._address).is_cuda)
        self._copy(self._host_copy, back=False)
        self._holds_contents = True

    def _copy(self, host: HostCopy, *, back: bool) -> None:
        for address, part in zip(self._handles, host.bytes.split(self._chunk_bytes), strict=True):
            chunk = self._chunk(address)
            into, source = (chunk, part) if back else (part, chunk)
            into.copy_(source, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _drop(self) -> None:
        if self._host_copy is not None:
            self._host_copy.close()
        self._host_copy, self._holds_contents = None, False

    def _chunk(self, address: int) -> torch.Tensor:
        return self._driver.tensor(address, self._chunk_bytes, self)

    def _map(self, number: int) -> None:
        address = self._address + number * self._chunk_bytes
        self._handles[address] = self._driver.map(address, self._chunk_bytes)

    def _unmap(self) -> None:
        for address in list(self._handles):
            self._driver.unmap(address, self._chunk_bytes, self._handles.pop(address))


def _give_back(driver: MemoryDriver, address: int, reserved: int, chunk_bytes: int, handles: dict[int, int]) -> None:
    for chunk, handle in handles.items():
        driver.unmap(chunk, chunk_bytes, handle)
    driver.free(address, reserved)
