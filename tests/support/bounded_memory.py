"""Bounds of memory in Triton's interpreter, which reads and writes any address of the process.

A launch may touch the storages of the tensors that it gets. A kernel that reads before or after them, and does not use
what it reads, is right in every test of its results; on a GPU it may end the process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class OutOfBoundsError(Exception):
    """A kernel touched memory that is of none of its arguments."""


@contextmanager
def bounded_memory() -> Generator[None]:
    """Make kernels in the interpreter raise an OutOfBoundsError within the context."""
    from triton.runtime import interpreter as module

    interpreter: Any = module
    launch, memory = interpreter.GridExecutor.__call__, interpreter._interpreter
    allowed = np.zeros((0, 2), np.uint64)

    def bounded_launch(self: Any, *args: Any, **keywords: Any) -> None:
        nonlocal allowed
        before, allowed = allowed, _storages([*args, *keywords.values()])
        try:
            launch(self, *args, **keywords)
        finally:
            allowed = before

    def check(addresses: Any, mask: Any, num_bytes: int) -> None:
        touched = np.asarray(addresses)[np.asarray(mask).astype(bool)].ravel()
        place = np.searchsorted(allowed[:, 0], touched, side="right") - 1
        inside = (place >= 0) & (touched + np.uint64(num_bytes) <= allowed[place, 1])
        if not inside.all():
            count = int((~inside).sum())
            raise OutOfBoundsError(f"{count} of {len(touched)} addresses are in no argument of the kernel")

    def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check(addresses, mask, dtype.itemsize)
        return loads(addresses, mask, other, dtype)

    def store(addresses: Any, value: Any, mask: Any) -> Any:
        check(addresses, mask, np.asarray(value).itemsize)
        return stores(addresses, value, mask)

    loads, stores = memory.load, memory.store
    memory.load, memory.store = load, store
    interpreter.GridExecutor.__call__ = bounded_launch
    try:
        yield
    finally:
        memory.load, memory.store = loads, stores
        interpreter.GridExecutor.__call__ = launch


def _storages(values: Any) -> np.ndarray:
    """Return first and end address of the storages, joined where they overlap, in order [N, 2]."""
    joined: list[list[int]] = []
    for first, end in sorted(_bounds_of(values)):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([first, end])
    return np.array(joined, np.uint64).reshape(-1, 2)


def _bounds_of(values: Any) -> Iterator[tuple[int, int]]:
    for value in values:
        tensor = getattr(value, "base", None) if hasattr(value, "block_shape") else value
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        elif isinstance(tensor, tuple):
            yield from _bounds_of(tensor)
