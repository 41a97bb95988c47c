"""Specifications of attention that several tests share."""

from __future__ import annotations

from typing import Any

from phonograph.attention.attention_spec import AttentionSpec

TINY = AttentionSpec(
    num_query_heads=4,
    num_kv_heads=2,
    head_size=32,
    dtype="float32",
    kv_cache_dtype="float32",
    block_size=16,
    lse=True,
)
"""Small enough for Triton's interpreter."""
_LLAMA: dict[str, Any] = {
    "num_query_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "block_size": 16,
    "lse": True,
}


def llama(**changes: Any) -> AttentionSpec:
    """Return the attention of Llama 3.1 8B in pages of 16 tokens, with changes."""
    return AttentionSpec(**(_LLAMA | changes))
