"""Device memory of the paged KV cache: one tensor per layer, in the backend's layout."""

from __future__ import annotations

import torch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.errors import MemoryLimitError


def allocate_kv_caches(
    spec: AttentionSpec, *, num_layers: int, num_blocks: int, device: torch.device
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
            return [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        shape = (2, num_blocks, heads, size, head_size)
        return [torch.empty(shape, dtype=dtype, device=device).transpose(2, 3) for _ in range(num_layers)]
    except RuntimeError as error:  # torch has no more specific error for the CPU
        raise MemoryLimitError(
            f"no memory for a KV cache of {num_blocks} blocks in {num_layers} layers; lower kv_cache_memory_bytes, "
            "num_kv_blocks or gpu_memory_utilization"
        ) from error
