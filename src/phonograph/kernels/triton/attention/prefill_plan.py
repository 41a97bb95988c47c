"""Division of a batch's prefills into pieces of work of about equal length, on the device.

Shapes: R sequences, a power of two; N entries of the list.

A captured graph has a fixed number of programs but meets any batch: one long prompt, many short ones, a few queries
with a long context. So one small kernel, once a step, writes the list for the persistent programs of
`prefill_attention`. Algorithm: list scheduling, longest first (Graham, 1969).
1. A *tile* is M rows (128, or 64 of heads wider than 256) of one sequence and KV head. Rows are (token, query head of
   that KV head), heads innermost, so that short prompts fill tiles too, and the KV heads of a model share one list.
2. The keys of a tile are cut into equal *pieces* where that ends earlier: for 16 candidate lengths the kernel estimates
   the end of the last program, and takes the best.
3. The list has the pieces in order of length, longest first. Pieces of a cut tile leave partial results, which a second
   launch merges.
4. All programs of the plan compute the same division, and each lists tiles of its own, so none waits for another.

    tiles    | tile 0: 4096 keys        | tile 1: 2048 | tile 2: 512 |
    pieces   | 0a: 2048   | 0b: 2048    | 1a: 2048     | 2a: 512     |
    entries  0a 0b 1a 2a, each for every KV head; attention programs draw them in this order
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from phonograph.kernels.attention_scratch import SHORTEST_PIECE, prefill_partials, prefill_programs, prefill_rows
from phonograph.kernels.triton.attention.plan_words import load_words, store_words
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

# Pieces begin at multiples of this many keys, for any tile size of the kernel.
KEY_STEP = tl.constexpr(128)
ENTRY_WORDS = tl.constexpr(8)
_NUM_ENTRIES, _NUM_MERGES = tl.constexpr(0), tl.constexpr(1)
COUNTER, MULTIPROCESSORS = tl.constexpr(2), tl.constexpr(3)

# Tiles that are read together, and tiles that a program of the plan lists.
_CHUNK = 256
_LISTED = 32
# Costs, in keys of one tile: starting and ending a piece; writing, reading and merging a partial result; and the launch
# that merges.
_PIECE_COST = tl.constexpr(64.0)
_PARTIAL_COST = tl.constexpr(256.0)
_MERGE_COST = tl.constexpr(128.0)
_SHORTEST_PIECE = tl.constexpr(SHORTEST_PIECE)
_CANDIDATES = tl.constexpr(16)
# A tile of exactly one piece's length is one piece for any rounding of the quotient.
_ALMOST_ONE = tl.constexpr(1 - 2.0**-20)
# Pieces of a tile that are written together.
_PIECES = tl.constexpr(8)
# Triton 3.6 does not compile the plan for eight sequences that see all keys.
_FEWEST_SEQS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Work of one step, and scratch for its layers: int32 and float32 tensors that live as long as any graph.

    header [4]:       number of entries, number of merges; a counter of the attention kernel, zero between launches;
                      multiprocessors whose programs take work: all, unless `plan_decode` writes fewer
    entries [N, 8]:   sequence, tile, first key, end of keys, partial slot or -1; the sequence's first query, queries
                      and keys; each is work for every KV head
    merges [N, 8]:    sequence, tile, first partial slot, number of partials
    first_tile [R]:   first tile of each sequence; R a power of two
    partial_out [slots * K, M, D], partial_lse [slots * K, M]: D rounded up to a power of two, base 2
    programs:         upper bound of the attention kernel's, which the cuts suit
    cuts:             keys are cut; otherwise a row's result does not depend on the batch
    """

    header: torch.Tensor
    entries: torch.Tensor
    merges: torch.Tensor
    first_tile: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_kv_heads: int
    group: int
    num_sms: int
    programs: int
    max_tiles: int
    max_slots: int
    cuts: bool

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.partial_out.shape[1]


def cache_matrix(kv_cache: torch.Tensor) -> tuple[int, int, bool]:
    """Return a cache's rows and columns for the copy engine, and True if a row is a head of a slot, not a slot."""
    num_kv_heads, head_size = kv_cache.shape[3:]
    heads_outside = num_kv_heads > 1 and kv_cache.stride(2) == head_size
    columns = head_size if heads_outside else num_kv_heads * head_size
    return 2 * kv_cache.stride(0) // columns, columns, heads_outside


def make_prefill_plan(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_num_seqs: int,
    max_num_tokens: int,
    num_sms: int,
    device: torch.device,
    cuts: bool = True,
) -> PrefillPlan:
    """Make the persistent tensors for batches of up to `max_num_seqs` sequences and `max_num_tokens` query tokens."""
    group = num_query_heads // num_kv_heads
    max_tiles = max_num_tokens * group // prefill_rows(head_size) + max_num_seqs
    partials = prefill_partials(num_kv_heads, head_size, num_sms, cuts=cuts)
    max_slots = partials[0] // num_kv_heads
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    plan = PrefillPlan(
        header=ints(4),
        entries=ints(max_tiles + max_slots, ENTRY_WORDS.value),
        merges=ints(max_slots, ENTRY_WORDS.value),
        first_tile=ints(triton.next_power_of_2(max(_FEWEST_SEQS, max_num_seqs))),
        partial_out=torch.zeros(partials, dtype=torch.float32, device=device),
        partial_lse=torch.zeros(partials[:2], dtype=torch.float32, device=device),
        num_kv_heads=num_kv_heads,
        group=group,
        num_sms=num_sms,
        programs=prefill_programs(head_size, num_sms),
        max_tiles=max_tiles,
        max_slots=max_slots,
        cuts=cuts,
    )
    multiprocessors_of(plan).fill_(num_sms)
    return plan


def multiprocessors_of(plan: PrefillPlan) -> torch.Tensor:
    """Return the plan's number of multiprocessors, [1] int32, which `plan_decode` writes."""
    return plan.header[MULTIPROCESSORS.value :]


def plan_prefill(
    plan: PrefillPlan,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    min_query_len: int,
    causal: bool,
    window: tuple[int, int],
) -> None:
    """Write the work list of the sequences with at least `min_query_len` queries; one launch.

    Args:
        plan: receives the list
        query_start_loc: [R+1] int32, cumulative query lengths
        seq_lens: [R] int32, keys of each sequence, the queries' own included
        min_query_len: shortest query served
        causal: a query sees no key after its own
        window: (left, right) keys before and after the query; -1 for no bound
    """
    num_seqs = seq_lens.shape[0]
    _plan_kernel[(-(-plan.max_tiles // _LISTED),)](
        query_start_loc,
        seq_lens,
        plan.first_tile,
        plan.header,
        plan.entries,
        plan.merges,
        num_seqs,
        min_query_len,
        plan.programs // plan.num_sms,
        plan.max_slots,
        KV_HEADS=plan.num_kv_heads,
        GROUP=plan.group,
        BLOCK_M=plan.rows,
        LEFT=window[0],
        RIGHT=0 if causal else window[1],
        LOG_SEQS=plan.first_tile.shape[0].bit_length() - 1,
        CHUNK=_CHUNK,
        LISTED=_LISTED,
        CUTS=plan.cuts,
        **pdl_options(),
        num_warps=8,
    )


@triton.jit
def read_entry(entry):
    """Return sequence, tile, first key, end of keys, partial slot, and the sequence's first query, queries and keys."""
    return load_words(entry, ENTRY_WORDS)


@triton.jit
def tile_keys(
    tile, query_len, seq_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Return the keys [low, high) that some row of a tile sees, and the positions of its first and last token."""
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


# Constants of the plan's kernel.
_Shape = namedtuple("_Shape", "GROUP BLOCK_M LEFT RIGHT LOG_SEQS")


@triton.jit
def _chunk_of_tiles(chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs, shape, CHUNK: tl.constexpr):
    """Return, for CHUNK tiles: existence, sequence, tile in it, first key (aligned), number of keys from there."""
    index = chunk + tl.arange(0, CHUNK)
    exists = index < num_tiles
    # The last sequence whose first tile is this one or an earlier one. A sequence without tiles has the first tile of
    # its successor.
    seq = tl.zeros([CHUNK], tl.int32)
    for bit in tl.static_range(shape.LOG_SEQS):
        candidate = seq + (1 << (shape.LOG_SEQS - 1 - bit))
        first = tl.load(first_tile + candidate, mask=candidate < num_seqs, other=2147483647)
        seq = tl.where(first <= index, candidate, seq)
    tile = index - tl.load(first_tile + seq)
    begin = tl.load(query_start_loc + seq, mask=exists, other=0)
    query_len = tl.load(query_start_loc + seq + 1, mask=exists, other=1) - begin
    seq_len = tl.load(seq_lens + seq, mask=exists, other=0)
    low, high, _, _ = tile_keys(tile, query_len, seq_len, shape.GROUP, shape.BLOCK_M, shape.LEFT, shape.RIGHT)
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
    programs_each,
    max_slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LOG_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    CUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    SHAPE: tl.constexpr = _Shape(GROUP, BLOCK_M, LEFT, RIGHT, LOG_SEQS)
    pdl_begin(PDL)
    seq = tl.arange(0, 1 << LOG_SEQS)
    valid = seq < num_seqs
    begin = tl.load(query_start_loc + seq, mask=valid, other=0)
    query_len = tl.load(query_start_loc + seq + 1, mask=valid, other=0) - begin
    tiles = tl.where(valid & (query_len >= min_query_len), tl.cdiv(query_len * GROUP, BLOCK_M), 0)
    num_tiles = tl.sum(tiles)
    first_listed = tl.program_id(0) * LISTED
    if first_listed == 0:
        tl.store(header + _NUM_ENTRIES, 0)
        tl.store(header + _NUM_MERGES, 0)
        tl.store(header + COUNTER, 0)
    if first_listed >= num_tiles:
        return
    # Every program writes the same values, and reads its own.
    tl.store(first_tile + seq, tl.cumsum(tiles) - tiles)
    tl.debug_barrier()

    total_keys = 0.0
    longest = 1
    for chunk in range(0, num_tiles, CHUNK):
        exists, seqs, tile, start, keys = _chunk_of_tiles(
            chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs, SHAPE, CHUNK
        )
        total_keys += tl.sum(keys.to(tl.float32))
        longest = tl.maximum(longest, tl.max(keys))

    programs = programs_each * tl.load(header + MULTIPROCESSORS)
    # Costs of candidate lengths of a piece: no cuts, then the longest tile in one piece for each even share of the
    # work that it has, and in more.
    candidate = tl.arange(0, _CANDIDATES)
    fewest = tl.maximum((longest.to(tl.float32) * programs / tl.maximum(total_keys * KV_HEADS, 1.0)).to(tl.int32), 1)
    parts = tl.where(candidate == 0, 1, fewest + (candidate - 1) * tl.maximum(fewest // 8, 1))
    length = tl.maximum(tl.cdiv(longest, parts), _SHORTEST_PIECE).to(tl.float32)
    rate = _ALMOST_ONE / length
    work = tl.zeros([_CANDIDATES], tl.float32)
    cut = tl.zeros([_CANDIDATES], tl.float32)
    num_large = tl.zeros([_CANDIDATES], tl.float32)
    work_large = tl.zeros([_CANDIDATES], tl.float32)
    for chunk in range(0, num_tiles, CHUNK):
        exists, seqs, tile, start, keys = _chunk_of_tiles(
            chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs, SHAPE, CHUNK
        )
        pieces = _pieces(keys[:, None], rate[None, :], exists[:, None])
        own_work = keys[:, None] + _PIECE_COST * pieces
        large = 2 * own_work > (length + _PIECE_COST)[None, :] * pieces
        work += tl.sum(own_work, 0)
        cut += tl.sum(tl.where(pieces > 1, pieces, 0.0), 0)
        num_large += tl.sum(tl.where(large, pieces, 0.0), 0)
        work_large += tl.sum(tl.where(large, own_work, 0.0), 0)
    # Two pieces of more than half the largest length, one after the other, take longer than a round.
    rounds = tl.cdiv(num_large.to(tl.int32) * KV_HEADS, programs)
    end = tl.maximum(work * KV_HEADS / programs, rounds * (work_large / tl.maximum(num_large, 1.0)))
    end = tl.maximum(end, length + _PIECE_COST)
    end += tl.where(cut > 0, _MERGE_COST + _PARTIAL_COST * (cut * KV_HEADS) / programs, 0.0)
    allowed = (cut <= max_slots) if CUTS else (cut < 0)
    end = tl.where(allowed | (candidate == 0), end, float("inf"))
    rate = tl.sum(tl.where(candidate == tl.argmin(end, 0), rate, 0.0))

    # Sort pieces by length, longest first; equal lengths in tile order. Partial results and merges are in tile order.
    exists, seqs, tile, start, keys = _chunk_of_tiles(
        first_listed, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs, SHAPE, LISTED
    )
    own = first_listed + tl.arange(0, LISTED)
    pieces = _pieces(keys, rate, exists).to(tl.int32)
    size = keys // tl.maximum(pieces, 1)
    is_cut = pieces > 1
    rank = tl.zeros([LISTED], tl.int32)
    slot = tl.zeros([LISTED], tl.int32)
    merge = tl.zeros([LISTED], tl.int32)
    num_entries = 0
    num_merges = 0
    for chunk in range(0, num_tiles, CHUNK):
        other_exists, _, _, _, other_keys = _chunk_of_tiles(
            chunk, num_tiles, query_start_loc, seq_lens, first_tile, num_seqs, SHAPE, CHUNK
        )
        other_pieces = _pieces(other_keys, rate, other_exists).to(tl.int32)
        other_size = other_keys // tl.maximum(other_pieces, 1)
        partials = tl.where(other_pieces > 1, other_pieces, 0)
        earlier = (chunk + tl.arange(0, CHUNK))[:, None] < own[None, :]
        longer = other_size[:, None] > size[None, :]
        longer = longer | ((other_size[:, None] == size[None, :]) & earlier)
        rank += tl.sum(tl.where(longer, other_pieces[:, None], 0), 0)
        slot += tl.sum(tl.where(earlier, partials[:, None], 0), 0)
        merge += tl.sum(tl.where(earlier & (partials > 0)[:, None], 1, 0), 0)
        num_entries += tl.sum(other_pieces)
        num_merges += tl.sum((partials > 0).to(tl.int32))
    if first_listed == 0:
        tl.store(header + _NUM_ENTRIES, num_entries)
        tl.store(header + _NUM_MERGES, num_merges)
    merge = merges + merge * ENTRY_WORDS
    store_words(merge, (seqs, tile, slot, pieces), is_cut)
    query_start = tl.load(query_start_loc + seqs, mask=exists, other=0)
    query_len = tl.load(query_start_loc + seqs + 1, mask=exists, other=0) - query_start
    seq_len = tl.load(seq_lens + seqs, mask=exists, other=0)
    cuts = tl.maximum(pieces, 1)[None, :]
    keys = keys[None, :]
    # keys * piece // cuts, whose product may exceed 32 bits, is whole * piece + rest * piece // cuts.
    whole = keys // cuts
    rest = keys % cuts
    for begin in range(0, tl.max(pieces), _PIECES):
        piece = begin + tl.arange(0, _PIECES)[:, None]
        mask = piece < pieces[None, :]
        lower = tl.cdiv(whole * piece + rest * piece // cuts, KEY_STEP) * KEY_STEP
        upper = tl.cdiv(whole * (piece + 1) + rest * (piece + 1) // cuts, KEY_STEP) * KEY_STEP
        upper = tl.minimum(upper, keys)
        entry = entries + (rank[None, :] + piece) * ENTRY_WORDS
        first_key, key_end = start[None, :] + tl.minimum(lower, keys), start[None, :] + upper
        piece_slot = tl.where(is_cut[None, :], slot[None, :] + piece, -1)
        span = seqs[None, :], tile[None, :], first_key, key_end, piece_slot
        store_words(entry, span + (query_start[None, :], query_len[None, :], seq_len[None, :]), mask)


@triton.jit
def _pieces(keys, rate, exists):
    """Return the pieces of a tile, a whole number in float32."""
    return tl.where(exists, tl.maximum(tl.ceil(keys.to(tl.float32) * rate), 1.0), 0.0)
