"""Addresses of a captured graph's intermediates. Memory is reused as soon as its last reader has run.

A device's caching allocator does this during the capture. The tape plans afterwards, with the whole capture in view: it
walks the calls in order, claims the best-fitting gap at a storage's first use, and releases it after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ALIGNMENT = 64
"""Bytes of a cache line; vector loads stay aligned as in torch's own allocations."""


@dataclass(slots=True)
class PoolPlan:
    """Byte offsets by storage id, and the size of the pool."""

    offsets: dict[int, int] = field(default_factory=dict[int, int])
    num_bytes: int = 0


def plan_pool(uses: list[list[torch.Tensor]], planned: set[int], keep: tuple[torch.Tensor, ...]) -> PoolPlan:
    """Place storages in one pool.

    Args:
        uses: for each call in order, the tensors that it touches.
        planned: ids of the storages to place. Weights and static buffers keep their own memory.
        keep: tensors that the caller reads after the last call.
    """
    last_use: dict[int, int] = {}
    for index, tensors in enumerate(uses):
        for tensor in tensors:
            last_use[storage_id(tensor)] = index
    kept = {storage_id(tensor) for tensor in keep}
    plan = PoolPlan()
    gaps: list[tuple[int, int]] = []  # (offset, size), ascending, never touching
    for index, tensors in enumerate(uses):
        sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        for storage, size in sizes.items():
            if storage in planned and storage not in plan.offsets:
                plan.offsets[storage] = _claim(gaps, plan, _aligned(size))
        for storage, size in sizes.items():
            if storage in planned and storage not in kept and last_use[storage] == index:
                _release(gaps, plan.offsets[storage], _aligned(size))
    return plan


def _aligned(size: int) -> int:
    return max(ALIGNMENT, (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


def _claim(gaps: list[tuple[int, int]], plan: PoolPlan, size: int) -> int:
    fitting = [(gap_size, position) for position, (_, gap_size) in enumerate(gaps) if gap_size >= size]
    if fitting:
        gap_size, position = min(fitting)
        offset = gaps[position][0]
        if gap_size == size:
            del gaps[position]
        else:
            gaps[position] = (offset + size, gap_size - size)
        return offset
    offset = plan.num_bytes
    if gaps and sum(gaps[-1]) == plan.num_bytes:  # extend the gap at the end
        offset = gaps.pop()[0]
    plan.num_bytes = offset + size
    return offset


def _release(gaps: list[tuple[int, int]], offset: int, size: int) -> None:
    gaps.append((offset, size))
    gaps.sort()
    merged: list[tuple[int, int]] = []
    for start, length in gaps:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    gaps[:] = merged


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's memory, valid as long as a tensor keeps it alive."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
