"""Random paged batches for attention backends.

Batches are ragged and of odd sizes, with scattered blocks, empty slots and padding tokens. Everything that a backend
must not read is NaN: cache slots without a token, padding rows of the inputs, and two blocks. Entries of the block
table after the end of a sequence name the first; entries of blocks that an engine has freed, because they are behind
the windows of all layers, name the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from phonograph.attention.attention_spec import UNBOUNDED, AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionLayer
from phonograph.attention.metadata import CommonMetadata

_POISON_BLOCK = 0
FREED_BLOCK = 1
"""Block in the place of those that are behind the windows of all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """A batch by its lengths. Decodes come first.

    padded_reqs, padded_tokens: empty slots and padding rows at the end
    causal: None is the default of the kind of attention
    """

    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    padded_reqs: int = 0
    padded_tokens: int = 0
    causal: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Tensors of one batch, on the device and padded.

    query [T, H, D], key and value [T, K, D]: of the new tokens, not yet in the cache
    kv_cache [2, B, S, K, D]: holds the context, NaN elsewhere
    slots:    for each sequence the cache slots of all its tokens, the new ones last; freed ones are not in the table
    """

    common: CommonMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    slots: list[torch.Tensor]


def shapes_of(spec: AttentionSpec) -> list[BatchShape]:
    """Return the shapes of `batch_shapes` that a backend with `spec` accepts, and queries without keys.

    Ranks that share a context have these, and merge by LSE. Other ranks have the keys. Windows and sinks have no rule.
    """
    shapes = [one for one in batch_shapes(spec.block_size, spec.kind) if one.causal is None or spec.non_causal]
    if spec.lse and spec.non_causal and spec.windows == ((UNBOUNDED, UNBOUNDED),) and not spec.sinks:
        size = spec.block_size
        more = BatchShape(
            name="without keys",
            query_lens=(1, 1, 2, 5, size + 3),
            seq_lens=(0, size + 1, 0, 2, 2 * size),
            padded_reqs=2,
            padded_tokens=3,
            causal=False,
        )
        shapes.append(more)
    return shapes


def batch_shapes(block_size: int, kind: AttentionKind) -> list[BatchShape]:
    """Return batches with lengths around the borders of blocks, in every mix of decodes and prefills."""
    size = block_size
    prefills = BatchShape(name="prefills", query_lens=(5, size + 1, 2 * size + 3), seq_lens=(5, size + 1, 2 * size + 3))
    if kind is not AttentionKind.DECODER:
        one = BatchShape(name="one token", query_lens=(1,), seq_lens=(1,), padded_reqs=1)
        found = [replace(prefills, name="bidirectional", padded_reqs=2, padded_tokens=3), one]
        if kind is AttentionKind.ENCODER_DECODER:
            queries, keys = (1, 1, 5, size + 1), 2 * size + 3
            of_encoder = BatchShape(name="keys of an encoder", query_lens=queries, seq_lens=(keys,) * len(queries))
            found.append(replace(of_encoder, padded_reqs=2, padded_tokens=3))
        return found
    return [
        BatchShape(name="one decode", query_lens=(1,), seq_lens=(2 * size + 3,)),
        BatchShape(
            name="decodes",
            query_lens=(1,) * 6,
            seq_lens=(1, size - 1, size, size + 1, 3 * size + 5, 2),
            padded_reqs=3,
            padded_tokens=3,
        ),
        prefills,
        BatchShape(name="chunked prefills", query_lens=(7, size + 2), seq_lens=(3 * size, 2 * size + 5)),
        BatchShape(
            name="mixed",
            query_lens=(1, 1, 1, 9, size + 3, 1),
            seq_lens=(size + 1, 2, 4 * size + 1, 9, 2 * size + 7, size),
            padded_reqs=2,
            padded_tokens=5,
        ),
        BatchShape(name="uniform 3", query_lens=(3,) * 4, seq_lens=(3, size, size + 2, 2 * size + 1), padded_reqs=1),
        BatchShape(name="empty", query_lens=(), seq_lens=(), padded_reqs=2, padded_tokens=4),
        BatchShape(name="not causal", query_lens=(1, size + 3), seq_lens=(size + 2, 2 * size), causal=False),
    ]


def make_layer(
    spec: AttentionSpec, index: int, window: tuple[int, int], device: torch.device, generator: torch.Generator
) -> AttentionLayer:
    """Return a layer with random parameters for each feature of `spec`."""

    def parameter(present: bool, count: int, low: float, high: float) -> torch.Tensor | None:
        values = torch.empty(count).uniform_(low, high, generator=generator)
        return values.to(device) if present else None

    quantized = spec.has_fp8_cache
    return AttentionLayer(
        index=index,
        # Neither 1 nor the usual scale, so that a backend that ignores it computes something else.
        scale=1.3 * spec.head_size**-0.5,
        window=window,
        softcap=spec.softcap,
        alibi_slopes=parameter(spec.alibi, spec.num_query_heads, 0.01, 0.5),
        sinks=parameter(spec.sinks, spec.num_query_heads, -2.0, 4.0),
        k_scale=parameter(quantized, spec.num_kv_heads, 0.02, 0.08),
        v_scale=parameter(quantized, spec.num_kv_heads, 0.02, 0.08),
        q_scale=parameter(quantized, spec.num_kv_heads, 0.02, 0.08),
    )


def make_batch(
    spec: AttentionSpec, layer: AttentionLayer, shape: BatchShape, device: torch.device, generator: torch.Generator
) -> PagedBatch:
    """Draw the contents of a batch, with the context of each sequence already in the cache."""
    size = spec.block_size
    num_reqs = len(shape.query_lens) + shape.padded_reqs
    num_blocks = [-(-seq_len // size) for seq_len in shape.seq_lens]
    total_blocks = 2 + 2 * sum(num_blocks)
    scattered = 2 + torch.randperm(total_blocks - 2, generator=generator)
    tables = torch.split(scattered[: sum(num_blocks)], num_blocks)
    block_table = torch.full((num_reqs, max(num_blocks, default=0) + 2), _POISON_BLOCK, dtype=torch.int32)
    slots: list[torch.Tensor] = []
    for index, (table, seq_len, query_len) in enumerate(zip(tables, shape.seq_lens, shape.query_lens, strict=True)):
        num_freed = _blocks_freed(spec, seq_len - query_len)
        block_table[index, :num_freed] = FREED_BLOCK
        block_table[index, num_freed : len(table)] = table[num_freed:]
        slots.append((table[:, None] * size + torch.arange(size)).flatten()[:seq_len])

    dtype: torch.dtype = getattr(torch, spec.dtype)
    num_tokens = sum(shape.query_lens)
    cache = torch.full((2, total_blocks * size, spec.num_kv_heads, spec.head_size), torch.nan)
    for all_slots, query_len in zip(slots, shape.query_lens, strict=True):
        context = all_slots[: max(0, len(all_slots) - query_len)]
        cache[:, context] = torch.randn(2, len(context), *cache.shape[2:], generator=generator)
    kv_cache = quantized(cache[0], layer.k_scale, spec), quantized(cache[1], layer.v_scale, spec)

    def rows(heads: int) -> torch.Tensor:
        padded = torch.full((num_tokens + shape.padded_tokens, heads, spec.head_size), torch.nan)
        padded[:num_tokens] = torch.randn(num_tokens, heads, spec.head_size, generator=generator)
        return padded.to(device, dtype)

    new_slots = [
        torch.cat([torch.full((length,), -1), all_slots])[len(all_slots) :]
        for all_slots, length in zip(slots, shape.query_lens, strict=True)
    ]
    slot_mapping = torch.cat([*new_slots, torch.full((shape.padded_tokens,), -1)]).long()
    return PagedBatch(
        common=_common(spec, shape, block_table, slot_mapping, device),
        query=rows(spec.num_query_heads),
        key=rows(spec.num_kv_heads),
        value=rows(spec.num_kv_heads),
        kv_cache=_in_layout(torch.stack(kv_cache).unflatten(1, (total_blocks, size)), spec.layout, device),
        slots=slots,
    )


def _blocks_freed(spec: AttentionSpec, context: int) -> int:
    """Return the leading blocks that no query behind a context attends to in any layer."""
    lefts = [left for left, _ in spec.windows]
    return 0 if min(lefts) < 0 else max(0, context - max(lefts)) // spec.block_size


def quantized(rows_NKD: torch.Tensor, scale_K: torch.Tensor | None, spec: AttentionSpec) -> torch.Tensor:
    """Return rows as a cache stores them. They must be in the range of its dtype."""
    if scale_K is not None:
        rows_NKD = rows_NKD / scale_K.to(rows_NKD.device)[:, None]
    return rows_NKD.to(getattr(torch, spec.kv_cache_dtype))


def _in_layout(cache_2BSKD: torch.Tensor, layout: KVLayout, device: torch.device) -> torch.Tensor:
    cache = cache_2BSKD.to(device)
    return cache if layout is KVLayout.NHD else cache.transpose(2, 3).contiguous().transpose(2, 3)


def _common(
    spec: AttentionSpec,
    shape: BatchShape,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    device: torch.device,
) -> CommonMetadata:
    query_lens = np.array([*shape.query_lens, *[0] * shape.padded_reqs], dtype=np.int32)
    seq_lens = np.array([*shape.seq_lens, *[0] * shape.padded_reqs], dtype=np.int32)
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_decodes = next((index for index, length in enumerate(shape.query_lens) if length != 1), len(shape.query_lens))
    return CommonMetadata(
        num_reqs=len(shape.query_lens),
        num_decodes=num_decodes,
        num_tokens=sum(shape.query_lens),
        num_decode_tokens=num_decodes,
        max_query_len=max(shape.query_lens, default=0),
        max_seq_len=max(shape.seq_lens, default=0),
        query_start_loc=torch.from_numpy(query_start_loc).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=block_table.to(device),
        slot_mapping=slot_mapping.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu=seq_lens,
        causal=spec.kind is AttentionKind.DECODER if shape.causal is None else shape.causal,
    )
