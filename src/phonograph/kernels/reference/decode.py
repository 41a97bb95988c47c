"""Attention of many sequences with one query each, on the CPU: bound by memory, so the cache is read in place.

Copying the blocks of a sequence together costs more than the attention itself. Instead each (sequence, head) is a row
of a sparse matrix whose columns are the cache rows that it sees: products of queries and keys are then a *sampled*
dense product (one dot product per stored element), and the weighted sum of values is an embedding bag. Both read the
paged cache row by row, in any layout, without a copy.

Sequences of unlike lengths would waste work in a rectangular score matrix, so they are put into buckets of like ones.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from phonograph.kernels.reference.scoring import Scoring, add_sinks, gather_blocks, softcap_

# Buckets: padded work up to 1.5 times the real one, plus what one more bucket costs in dispatch, in score elements.
_WASTE = 1.5
_BUCKET_COST = 4096
_MAX_BUCKET = 4 * 2**20
# Plans above this many score elements are not kept: they take 4 bytes each and are cheap beside the attention itself.
_MAX_CACHED_PLAN = 2**20

with warnings.catch_warnings():
    # Says once in a process that sparse tensors are young; said here, where nobody needs to hear it.
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    torch.sparse_csr_tensor([0, 1], [0], [1.0], check_invariants=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Sequences served together; L is the longest of their numbers of visible keys.

    size:     how many; rows: which, None for all of the batch
    columns [size * H * L], row_ends [size * H + 1]: the sparse matrix, int32
    hidden [size, 1, L], distance [size, 1, L]: padding, if any; key position - query position
    blocks:   what to gather first, where the cache cannot be read in place
    """

    size: int
    rows: torch.Tensor | None
    columns: torch.Tensor
    row_ends: torch.Tensor
    hidden: torch.Tensor | None
    distance: torch.Tensor
    blocks: torch.Tensor | None


def decode(
    query_RHD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: bytes,
    max_len: int,
    scoring: Scoring,
    out_RHD: torch.Tensor,
    lse_HR: torch.Tensor | None,
) -> None:
    """Attends query r to the first seq_lens[r] >= 1 keys of block_table[r]; writes `out_RHD` (and `lse_HR`).

    seq_lens: contents of the int32 tensor; max_len: the largest of them
    """
    num_reqs, num_heads, head_size = query_RHD.shape
    shape, strides = kv_cache.shape, kv_cache.stride()
    table = block_table[:, : -(-max_len // shape[2])].numpy().tobytes()
    in_place = (
        kv_cache.dtype is torch.float32
        and strides[4] == 1
        and strides[1] % head_size == strides[2] % head_size == strides[3] % head_size == 0
    )
    make = _plan if num_reqs * num_heads * max_len <= _MAX_CACHED_PLAN else _plan.__wrapped__
    for bucket in make(seq_lens, table, scoring.left, num_heads, tuple(shape), strides if in_place else None):
        rows = bucket.rows
        out, lse = _attend(
            query_RHD if rows is None else query_RHD.index_select(0, rows),
            kv_cache if bucket.blocks is None else gather_blocks(kv_cache, bucket.blocks),
            bucket,
            scoring,
            with_lse=lse_HR is not None,
        )
        if rows is None:
            out_RHD.copy_(out)
        else:
            out_RHD.index_copy_(0, rows, out.to(out_RHD.dtype))
        if lse_HR is not None and lse is not None:
            lse_HR[:, slice(None) if rows is None else rows] = lse.t()


def _attend(
    query_RHD: torch.Tensor, kv_cache: torch.Tensor, bucket: _Bucket, scoring: Scoring, *, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [R, H, D] and LSE [R, H] (where asked for, or needed) of one bucket."""
    _, num_heads, head_size = query_RHD.shape
    group = num_heads // kv_cache.shape[3]
    query_RHD = query_RHD.float()
    if scoring.k_scale_K is not None:
        query_RHD = query_RHD * scoring.k_scale_K.repeat_interleave(group).view(-1, 1)
    # All rows of the cache, whatever its layout: up to the last element of keys, and of values.
    strides, offset = kv_cache.stride(), kv_cache.storage_offset()
    num_rows = 1 + sum((kv_cache.shape[i] - 1) * strides[i] for i in (1, 2, 3)) // head_size
    keys = kv_cache.as_strided((head_size, num_rows), (1, head_size), offset)
    values = kv_cache.as_strided((num_rows, head_size), (head_size, 1), offset + strides[0])
    # Zeros, although beta is 0: it is multiplied by, and fresh memory may hold NaN.
    pattern = torch.sparse_csr_tensor(
        bucket.row_ends,
        bucket.columns,
        torch.zeros(bucket.columns.shape[0]),
        size=(bucket.size * num_heads, num_rows),
        check_invariants=False,
    )
    query_rows = query_RHD.reshape(-1, head_size)
    torch.sparse.sampled_addmm(pattern, query_rows, keys, alpha=scoring.scale, beta=0.0, out=pattern)
    scores_RHL = softcap_(pattern.values().view(bucket.size, num_heads, -1), scoring.softcap)
    if scoring.slopes_H is not None:
        scores_RHL += scoring.slopes_H.view(-1, 1) * bucket.distance
    if bucket.hidden is not None:
        scores_RHL.masked_fill_(bucket.hidden, -torch.inf)
    lse = torch.logsumexp(scores_RHL, -1) if with_lse or scoring.sinks_H is not None else None
    weights = scores_RHL.softmax(-1).view(-1)
    bags = torch.embedding_bag(values, bucket.columns, bucket.row_ends[:-1], False, 0, False, weights)
    out_RHD = bags[0].view(query_RHD.shape)
    if scoring.v_scale_K is not None:
        out_RHD *= scoring.v_scale_K.repeat_interleave(group).view(-1, 1)
    if lse is not None and scoring.sinks_H is not None:
        lse = add_sinks(out_RHD, lse, scoring.sinks_H)
    return out_RHD, lse


@lru_cache(maxsize=8)
def _plan(
    seq_lens: bytes,
    block_table: bytes,
    left: int,
    num_heads: int,
    cache_shape: tuple[int, ...],
    cache_strides: tuple[int, ...] | None,
) -> list[_Bucket]:
    """Buckets and their index tensors, from the contents of the batch's tensors: the layers of a step share it.

    cache_strides: where the cache can be read in place; None where its blocks are to be gathered
    """
    lens = np.frombuffer(seq_lens, np.int32)
    table = np.frombuffer(block_table, np.int32).reshape(len(lens), -1)
    visible = lens if left < 0 else np.minimum(lens, left + 1)
    groups = _buckets(visible.tolist(), num_heads)
    buckets: list[_Bucket] = []
    for rows in map(np.array, groups):
        offsets = np.arange(visible[rows].max(), dtype=np.int32)
        # Padding repeats the first visible key, a real one: reading it is harmless, unlike whatever lies beyond.
        padding = offsets >= visible[rows, None]
        positions = np.where(padding, 0, offsets) + (lens - visible)[rows, None]
        row_ends = np.arange(len(rows) * num_heads + 1, dtype=np.int32) * np.int32(len(offsets))
        columns, used = _columns(table[rows], positions, num_heads, cache_shape, cache_strides)
        distance = (offsets - visible[rows, None] + 1).astype(np.float32)
        buckets.append(
            _Bucket(
                size=len(rows),
                rows=torch.from_numpy(rows) if len(groups) > 1 else None,
                columns=torch.from_numpy(columns),
                row_ends=torch.from_numpy(row_ends),
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
