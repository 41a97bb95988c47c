"""Attention of many sequences with one query each, on the CPU, which reads the paged cache in place.

Copying the blocks of a sequence together costs more than the attention itself. Instead each (sequence, head) is a row
of a sparse matrix whose columns are the cache rows that it sees. Products of queries and keys are then a *sampled*
dense product (one dot product per stored element), and the weighted sum of values is an embedding bag. Both read the
cache row by row, in any layout.

Sequences of different lengths would waste work in a rectangular score matrix, so they go into buckets by length.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from phonograph.kernels.torch.attention.schedule import Bucket, CacheViews, HandleState, Schedule, view_cache
from phonograph.kernels.torch.attention.scoring import Scoring, add_sinks, gather_blocks, softcap_

# A bucket's padded work is up to 1.5 times the real work, plus the cost of another bucket's dispatch, in score
# elements.
_WASTE = 1.5
_BUCKET_COST = 4096
_MAX_BUCKET = 4 * 2**20

with warnings.catch_warnings():
    # torch warns once in a process: sparse tensors are in beta, and in 2.11 their checks are off.
    warnings.filterwarnings("ignore", message="Sparse ")
    torch.sparse_csr_tensor([0, 1], [0], [1.0], check_invariants=False)


def decode(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    state: HandleState,
    scoring: Scoring,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
) -> None:
    """Attend the first `num_decodes` queries of the schedule, one a sequence; write their rows of both outputs."""
    batch = state.schedule
    count = batch.num_decodes
    views = state.cache_views(kv_cache)
    # Queries that are slices of a joint projection are read in place, as rows with other rows between them.
    num_heads, head_size = query_THD.shape[1:]
    stride, heads_apart, _ = query_THD.stride()
    if len(query_THD) == 1:
        stride = num_heads * head_size  # A view of one token may have any stride.
    in_rows = heads_apart == head_size and stride % head_size == 0 and query_THD.dtype is torch.float32
    spacing = stride // head_size if in_rows and scoring.k_scale_K is None else num_heads
    key = scoring.left, spacing
    buckets = batch.buckets.get(key)
    if buckets is None:
        buckets = batch.buckets[key] = _make_buckets(batch, scoring.left, num_heads, spacing, kv_cache, views)
    if count < len(query_THD):
        query_THD, out_THD = query_THD[:count], out_THD[:count]
    for bucket in buckets:
        rows = bucket.rows
        cache = views if bucket.blocks is None else view_cache(gather_blocks(kv_cache, bucket.blocks))
        out, lse = _attend(
            query_THD if rows is None else query_THD.index_select(0, rows),
            cache,
            bucket,
            scoring,
            with_lse=lse_HT is not None,
        )
        if rows is None:
            out_THD.copy_(out)
        else:
            out_THD.index_copy_(0, rows, out.to(out_THD.dtype))
        if lse_HT is not None and lse is not None:
            lse_HT[:, slice(0, count) if rows is None else rows] = lse.t()


def _attend(
    query_RHD: torch.Tensor, cache: CacheViews, bucket: Bucket, scoring: Scoring, *, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output [R, H, D] and, if requested or needed, LSE [R, H] of one bucket."""
    _, num_heads, head_size = query_RHD.shape
    assert cache.keys_DN is not None and cache.values_ND is not None
    query_RHD = query_RHD.float()
    if scoring.k_scale_K is not None:
        query_RHD = query_RHD * scoring.k_scale_K.repeat_interleave(num_heads // len(scoring.k_scale_K)).view(-1, 1)
    pattern = bucket.pattern
    if bucket.spacing == num_heads:
        query_rows = query_RHD.reshape(-1, head_size)
    else:
        query_rows = query_RHD.as_strided((*pattern.shape[:1], head_size), (head_size, 1))
    torch.sparse.sampled_addmm(pattern, query_rows, cache.keys_DN, alpha=scoring.scale, beta=0.0, out=pattern)
    # The scores must stay finite, because the next layer multiplies them by its beta, 0.
    scores_RHL = bucket.scores
    if scoring.softcap > 0.0 or scoring.slopes_H is not None:
        scores_RHL = softcap_(scores_RHL.clone(), scoring.softcap)
        if scoring.slopes_H is not None:
            distance_R1L = torch.arange(1, scores_RHL.shape[2] + 1) - bucket.visible[:, None, None]
            scores_RHL += scoring.slopes_H.view(-1, 1) * distance_R1L
    if bucket.hidden is not None:
        scores_RHL = scores_RHL.masked_fill(bucket.hidden, -torch.inf)
    lse = torch.logsumexp(scores_RHL, -1) if with_lse or scoring.sinks_H is not None else None
    torch.softmax(scores_RHL, -1, out=bucket.weights)
    # Positional, because keywords take longer: scale_grad_by_freq, mode (sum), sparse, per_sample_weights.
    bags = torch.embedding_bag(cache.values_ND, bucket.columns, bucket.row_starts, False, 0, False, bucket.flat_weights)
    out_RHD = bags[0].view(query_RHD.shape)
    if scoring.v_scale_K is not None:
        out_RHD *= scoring.v_scale_K.repeat_interleave(num_heads // len(scoring.v_scale_K)).view(-1, 1)
    if lse is not None and scoring.sinks_H is not None:
        lse = add_sinks(out_RHD, lse, scoring.sinks_H)
    return out_RHD, lse


def _make_buckets(
    batch: Schedule, left: int, num_heads: int, spacing: int, kv_cache: torch.Tensor, views: CacheViews
) -> list[Bucket]:
    """Return buckets of the batch's decodes, for layers with this left window and spacing of queries."""
    lens = batch.decode_lens
    visible = lens if left < 0 else np.minimum(lens, left + 1)
    groups = _buckets(visible.tolist(), num_heads)
    if len(groups) == 1:
        return [_make_bucket(batch, None, visible, num_heads, spacing, kv_cache, views)]
    return [_make_bucket(batch, rows, visible[rows], num_heads, num_heads, kv_cache, views) for rows in groups]


def _make_bucket(
    batch: Schedule,
    rows: list[int] | None,
    visible: np.ndarray,
    num_heads: int,
    spacing: int,
    kv_cache: torch.Tensor,
    views: CacheViews,
) -> Bucket:
    lens, table = batch.decode_lens, batch.decode_blocks
    if rows is not None:
        lens, table = lens[rows], table[rows]
    size, longest = len(lens), int(visible.max())
    strides = kv_cache.stride() if kv_cache.dtype is torch.float32 and views.keys_DN is not None else None
    padding = None
    if int(visible.min()) < longest:
        padding = np.arange(longest, dtype=np.int32) >= visible[:, None]
    columns, used = _columns(lens, visible, padding, table, num_heads, tuple(kv_cache.shape), strides)
    column_indices = torch.from_numpy(columns)
    row_starts = torch.arange(0, size * num_heads * longest + 1, longest, dtype=torch.int32)
    row_ends = row_starts
    if spacing != num_heads:
        counts = np.zeros((size, spacing), np.int32)
        counts[:, :num_heads] = longest
        row_ends = torch.zeros(1 + size * spacing - (spacing - num_heads), dtype=torch.int32)
        row_ends[1:] = torch.from_numpy(counts.reshape(-1)[: len(row_ends) - 1].cumsum(dtype=np.int32))
    if used is not None:
        num_rows = len(used) * kv_cache.shape[2] * kv_cache.shape[3]
    else:
        assert views.values_ND is not None
        num_rows = len(views.values_ND)
    pattern = torch.sparse_csr_tensor(
        row_ends,
        column_indices,
        torch.zeros(len(columns)),
        size=(len(row_ends) - 1, num_rows),
        check_invariants=False,
    )
    weights = torch.empty(size, num_heads, longest)
    return Bucket(
        rows=None if rows is None else torch.tensor(rows),
        spacing=spacing,
        columns=column_indices,
        row_starts=row_starts[:-1],
        pattern=pattern,
        scores=pattern.values().view(size, num_heads, longest),
        weights=weights,
        flat_weights=weights.view(-1),
        hidden=None if padding is None else torch.from_numpy(padding).unsqueeze(1),
        visible=torch.from_numpy(visible),
        blocks=None if used is None else torch.from_numpy(used),
    )


def _columns(
    lens: np.ndarray,
    visible: np.ndarray,
    padding: np.ndarray | None,
    table: np.ndarray,
    num_heads: int,
    cache_shape: tuple[int, ...],
    cache_strides: tuple[int, ...] | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the cache row of each (sequence, head, key), flat, and the blocks to gather first, or None.

    A query sees the last `visible` [R] of its sequence's `lens` [R] keys; `table` is [R, blocks].
    """
    _, _, block_size, num_kv_heads, head_size = cache_shape
    used: np.ndarray | None = None
    if cache_strides is None:
        numbers = np.arange(table.shape[1])
        seen = (numbers >= ((lens - visible) // block_size)[:, None]) & (numbers <= ((lens - 1) // block_size)[:, None])
        used = np.unique(table[seen])
        # Entries without keys may be anything, and become any block that exists.
        table = np.searchsorted(used, table).clip(0, len(used) - 1).astype(np.int32)
        cache_strides = (0, block_size * num_kv_heads * head_size, num_kv_heads * head_size, head_size, 1)
    step_b, step_s, step_k = (stride // head_size for stride in cache_strides[1:4])
    offsets = np.arange(block_size, dtype=np.int32) * np.int32(step_s)
    with np.errstate(over="ignore"):  # entries without keys
        tokens = (table[:, :, None] * np.int32(step_b) + offsets).reshape(len(table), -1)
    longest = int(visible.max())
    first = lens - visible
    if first.any():
        positions = np.minimum(first[:, None] + np.arange(longest), lens[:, None] - 1)
        tokens = np.take_along_axis(tokens, positions, axis=1)
    else:
        tokens = tokens[:, :longest]
    if padding is not None:
        # Padding repeats the first visible key, which is safe to read, unlike the memory beyond.
        tokens = np.where(padding, tokens[:, :1], tokens)
    heads = np.arange(num_kv_heads, dtype=np.int32).repeat(num_heads // num_kv_heads) * np.int32(step_k)
    return (tokens[:, None] + heads[:, None]).reshape(-1), used


def _buckets(visible: list[int], num_heads: int) -> list[list[int]]:
    """Return indices of sequences, grouped by length, each group in batch order."""
    groups: list[list[int]] = []
    longest = real = 0
    for index in sorted(range(len(visible)), key=lambda index: -visible[index]):
        padded = (len(groups[-1]) + 1 if groups else 1) * longest * num_heads
        wanted = (real + visible[index]) * num_heads
        if not groups or padded > _WASTE * wanted + _BUCKET_COST or padded > _MAX_BUCKET:
            groups.append([])
            longest, real = visible[index], 0
        groups[-1].append(index)
        real += visible[index]
    return [sorted(group) for group in groups]
