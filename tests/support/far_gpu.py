"""A GPU that is not here, for programs that compile for it."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class FarGpu(DriverBase):
    """A driver for a GPU of this compute capability (90) that is not here; nothing is launched through it."""

    launcher_cls: Any = None

    def __init__(self, capability: int) -> None:
        self._capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_device_interface(self) -> Any:
        raise NotImplementedError
