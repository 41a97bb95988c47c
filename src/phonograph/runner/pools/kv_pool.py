"""Device memory of the paged KV cache: tensors of pages, one for each layer of a KV group, which all groups share.

A page is a block of any group. Layer j of every group has its keys and values in tensor j, in pages that the layers of
other groups do not use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.core.kv_group import KVGroup
from phonograph.errors import MemoryLimitError


def allocate_kv_pool(
    groups: Sequence[KVGroup],
    specs: Sequence[AttentionSpec],
    *,
    num_pages: int,
    device: torch.device,
    make_empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[int, torch.Tensor]:
    """Allocate the pool; return the [2, B, S, K, D] tensor of each layer, by its index.

    Args:
        groups: layers of each group; pages of all have equal bytes.
        specs: attention of each group.
        num_pages: B.
        device: place of the pool.
        make_empty: allocates the tensors; called as `torch.empty`.

    Raises:
        MemoryLimitError: the device has too little memory.
    """
    most = 1 if groups[0].step else max(len(group.layers) for group in groups)
    tensors = allocate_kv_caches(specs[0], num_layers=most, num_blocks=num_pages, device=device, make_empty=make_empty)
    return {
        layer: _view(tensor, specs[0], spec)
        for group, spec in zip(groups, specs, strict=True)
        for layer, tensor in zip(group.layers, cycle(tensors) if group.step else tensors, strict=False)
    }


def _view(tensor: torch.Tensor, spec: AttentionSpec, other: AttentionSpec) -> torch.Tensor:
    """Return the tensor of a spec in the shape of another, whose blocks have as many elements."""
    size, heads, head_size = other.block_size, other.num_kv_heads, other.head_size
    if (size, heads, head_size) == (spec.block_size, spec.num_kv_heads, spec.head_size):
        return tensor
    num_pages = tensor.shape[1]
    if spec.layout is KVLayout.NHD:
        return tensor.view(2, num_pages, size, heads, head_size)
    return tensor.transpose(2, 3).view(2, num_pages, heads, size, head_size).transpose(2, 3)


def allocate_kv_caches(
    spec: AttentionSpec,
    *,
    num_layers: int,
    num_blocks: int,
    device: torch.device,
    make_empty: Callable[..., torch.Tensor] = torch.empty,
) -> list[torch.Tensor]:
    """Allocate one [2, B, S, K, D] tensor per layer (keys, values). HND has the same shape over permuted strides.

    The memory is not initialized and may contain NaN. A backend must not read what no request has written; the
    conformance suite checks this. On the CPU, pages are claimed when they are first written.

    Raises:
        MemoryLimitError: the device has too little memory.
    """
    dtype: torch.dtype = getattr(torch, spec.kv_cache_dtype)
    size, heads, head_size = spec.block_size, spec.num_kv_heads, spec.head_size
    try:
        if spec.layout is KVLayout.NHD:
            shape = (2, num_blocks, size, heads, head_size)
            return [make_empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        shape = (2, num_blocks, heads, size, head_size)
        return [make_empty(shape, dtype=dtype, device=device).transpose(2, 3) for _ in range(num_layers)]
    except RuntimeError as error:  # torch has no more specific error for the CPU
        raise MemoryLimitError(
            f"no memory for a KV cache of {num_blocks} blocks in {num_layers} layers; lower kv_cache_memory_bytes, "
            "num_kv_blocks or gpu_memory_utilization"
        ) from error
