"""`MemoryDriver` over host memory, which counts chunks and makes contents useless when they are released."""

from __future__ import annotations

import ctypes

import torch

from phonograph.errors import MemoryLimitError


class FakeMemoryDriver:
    """Driver of a device with `device_bytes` of memory, of which others may have `taken` some.

    mapped: bytes of each chunk by its address
    """

    def __init__(self, device_bytes: int) -> None:
        self.device_bytes, self.taken = device_bytes, 0
        self.mapped: dict[int, int] = {}
        self.calls: list[str] = []
        self._buffers: dict[int, torch.Tensor] = {}

    def reserve(self, nbytes: int) -> int:
        buffer = torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8)
        address = -(-buffer.data_ptr() // 512) * 512
        self._buffers[address] = buffer
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert not [one for one in self.mapped if address <= one < address + nbytes]
        del self._buffers[address]
        self.calls.append("free")

    def map(self, address: int, nbytes: int) -> int:
        if sum(self.mapped.values()) + nbytes + self.taken > self.device_bytes:
            raise MemoryLimitError("the fake GPU is full")
        assert address not in self.mapped
        self.mapped[address] = nbytes
        return address + 1

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        assert handle == address + 1 and self.mapped.pop(address) == nbytes
        ctypes.memset(address, 0xFF, nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        for place in (address, address + nbytes - 1):
            assert any(start <= place < start + size for start, size in self.mapped.items())
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=torch.uint8)
