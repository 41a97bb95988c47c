"""The paged cache as the copy engine sees it: a matrix whose rows are slots."""

from __future__ import annotations

from typing import NamedTuple

import torch

TILE = 64
"""Keys that are brought at once."""


class CacheMatrix(NamedTuple):
    """Rows of all heads' slots [K * D] or, with `heads_outside`, of a head's [D]: keys, then as many of values."""

    rows: int
    columns: int
    heads_outside: bool


def as_matrix(kv_cache: torch.Tensor, width: int) -> CacheMatrix | None:
    """None where the cache [2, B, S, K, D] is no such matrix, or a tile of keys may lie in two blocks.

    width: head size rounded up to a power of two
    """
    _, num_blocks, block_size, num_kv_heads, head_size = kv_cache.shape
    stride_kv, stride_block, stride_slot, stride_head, _ = kv_cache.stride()
    heads_outside = num_kv_heads > 1 and stride_slot == head_size
    if not (
        block_size % TILE == 0
        and (128 % block_size == 0 or block_size % 128 == 0)
        and width == head_size
        and stride_kv == num_blocks * stride_block
        and stride_block == block_size * num_kv_heads * head_size
        and (num_kv_heads == 1 or stride_head == (block_size * head_size if heads_outside else head_size))
    ):
        return None
    columns = head_size if heads_outside else num_kv_heads * head_size
    return CacheMatrix(2 * stride_kv // columns, columns, heads_outside)
