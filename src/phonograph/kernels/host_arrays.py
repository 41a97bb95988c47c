"""Arrays of the host that are copied to a device while the host goes on."""

from __future__ import annotations

import numpy as np
import torch


def send(array: np.ndarray | torch.Tensor, target: torch.Tensor) -> None:
    """Copy an array to a tensor of its shape."""
    target.copy_(_pinned(array, target.device), non_blocking=True)


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of an array on a device. Without a GPU it shares the array's memory."""
    return _pinned(array, device).to(device, non_blocking=True)


def _pinned(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    sent = torch.as_tensor(array)
    return sent.pin_memory() if device.type == "cuda" else sent
