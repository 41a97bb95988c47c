"""How much shared memory a program may have: what sizes the rings of keys, values and weights."""

# pyright: basic
from __future__ import annotations

import functools

import torch

_HOPPER = 227 * 1024


@functools.cache
def shared_memory() -> int:
    """On the current device (99 KiB at compute capability 8.6, 8.9 and 12.0, 163 at 8.0); Hopper's without a GPU."""
    if not torch.cuda.is_available():
        return _HOPPER
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin
