"""Tensors whose rows lie more than 2^31 elements apart, in address space that no memory stands behind until it is used.

On a GPU the memory is real. In front of each tensor lie as many elements as 32 bits wrap by, so that an address which
was computed in 32 bits leads into that part, and a test fails instead of ending the process.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

BORDER = 1 << 31
_NO_RESERVE = 0x4000
"""Linux: the mapping may be larger than the machine's memory."""


def far_elements(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `count` elements with BORDER elements in front; zeros on the CPU, anything on a GPU."""
    if device.type == "cuda":
        return torch.empty(BORDER + count, dtype=dtype, device=device)[BORDER:]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, (BORDER + count) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[BORDER:]


def far_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor with BORDER elements in front."""
    return far_elements(torch.Size(shape).numel(), dtype, device).view(shape)


def spread(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Copy `tensor`, with the last index of `dim` BORDER elements or more behind its first.

    Args:
        dim: has three indices or more, so that its stride itself fits 32 bits; dimensions before it lie further apart
    """
    count = tensor.shape[dim]
    assert count > 2
    stride = -(-BORDER // (count - 1) // 128) * 128
    strides = list(tensor.contiguous().stride())
    strides[dim] = stride
    for outer in reversed(range(dim)):
        strides[outer] = strides[outer + 1] * tensor.shape[outer + 1]
    far = far_elements(strides[0] * tensor.shape[0], tensor.dtype, tensor.device)
    return far.as_strided(tensor.shape, strides).copy_(tensor)


@contextmanager
def gpu_turn() -> Iterator[None]:
    """Exclude other processes that test on far memory, each of which takes a quarter of a GPU; free torch's memory."""
    with Path(tempfile.gettempdir(), "phonograph-far-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def last_programs(count: int) -> Iterator[None]:
    """Has Triton's interpreter run the last `count` programs of the grid's first dimension alone; on a GPU all run."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if torch.cuda.is_available() or interpreter is None:
        yield
        return
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    call, set_idx, set_dim = executor.__call__, builder.set_grid_idx, builder.set_grid_dim

    def call_last(self: object, *args: object, **keywords: object) -> None:
        whole = self.grid  # pyright: ignore[reportAttributeAccessIssue]
        skipped = whole[0] - count
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "grid", (count, *whole[1:]))
            patch.setattr(builder, "set_grid_dim", lambda x, *rest: set_dim(x + skipped, *rest))
            patch.setattr(builder, "set_grid_idx", lambda x, *rest: set_idx(x + skipped, *rest))
            call(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", call_last)
        yield
