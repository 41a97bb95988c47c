"""Arrays of the host that are copied to a device while the host goes on."""

from __future__ import annotations

import numpy as np
import torch


def pinned(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor of the host that copies to `device` without a wait: for a GPU in pinned memory.

    Without a GPU it shares the array's memory.
    """
    sent = torch.as_tensor(array)
    return sent.pin_memory() if device.type == "cuda" else sent
