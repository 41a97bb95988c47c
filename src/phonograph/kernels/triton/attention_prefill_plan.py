"""Cuts the prefills of a batch into pieces of work of about equal length, on the device.

A captured graph has a fixed number of programs but meets any batch: one long prompt, many short ones, a few queries in
front of a long context. So one small kernel, once a step, reads the batch's lengths and writes the list of pieces that
the persistent programs of `attention_prefill` take one after another, longest first.

A *tile* is BLOCK_M rows of one sequence and KV head; rows count (token, query head of that KV head), heads innermost,
so that short prompts fill tiles too and the KV heads of a model share one list. The keys of a tile are cut into
equal *pieces* where that ends earlier: for 64 candidate cuts (the longest tile in 1, 2, 3, ... parts) the kernel
estimates when the last program ends, and takes the best. Pieces of a cut tile leave partial results, to be merged.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_M = 128
# Pieces begin at multiples of this many keys, whatever the tiles of the kernel.
KEY_STEP = tl.constexpr(128)
ENTRY_WORDS = tl.constexpr(8)
_NUM_ENTRIES, _NUM_MERGES = tl.constexpr(0), tl.constexpr(1)
COUNTER, FINISHED = tl.constexpr(2), tl.constexpr(3)

_CHUNK = 64
# Costs in keys of one tile: of starting and ending a piece, and of writing, reading and merging a partial result.
_PIECE_COST = tl.constexpr(64.0)
_PARTIAL_COST = tl.constexpr(256.0)
_SHORTEST_PIECE = tl.constexpr(256)
_BUCKETS = tl.constexpr(64)
_CANDIDATES = tl.constexpr(64)
_PARTIALS_A_PROGRAM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The work of one step, and scratch for its layers: int32 and float32 tensors that live as long as any graph.

    header [4]:       number of entries, number of merges; two counters of the attention kernel, zero between launches
    entries [N, 8]:   sequence, tile, first key, key behind the last, partial slot or -1; one for each KV head
    merges [N, 8]:    sequence, tile, first partial slot, number of partials
    first_tile [R]:   where each sequence's tiles begin
    partial_out [slots * K, BLOCK_M, D], partial_lse [slots * K, BLOCK_M]: D rounded up to a power of two, base 2
    programs:         of the attention kernel
    """

    header: torch.Tensor
    entries: torch.Tensor
    merges: torch.Tensor
    first_tile: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_kv_heads: int
    group: int
    programs: int
    max_slots: int


def make_prefill_plan(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_num_seqs: int,
    max_num_tokens: int,
    num_sms: int,
    device: torch.device,
) -> PrefillPlan:
    """Makes the persistent tensors for batches of up to `max_num_seqs` sequences and `max_num_tokens` query tokens."""
    group = num_query_heads // num_kv_heads
    programs = num_sms * (2 if head_size <= 128 else 1)
    max_slots = max(8, -(-_PARTIALS_A_PROGRAM * programs // num_kv_heads))
    max_tiles = max_num_tokens * group // BLOCK_M + max_num_seqs

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slots = max_slots * num_kv_heads
    width = triton.next_power_of_2(head_size)
    return PrefillPlan(
        header=ints(4),
        entries=ints(max_tiles + max_slots, ENTRY_WORDS.value),
        merges=ints(max_slots, ENTRY_WORDS.value),
        first_tile=ints(triton.next_power_of_2(max(2, max_num_seqs))),
        partial_out=torch.zeros(slots, BLOCK_M, width, dtype=torch.float32, device=device),
        partial_lse=torch.zeros(slots, BLOCK_M, dtype=torch.float32, device=device),
        num_kv_heads=num_kv_heads,
        group=group,
        programs=programs,
        max_slots=max_slots,
    )


def plan_prefill(
    plan: PrefillPlan,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    min_query_len: int,
    causal: bool,
    window: tuple[int, int],
) -> None:
    """Writes the work list of the sequences with at least `min_query_len` queries; one launch.

    Args:
        query_start_loc: [R+1] int32, cumulative query lengths
        seq_lens: [R] int32, keys of each sequence, the queries' own included
        window: (left, right) keys beside the query; -1 for no bound
    """
    num_seqs = seq_lens.shape[0]
    _plan_kernel[(1,)](
        query_start_loc,
        seq_lens,
        plan.first_tile,
        plan.header,
        plan.entries,
        plan.merges,
        num_seqs,
        min_query_len,
        plan.programs,
        plan.max_slots,
        KV_HEADS=plan.num_kv_heads,
        GROUP=plan.group,
        BLOCK_M=BLOCK_M,
        LEFT=window[0],
        RIGHT=0 if causal else window[1],
        LOG_SEQS=plan.first_tile.shape[0].bit_length() - 1,
        CHUNK=_CHUNK,
        num_warps=8,
    )


@triton.jit
def tile_keys(
    tile, query_len, seq_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Keys that some row of a tile sees, and its first and last token's position: low, high (behind), first, last."""
    context = seq_len - query_len
    first = context + tile * BLOCK_M // GROUP
    last = context + (tl.minimum(tile * BLOCK_M + BLOCK_M, query_len * GROUP) - 1) // GROUP
    high = seq_len
    if RIGHT >= 0:
        high = tl.maximum(tl.minimum(seq_len, last + RIGHT + 1), 0)
    low = high * 0
    if LEFT >= 0:
        low = tl.minimum(tl.maximum(first - LEFT, 0), high)
    return low, high, first, last


@triton.jit
def _chunk_of_tiles(
    chunk,
    num_tiles,
    query_start_loc,
    seq_lens,
    first_tile,
    num_seqs,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LOG_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """CHUNK tiles: whether each exists, its sequence, tile in it, first key (aligned), number of keys from there."""
    index = chunk + tl.arange(0, CHUNK)
    exists = index < num_tiles
    # The last sequence whose first tile is not behind this one: one without tiles has the number of its successor.
    seq = tl.zeros([CHUNK], tl.int32)
    for bit in tl.static_range(LOG_SEQS):
        candidate = seq + (1 << (LOG_SEQS - 1 - bit))
        first = tl.load(first_tile + candidate, mask=candidate < num_seqs, other=2147483647)
        seq = tl.where(first <= index, candidate, seq)
    tile = index - tl.load(first_tile + seq)
    begin = tl.load(query_start_loc + seq, mask=exists, other=0)
    query_len = tl.load(query_start_loc + seq + 1, mask=exists, other=1) - begin
    seq_len = tl.load(seq_lens + seq, mask=exists, other=0)
    low, high, first_position, last_position = tile_keys(tile, query_len, seq_len, GROUP, BLOCK_M, LEFT, RIGHT)
    start = low // KEY_STEP * KEY_STEP
    keys = tl.where(exists, tl.maximum(high - start, 0), 0)
    return exists, seq, tile, start, keys


@triton.jit(do_not_specialize=["num_seqs", "min_query_len"])
def _plan_kernel(
    query_start_loc,
    seq_lens,
    first_tile,
    header,
    entries,
    merges,
    num_seqs,
    min_query_len,
    programs,
    max_slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LOG_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # Tiles of each sequence, where they begin, and a bound of their keys.
    seq = tl.arange(0, 1 << LOG_SEQS)
    valid = seq < num_seqs
    begin = tl.load(query_start_loc + seq, mask=valid, other=0)
    query_len = tl.load(query_start_loc + seq + 1, mask=valid, other=0) - begin
    seq_len = tl.load(seq_lens + seq, mask=valid, other=0)
    tiles = tl.where(valid & (query_len >= min_query_len), tl.cdiv(query_len * GROUP, BLOCK_M), 0)
    num_tiles = tl.sum(tiles)
    tl.store(first_tile + seq, tl.cumsum(tiles) - tiles)
    longest = tl.max(tl.where(tiles > 0, seq_len, 0))
    if LEFT >= 0 and RIGHT >= 0:
        longest = tl.minimum(longest, LEFT + RIGHT + BLOCK_M // GROUP + 2 + KEY_STEP)
    tl.store(header + COUNTER, 0)
    tl.store(header + FINISHED, 0)
    tl.debug_barrier()

    # What each candidate length of a piece would cost.
    candidate = tl.arange(0, _CANDIDATES)
    parts = tl.where(candidate < 32, candidate + 1, (candidate - 27) * 8)
    length = tl.maximum(tl.cdiv(longest, parts), _SHORTEST_PIECE)
    total = tl.zeros([_CANDIDATES], tl.float32)
    cut = tl.zeros([_CANDIDATES], tl.int32)
    num_large = tl.zeros([_CANDIDATES], tl.int32)
    sum_large = tl.zeros([_CANDIDATES], tl.float32)
    for chunk in range(0, num_tiles, CHUNK):
        exists, seqs, tile, start, keys = _chunk_of_tiles(
            chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs,
            GROUP, BLOCK_M, LEFT, RIGHT, LOG_SEQS, CHUNK,
        )  # fmt: skip
        pieces = tl.maximum(tl.cdiv(keys[:, None], length[None, :]), exists[:, None].to(tl.int32))
        work = keys[:, None] + _PIECE_COST * pieces
        large = 2 * work > (length[None, :] + _PIECE_COST) * pieces
        total += tl.sum(work, 0)
        cut += tl.sum(tl.where(pieces > 1, pieces, 0), 0)
        num_large += tl.sum(tl.where(large, pieces, 0), 0)
        sum_large += tl.sum(tl.where(large, work, 0.0), 0)
    # Pieces of more than half the largest one's length cannot follow one another in less time than a round takes.
    rounds = tl.cdiv(num_large * KV_HEADS, programs)
    mean_large = sum_large / tl.maximum(num_large, 1)
    end = tl.maximum(total * KV_HEADS / programs, rounds * mean_large)
    end = tl.maximum(end, length + _PIECE_COST)
    end += _PARTIAL_COST * (cut * KV_HEADS) / programs
    end = tl.where((cut > max_slots) & (candidate > 0), float("inf"), end)
    best = tl.argmin(end, 0)
    length = tl.sum(tl.where(candidate == best, length, 0))

    # Longest first, by a counting sort: pieces of each class of length, and from there where each class begins.
    bucket = tl.arange(0, _BUCKETS)
    counts = tl.zeros([_BUCKETS], tl.int32)
    for chunk in range(0, num_tiles, CHUNK):
        exists, seqs, tile, start, keys = _chunk_of_tiles(
            chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs,
            GROUP, BLOCK_M, LEFT, RIGHT, LOG_SEQS, CHUNK,
        )  # fmt: skip
        pieces = tl.maximum(tl.cdiv(keys, length), exists.to(tl.int32))
        own_bucket = _bucket(keys, pieces, length)
        hit = bucket[None, :] == own_bucket[:, None]
        counts += tl.sum(tl.where(hit, pieces[:, None], 0), 0)
    tl.store(header + _NUM_ENTRIES, tl.sum(counts))
    position = tl.cumsum(counts) - counts
    num_merges = 0
    num_slots = 0
    for chunk in range(0, num_tiles, CHUNK):
        exists, seqs, tile, start, keys = _chunk_of_tiles(
            chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs,
            GROUP, BLOCK_M, LEFT, RIGHT, LOG_SEQS, CHUNK,
        )  # fmt: skip
        pieces = tl.maximum(tl.cdiv(keys, length), exists.to(tl.int32))
        own_bucket = _bucket(keys, pieces, length)
        hit = bucket[None, :] == own_bucket[:, None]
        taken = tl.where(hit, pieces[:, None], 0)
        before = tl.cumsum(taken, 0) - taken + position[None, :]
        entry = entries + tl.sum(tl.where(hit, before, 0), 1) * ENTRY_WORDS
        position += tl.sum(taken, 0)
        is_cut = pieces > 1
        partials = tl.where(is_cut, pieces, 0)
        slot = num_slots + tl.cumsum(partials) - partials
        merge = merges + (num_merges + tl.cumsum(is_cut.to(tl.int32)) - 1) * ENTRY_WORDS
        tl.store(merge, seqs, mask=is_cut)
        tl.store(merge + 1, tile, mask=is_cut)
        tl.store(merge + 2, slot, mask=is_cut)
        tl.store(merge + 3, pieces, mask=is_cut)
        num_slots += tl.sum(partials)
        num_merges += tl.sum(is_cut.to(tl.int32))
        for piece in range(tl.max(pieces)):
            mask = piece < pieces
            cuts = tl.maximum(pieces, 1)
            lower = tl.cdiv(keys * piece // cuts, KEY_STEP) * KEY_STEP
            upper = tl.minimum(tl.cdiv(keys * (piece + 1) // cuts, KEY_STEP) * KEY_STEP, keys)
            tl.store(entry, seqs, mask=mask)
            tl.store(entry + 1, tile, mask=mask)
            tl.store(entry + 2, start + tl.minimum(lower, keys), mask=mask)
            tl.store(entry + 3, start + upper, mask=mask)
            tl.store(entry + 4, tl.where(is_cut, slot + piece, -1), mask=mask)
            entry += ENTRY_WORDS
    tl.store(header + _NUM_MERGES, num_merges)


@triton.jit
def _bucket(keys, pieces, length):
    """0 for the longest pieces to _BUCKETS - 1 for the shortest."""
    share = (keys.to(tl.float32) + 1.0) / (tl.maximum(pieces, 1) * (length + 1).to(tl.float32))
    return _BUCKETS - 1 - tl.minimum((share * _BUCKETS).to(tl.int32), _BUCKETS - 1)
