"""Attention of ranks that share the tokens of a KV head, compared with that of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from thread_ranks import ThreadRanks, on_ranks

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer, MakeBackend
from phonograph.attention.composite.context_parallel import ContextParallelBackend
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.core.limits import Limits

CPU = torch.device("cpu")
LIMITS = Limits(max_model_len=96, max_num_seqs=5, max_num_batched_tokens=40)
NUM_BLOCKS = 40
MIXED = [1, 1, 3, 17], [0, 45, 2, 31]
"""Queries and contexts of sequences. Some ranks have no key of the shortest."""
DECODES = [1, 1, 1, 1], [0, 45, 2, 31]


def batch(queries: Sequence[int], contexts: Sequence[int], block_size: int, padding: int, seed: int) -> CommonMetadata:
    """Return a batch with a slot without a sequence, padding, and blocks in any order."""
    generator = torch.Generator().manual_seed(seed)
    lens = [query + context for query, context in zip(queries, contexts, strict=True)]
    starts = np.cumsum([0, *queries, 0]).astype(np.int32)
    most = -(-max(lens) // block_size)
    tables = torch.randperm(NUM_BLOCKS, generator=generator)[: len(lens) * most].view(len(lens), most).int()
    tables = torch.cat([tables, tables[:1]])
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (query, length) in enumerate(zip(queries, lens, strict=True))
        for position in range(length - query, length)
    ]
    host = np.array([*lens, 0], np.int32)
    num_decodes = next((index for index, query in enumerate(queries) if query > 1), len(queries))
    return CommonMetadata(
        num_reqs=len(queries),
        num_decodes=num_decodes,
        num_tokens=sum(queries),
        num_decode_tokens=num_decodes,
        max_query_len=max(queries),
        max_seq_len=max(lens),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(host),
        block_table=tables,
        slot_mapping=torch.tensor([*slots, *[-1] * padding]),
        query_start_loc_cpu=starts,
        seq_lens_cpu=host,
    )


def check_divided(
    make: MakeBackend,
    num_ranks: int,
    lens: tuple[list[int], list[int]],
    *,
    size: int,
    head_size: int = 16,
    dtype: str = "float32",
    writes: str = "write_kv",
) -> None:
    """Compare results, log-sum-exps and caches with the reference backend's.

    Each rank has two query heads; the context, in float64 rounded once, is written by the tokens' slots.

    Args:
        make: the backend of each part.
        num_ranks: that share the tokens.
        lens: queries and contexts of sequences.
        size: tokens of a rank's page.
        head_size: of queries and keys.
        dtype: of queries, keys and the cache.
        writes: how keys are written, "write_kv" or by "a kernel".
    """
    spec = AttentionSpec(
        num_query_heads=2 * num_ranks,
        num_kv_heads=1,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=dtype,
        block_size=num_ranks * size,
        lse=True,
    )
    padding = 3 if lens is not DECODES else 1
    common = batch(*lens, spec.block_size, padding, num_ranks)
    generator = torch.Generator().manual_seed(7)
    num_tokens = common.num_tokens + padding
    query, key, value, whole = (
        torch.randn(*shape, head_size, generator=generator).to(getattr(torch, dtype))
        for shape in ((num_tokens, 2 * num_ranks), *[(num_tokens, 1)] * 2, (2, NUM_BLOCKS, spec.block_size, 1))
    )
    layer = AttentionLayer(index=0, scale=0.25)

    def attend(backend: Any, cache: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        builder = backend.make_builder()
        metadata = builder.build(common, key=None)
        call = AttentionCall(layer, cache, metadata)
        backend.schedule(metadata)
        if writes == "write_kv" or backend is reference:
            backend.write_kv(key, value, call)
        else:
            step_cache, slots = backend.kv_places(call, common.slot_mapping)
            kept = slots >= 0
            step_cache[0].flatten(0, 1)[slots[kept]], step_cache[1].flatten(0, 1)[slots[kept]] = key[kept], value[kept]
        out, lse = torch.full_like(own, torch.nan), torch.full((own.shape[1], num_tokens), -torch.inf)
        backend.forward(own, call, out, lse)
        return out, lse

    reference = ReferenceBackend(spec, CPU, LIMITS)
    wanted, wanted_lse = attend(reference, whole_cache := whole.clone(), query)
    assert not torch.equal(whole_cache, whole)

    def on_rank(ranks: ThreadRanks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = replace(spec, num_query_heads=2, block_size=size, non_causal=True)
        backend = ContextParallelBackend(own, CPU, LIMITS, make=make, ranks=ranks, num_ranks=num_ranks)
        cache = whole[:, :, ranks.rank :: num_ranks].clone()
        heads = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        # Queries are views of a wider projection.
        return *attend(backend, cache, query[:, heads]), cache

    found = on_ranks(num_ranks, on_rank)
    near = 1e-5 if dtype == "float32" else 2e-3
    torch.testing.assert_close(torch.cat([out for out, _, _ in found], 1), wanted, rtol=near, atol=near)
    torch.testing.assert_close(torch.cat([lse for _, lse, _ in found]), wanted_lse, rtol=near, atol=near)
    caches = torch.stack([cache for _, _, cache in found], 3).flatten(2, 3)
    assert torch.equal(caches, whole_cache)
