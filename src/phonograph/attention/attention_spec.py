"""Attention of one KV group, as backends and selection describe it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class AttentionKind(Enum):
    """Kinds of attention, by the part of a model that has them. The engine runs decoders and encoders alone."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class KVLayout(Enum):
    """Memory order inside one block: NHD is [S, K, D] (tokens, heads, head size), HND is [K, S, D]."""

    NHD = "NHD"
    HND = "HND"


UNBOUNDED = -1
"""Side of a window without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one KV group, as far as it decides which backends can run it.

    Attributes:
        num_query_heads, num_kv_heads: H and K; H is a multiple of K.
        head_size: D.
        dtype, kv_cache_dtype: names as torch writes them ("bfloat16"); the cache may be "float8_e4m3fn"/"float8_e5m2".
        block_size: tokens of a cache block.
        layout: memory order in a block.
        kind: part of a model that attends.
        windows: the distinct (left, right) windows of the layers, in keys beside the query itself; UNBOUNDED (-1) for
            none. A model's `sliding_window` of W keys is (W - 1, 0).
        softcap: 0 for none.
        alibi, sinks: True if the layers have slopes, or a sink for each head.
        lse: True if the caller needs the log-sum-exp.
        non_causal: True if batches of a decoder may come without a causal mask (`CommonMetadata.causal`).
        speculative_tokens: k draft tokens a step; a decode then has query length 1 + k.
        shared_prefixes: a backend may attend prefixes that decodes share once, by their block tables.
        batch_invariant: the output of a sequence is the same bit for bit in every batch.

    Example:
        ```python
        spec = AttentionSpec(
            num_query_heads=32,
            num_kv_heads=8,
            head_size=128,
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            block_size=16,
        )
        assert not spec.windowed
        ```
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    layout: KVLayout = KVLayout.NHD
    kind: AttentionKind = AttentionKind.DECODER
    windows: tuple[tuple[int, int], ...] = ((UNBOUNDED, UNBOUNDED),)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    non_causal: bool = False
    speculative_tokens: int = 0
    shared_prefixes: bool = True
    batch_invariant: bool = False

    @property
    def windowed(self) -> bool:
        """True if any layer has a window."""
        return any(window != (UNBOUNDED, UNBOUNDED) for window in self.windows)

    @property
    def has_fp8_cache(self) -> bool:
        """True if keys and values are rounded to FP8."""
        return self.kv_cache_dtype.startswith("float8")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of queries and outputs."""
        return getattr(torch, self.dtype).itemsize

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_size * getattr(torch, self.kv_cache_dtype).itemsize
