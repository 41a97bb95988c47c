"""`MemoryDriver` of an NVIDIA GPU: CUDA's functions for virtual memory, called in the driver's library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from phonograph.engine.startup.early_start import DRIVER
from phonograph.errors import MemoryLimitError, PhonographError

_PINNED_ON_DEVICE = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED, and CU_MEM_LOCATION_TYPE_DEVICE."""
_READ_AND_WRITE = 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp; the last 8 bytes are its flags."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Pointer:
    """Memory as torch takes it; a tensor keeps the object alive, and with it the owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 3}
        self.owner = owner


class CudaMemoryDriver:
    """Virtual memory of the current device; see `MemoryDriver`."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self.device_bytes = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.synchronize(self._device)  # makes the device's context
        self._library = ctypes.CDLL(DRIVER)
        location = _Location(_PINNED_ON_DEVICE, self._device.index)
        self._allocation = _Allocation(type=_PINNED_ON_DEVICE, location=location)
        self._access = _Access(location, _READ_AND_WRITE)

    def reserve(self, nbytes: int) -> int:
        address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_size_t(0), zero, zero
        )
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def map(self, address: int, nbytes: int) -> int:
        torch.cuda.set_device(self._device)  # The context belongs to the thread.
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        at, zero = ctypes.c_uint64(address), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._allocation), zero)
        self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, zero)
        self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        return handle.value

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        torch.cuda.synchronize(self._device)
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        tensor = torch.as_tensor(_Pointer(address, nbytes, owner), device=self._device)
        assert tensor.data_ptr() == address, "torch has copied the memory"
        return tensor

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self._device)
            raise MemoryLimitError(f"the GPU has {free} free bytes of {total}")
        if error:
            raise PhonographError(f"the CUDA driver refused {name}, with error {error}")
