"""Shared memory of a program, from which the rings of keys, values and weights get their sizes."""

# pyright: basic
from __future__ import annotations

import functools

import torch

_HOPPER = 227 * 1024


@functools.cache
def shared_memory() -> int:
    """Return the bytes on the current device, or Hopper's without a GPU.

    Others have 99 KiB (compute capability 8.6, 8.9 and 12.0) or 163 KiB (8.0).
    """
    if not torch.cuda.is_available():
        return _HOPPER
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin
