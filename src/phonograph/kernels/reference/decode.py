"""Attention of many sequences with one query each, on the CPU: bound by memory, so the cache is read in place.

Copying the blocks of a sequence together costs more than the attention itself. Instead each (sequence, head) is a row
of a sparse matrix whose columns are the cache rows that it sees: products of queries and keys are then a *sampled*
dense product (one dot product per stored element), and the weighted sum of values is an embedding bag. Both read the
paged cache row by row, in any layout, without a copy.

Sequences of unlike lengths would waste work in a rectangular score matrix, so they are put into buckets of like ones.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from phonograph.kernels.reference.schedule import Bucket, CacheViews, Held, Schedule, view_cache
from phonograph.kernels.reference.scoring import Scoring, add_sinks, gather_blocks, softcap_

# Buckets: padded work up to 1.5 times the real one, plus what one more bucket costs in dispatch, in score elements.
_WASTE = 1.5
_BUCKET_COST = 4096
_MAX_BUCKET = 4 * 2**20

with warnings.catch_warnings():
    # Says once in a process that sparse tensors are young; said here, where nobody needs to hear it.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    torch.sparse_csr_tensor([0, 1], [0], [1.0], check_invariants=False)


def decode(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    here: Held,
    scoring: Scoring,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
) -> None:
    """Attends the first `num_decodes` queries of the schedule, one a sequence; writes their rows of both outputs."""
    batch = here.schedule
    count = batch.num_decodes
    views = here.cache_views(kv_cache)
    buckets = batch.buckets.get(scoring.left)
    if buckets is None:
        buckets = batch.buckets[scoring.left] = _make_buckets(batch, scoring.left, query_THD.shape[1], kv_cache, views)
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
    """Output [R, H, D] and LSE [R, H] (where asked for, or needed) of one bucket."""
    _, num_heads, head_size = query_RHD.shape
    assert cache.keys_DN is not None and cache.values_ND is not None
    query_RHD = query_RHD.float()
    if scoring.k_scale_K is not None:
        query_RHD = query_RHD * scoring.k_scale_K.repeat_interleave(num_heads // len(scoring.k_scale_K)).view(-1, 1)
    pattern = bucket.pattern
    query_rows = query_RHD.reshape(-1, head_size)
    torch.sparse.sampled_addmm(pattern, query_rows, cache.keys_DN, alpha=scoring.scale, beta=0.0, out=pattern)
    # The scores stay as they are, finite, for the next layer: beta is 0, but it is multiplied by what is there.
    scores_RHL = bucket.scores
    if scoring.softcap > 0.0 or scoring.slopes_H is not None:
        scores_RHL = softcap_(scores_RHL.clone(), scoring.softcap)
        if scoring.slopes_H is not None:
            scores_RHL += scoring.slopes_H.view(-1, 1) * bucket.distance
    if bucket.hidden is not None:
        scores_RHL = scores_RHL.masked_fill(bucket.hidden, -torch.inf)
    lse = torch.logsumexp(scores_RHL, -1) if with_lse or scoring.sinks_H is not None else None
    torch.softmax(scores_RHL, -1, out=bucket.weights)
    # Arguments in order, since keywords take longer: scale_grad_by_freq, mode (sum), sparse, per_sample_weights.
    bags = torch.embedding_bag(cache.values_ND, bucket.columns, bucket.row_starts, False, 0, False, bucket.flat_weights)
    out_RHD = bags[0].view(query_RHD.shape)
    if scoring.v_scale_K is not None:
        out_RHD *= scoring.v_scale_K.repeat_interleave(num_heads // len(scoring.v_scale_K)).view(-1, 1)
    if lse is not None and scoring.sinks_H is not None:
        lse = add_sinks(out_RHD, lse, scoring.sinks_H)
    return out_RHD, lse


def _make_buckets(
    batch: Schedule, left: int, num_heads: int, kv_cache: torch.Tensor, views: CacheViews
) -> list[Bucket]:
    """Buckets of the batch's decodes, for layers with this left window."""
    strides = kv_cache.stride() if kv_cache.dtype is torch.float32 and views.keys_DN is not None else None
    lens, table = batch.decode_lens, batch.decode_blocks
    visible = lens if left < 0 else np.minimum(lens, left + 1)
    groups = _buckets(visible.tolist(), num_heads)
    buckets: list[Bucket] = []
    for rows in map(np.array, groups):
        longest = int(visible[rows].max())
        offsets = np.arange(longest, dtype=np.int32)
        # Padding repeats the first visible key, a real one: reading it is harmless, unlike whatever lies beyond.
        padding = offsets >= visible[rows, None]
        positions = np.where(padding, 0, offsets) + (lens - visible)[rows, None]
        columns, used = _columns(table[rows], positions, num_heads, tuple(kv_cache.shape), strides)
        if used is None and views.values_ND is not None:
            num_rows = len(views.values_ND)
        else:
            num_rows = (0 if used is None else len(used)) * kv_cache.shape[2] * kv_cache.shape[3]
        num_queries = len(rows) * num_heads
        row_ends = torch.arange(num_queries + 1, dtype=torch.int32) * longest
        column_indices = torch.from_numpy(columns)
        weights = torch.empty(len(rows), num_heads, longest)
        pattern = torch.sparse_csr_tensor(
            row_ends,
            column_indices,
            torch.zeros(len(columns)),
            size=(num_queries, num_rows),
            check_invariants=False,
        )
        distance = (offsets - visible[rows, None] + 1).astype(np.float32)
        buckets.append(
            Bucket(
                size=len(rows),
                rows=torch.from_numpy(rows) if len(groups) > 1 else None,
                columns=column_indices,
                row_starts=row_ends[:-1],
                pattern=pattern,
                scores=pattern.values().view(len(rows), num_heads, longest),
                weights=weights,
                flat_weights=weights.view(-1),
                hidden=torch.from_numpy(padding).unsqueeze(1) if padding.any() else None,
                distance=torch.from_numpy(distance).unsqueeze(1),
                blocks=None if used is None else torch.from_numpy(used),
            )
        )
    return buckets


def _columns(
    table: np.ndarray,
    positions: np.ndarray,
    num_heads: int,
    cache_shape: tuple[int, ...],
    cache_strides: tuple[int, ...] | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Cache row of each (sequence, head, key), flat, and the blocks to gather if they are to be gathered first.

    table [R, blocks], positions [R, L]: positions of the keys in their sequence
    """
    _, _, block_size, num_kv_heads, head_size = cache_shape
    blocks = np.take_along_axis(table, positions // block_size, axis=1)
    used: np.ndarray | None = None
    if cache_strides is None:
        used, compact = np.unique(blocks, return_inverse=True)
        blocks = compact.astype(np.int32).reshape(blocks.shape)
        cache_strides = (0, block_size * num_kv_heads * head_size, num_kv_heads * head_size, head_size, 1)
    step_b, step_s, step_k = (stride // head_size for stride in cache_strides[1:4])
    heads = np.arange(num_kv_heads, dtype=np.int32).repeat(num_heads // num_kv_heads) * step_k
    columns = (blocks * step_b + positions % block_size * step_s)[:, None] + heads[:, None]
    return columns.reshape(-1), used


def _buckets(visible: list[int], num_heads: int) -> list[list[int]]:
    """Indices of sequences of like lengths together, each list in batch order."""
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
