"""Division of a batch's short queries into ranges of key tiles that take equally long, one a program, on the device.

Shapes: R sequences, P programs, C candidate sizes of a chunk.

A captured graph has a fixed number of programs but meets any batch. The kernel here runs once a step, for all layers,
so that a program of `decode_attention` requests its keys after a single read. Algorithm: Stream-K (Osama et al., 2023)
over keys.
1. A *unit* is the domain of one softmax: a sequence, a KV head and a tile of rows, which are (token, query head of that
   KV head), heads innermost. Its keys are cut into *chunks* of whole tiles.
2. All chunks of the batch are laid end to end, and program p of P takes the p-th of P equal ranges. A range holds whole
   units, except for its first and last.
3. In a batch of many units a chunk is one tile. Between two units a program has no loads in flight, so each unit is
   charged UNIT_COST empty chunks before its own, and more if it begins with the results of shared prefixes.
4. In a batch of few units a chunk has the fewest tiles that give every program at most one chunk, and at least two if a
   unit has many: the more programs have keys of a unit, the longer the last of them merges their results.
5. Where the launch for long queries runs at the same time, it gets multiprocessors by its share of the work, and the
   ranges are cut for the programs on the others.
6. A prefix that neighbouring sequences share (`shared_runs`) is a sequence of its own: its queries are those of the
   run, which see all of its keys. These sequences have ranges of their own, which all programs take before the others.
   With a window, the keys of a sequence's prefixes are a *hole* in its own keys. In graphs of many decodes on Hopper
   they are instead *items* of the launch for long queries, whose tiles of 128 rows read keys less often
   (`shared_runs.store_items`).

    chunks    | e e 0 0 0 0 0 0 | e e 1 1 1 | e e 2 2 2 2 |    e: empty, a number: unit
    programs  |   p0    |   p1    |   p2    |   p3  |          equal ranges, empty chunks included

Sharing is worth it if it leaves the programs less to do by more than their wait for each other costs (_SHARING_COST).
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.attention_scratch import (
    DECODE_PROGRAMS,
    LONGEST_WINDOW,
    PREFILL_ROWS,
    SHARING_COST,
    SHORTEST_PIECE,
    decode_partials,
    key_tile,
    prefill_rows,
    prefix_slots,
    prefix_tile_rows,
    row_tiles,
)
from phonograph.kernels.attention_scratch import UNIT_COST as COST_OF_UNIT
from phonograph.kernels.triton.attention.plan_words import load_words, store_words
from phonograph.kernels.triton.attention.prefill_plan import ENTRY_WORDS
from phonograph.kernels.triton.attention.shared_runs import MIN_SHARED, compare_tables, find_runs, store_items
from phonograph.kernels.triton.launch.pdl import pdl_options

RECORD_WORDS = tl.constexpr(10)
SEQUENCE_WORDS = tl.constexpr(5)
PREFIX_WORDS = tl.constexpr(10)
# Kind of a sequence that shares prefixes; others are of kind 0. Kinds of shared prefixes are their levels, 0 and 1.
SHARES = tl.constexpr(2)
_FAR = tl.constexpr(2147483647)
# A word holds a range's chunks, times this, and the number of ranges that have one more.
_RANGES = tl.constexpr(1024)
# Costs of a long query: of starting and ending a tile, in its keys; of a key, in keys of short queries. From
# measurements on an H200, rounded up, because the long queries must not be the last to end.
_TILE_COST = tl.constexpr(448)
_LONG_COST = tl.constexpr(1.6)
_PIECE = tl.constexpr(SHORTEST_PIECE)
# Cost of beginning a unit, in tiles of keys: the last tiles of the previous unit, then block ids and queries, must have
# arrived before the first keys are requested.
UNIT_COST = tl.constexpr(COST_OF_UNIT)
# Further costs of a unit whose sequence shares prefixes: of taking over their results, and how many of these, each of a
# program, cost a tile. Sequences that share are neighbours and may have few keys of their own, so that the programs of
# their units would be the last to end without these costs. From timings of 45 batches on an H200.
_TAKE_COST = tl.constexpr(2)
_RESULTS_A_TILE = tl.constexpr(3)
# More than the cost of any unit; divides the keys of any chunk.
COSTS = tl.constexpr(16)
# Largest number of tiles of a unit for which a chunk may be one tile. A program merges about that many results at a
# time, and merging more takes longer than a second tile.
_MERGED = tl.constexpr(8)
# Results that are merged in the time of a tile of keys.
_RESULTS_MERGED_A_TILE = tl.constexpr(8)
# More than any kind; divides each first key. A smaller number shares a word with a multiple of this.
PACKED = tl.constexpr(8)
_SHARING_COST = tl.constexpr(SHARING_COST)
# Tiles of a window, at most. Two numbers of tiles share a word with a kind.
_WINDOW_TILES = tl.constexpr(1 << 14)


class PrefixItems(NamedTuple):
    """Tiles of shared prefixes for the launch for long queries, listed as `PrefillPlan` lists prefills.

    header [4]:     number of entries
    entries [N, 8]: as in `PrefillPlan`, but the slot of a tile that is not cut is -1 - level
    slots:          cut tiles, at most
    first_row:      row of `DecodePlan.partial_out` from which the results of cut tiles are
    """

    header: torch.Tensor
    entries: torch.Tensor
    slots: int
    first_row: int


class SharedPrefixes(NamedTuple):
    """Prefixes of a batch that are attended once, for its first tokens.

    shared [R]:        keys that each sequence shares with the one before
    lows [R]:          with a window, the first key that all queries of both see
    words [R, 10]:     by sequence that shares: first token and tokens of its run, position of the first chunk, chunks
                       of a unit, each for both levels; chunks of a range, empty chunks before a unit. With `items`
                       first slot and pieces of a tile in place of position and chunks
    arrivals [2]:      programs that have attended their prefixes, and those that go on; zero between launches
    units [3]:         units of shared prefixes in the latest batch, units of own keys, and tiles of keys of the former
    num_tokens:        tokens of a batch that may share
    items:             None if the launch for short queries attends all prefixes
    """

    shared: torch.Tensor
    lows: torch.Tensor
    words: torch.Tensor
    arrivals: torch.Tensor
    units: torch.Tensor
    num_tokens: int
    items: PrefixItems | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Work of one step, and scratch for its layers: tensors that live as long as any graph.

    records [P, 10]:   by program: entry in `sequences`, chunk in that sequence (and empty ones before it in the range),
                       keys of a chunk (and empty chunks before each unit, as `empty_of` takes them), chunks of a range
                       (and the number of ranges with one more), the entry itself, and the programs that attend shared
                       prefixes first (0 if there are none). If there are some, their ranges come before, [P, 10]
    sequences [R+1, 5]: the served sequences, in order: sequence, first token, query length, keys, first key of its own
                       (and kind); with a window, tiles of keys before and in the hole (and kind). Then the prefixes
                       that are attended once, in order, up to 2R: a sequence that has the keys, first token and tokens
                       of the run, end of the keys, first key (and level)
    counters [P]:      partial results that have arrived of the unit that begins in this program and ends in another;
                       zero between launches
    partial_out [2P, rows, D], partial_lse [2P, rows]: results of a range's first and last unit where these are cut; D
                       rounded up to a power of two, LSE in base 2. Then those of shared prefixes: 2P, and a row
                       for each level, token and head, where units are whole
    block_n:           keys in a tile
    prefixes:          None if each sequence attends alone
    """

    records: torch.Tensor
    sequences: torch.Tensor
    counters: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_kv_heads: int
    group: int
    head_size: int
    programs: int
    block_n: int
    prefixes: SharedPrefixes | None = None

    def prefixes_of(self, num_seqs: int, max_query_len: int) -> SharedPrefixes | None:
        """Return the prefixes of a launch, or None if it can share nothing, whose kernels are smaller and faster.

        A single sequence shares nothing. If its queries do not fit the small tile, it has the kernels of several
        sequences all the same, as others would have to be compiled.
        """
        small, _ = row_tiles(self.group, self.partial_out.shape[2])
        return self.prefixes if num_seqs > 1 or max_query_len * self.group > small else None


def make_decode_plan(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_num_seqs: int,
    num_sms: int,
    device: torch.device,
    shared_tokens: int = 0,
    prefix_tiles: bool = False,
) -> DecodePlan:
    """Make the persistent tensors for batches of up to `max_num_seqs` sequences.

    Prefixes are shared among the first `shared_tokens` tokens of a batch, in graphs of many decodes with tiles of their
    own (`PrefixItems`) if `prefix_tiles`.
    """
    group = num_query_heads // num_kv_heads
    tile_rows = prefix_tile_rows(num_kv_heads, num_sms) if prefix_tiles else 0
    shared_rows = shared_tokens * num_query_heads
    slots, rows, width = decode_partials(group, head_size, num_sms, shared_rows=shared_rows, tile_rows=tile_rows)
    programs = DECODE_PROGRAMS * num_sms
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    floats = partial(torch.zeros, dtype=torch.float32, device=device)
    most_seqs = triton.next_power_of_2(max_num_seqs)
    prefixes = None
    items = None
    if tile_rows:
        # Tiles that are not cut, of runs of both levels, and cut ones.
        most = 2 * (shared_tokens * group // PREFILL_ROWS) + most_seqs + prefix_slots(num_kv_heads, num_sms)
        items = PrefixItems(
            header=ints(4),
            entries=ints(most, ENTRY_WORDS.value),
            slots=prefix_slots(num_kv_heads, num_sms),
            first_row=slots * rows - tile_rows // rows * rows,
        )
    if shared_tokens:
        prefixes = SharedPrefixes(
            shared=ints(most_seqs),
            lows=ints(most_seqs),
            words=ints(most_seqs, PREFIX_WORDS.value),
            arrivals=ints(2),
            units=ints(3),
            num_tokens=shared_tokens,
            items=items,
        )
    return DecodePlan(
        records=ints(2 * programs if shared_tokens else programs, RECORD_WORDS.value),
        # One more, because the entry after the last is read, though not used.
        sequences=ints(3 * most_seqs + 2 if shared_tokens else most_seqs + 1, SEQUENCE_WORDS.value),
        counters=ints(programs),
        partial_out=floats(slots, rows, width),
        partial_lse=floats(slots, rows),
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        programs=programs,
        block_n=key_tile(width),
        prefixes=prefixes,
    )


def plan_decode(
    plan: DecodePlan,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    window: tuple[int, int],
    multiprocessors: torch.Tensor | None = None,
    divide: bool = False,
    in_tiles: bool = False,
    block_tables: tuple[torch.Tensor, ...] = (),
    block_size: int = 0,
) -> None:
    """Write the ranges of the sequences with 1 to `max_query_len` queries; one launch, or two with shared prefixes.

    No later kernel starts before this one has ended. So later kernels may read what this one and all before it wrote
    (the plan, the lengths, the block table) without waiting for their predecessor.

    Args:
        plan: receives the ranges
        query_start_loc: [R+1] int32, cumulative query lengths
        seq_lens: [R] int32, keys of each sequence, the queries' own included
        max_query_len: at most MAX_SHORT_QUERY
        window: (left, right) keys before and after the query; -1 for no bound. The right bound does not matter here.
        multiprocessors: [1] int32; receives the number of multiprocessors for the launch for long queries
        divide: that launch runs at the same time, and leaves the other multiprocessors to this one
        in_tiles: shared prefixes are attended in tiles of a launch of their own, if the plan has them
        block_tables: each [R, max blocks] int32, rows contiguous, of a plan that shares prefixes: pages that are equal
            in all of them are shared
        block_size: keys of a block
    """
    assert plan.programs <= _RANGES.value
    seqs = plan.sequences.shape[0] - 1 if plan.prefixes is None else plan.prefixes.shared.shape[0]
    at_once = max(2, min(8, 8192 // seqs))
    prefixes = plan.prefixes_of(seq_lens.shape[0], max_query_len)
    small, large = row_tiles(plan.group, plan.partial_out.shape[2], shares=prefixes is not None)
    shared, lows, words, items = None, None, None, None
    units = None if plan.prefixes is None else plan.prefixes.units
    if prefixes is not None:
        assert block_tables and window[0] < LONGEST_WINDOW
        shared, words, items = prefixes.shared, prefixes.words, prefixes.items if in_tiles else None
        lows = prefixes.lows if window[0] >= 0 else None
        compare_tables(
            shared,
            query_start_loc,
            seq_lens,
            block_tables,
            block_size=block_size,
            max_query_len=max_query_len,
            max_tokens=prefixes.num_tokens,
            lows=lows,
            left=window[0],
        )
    _plan_kernel[(triton.cdiv(plan.programs, at_once),)](
        query_start_loc,
        seq_lens,
        shared,
        lows,
        plan.records,
        plan.sequences,
        words,
        units,
        None if items is None else items.header,
        None if items is None else items.entries,
        multiprocessors,
        seq_lens.shape[0],
        max_query_len,
        int(divide),
        PROGRAMS=plan.programs,
        AT_ONCE=at_once,
        SEQS=seqs,
        KV_HEADS=plan.num_kv_heads,
        GROUP=plan.group,
        SMALL=small,
        LARGE=large,
        LONG=prefill_rows(plan.head_size),
        EACH=DECODE_PROGRAMS,
        BLOCK_N=plan.block_n,
        LEFT=window[0],
        MOST_ITEMS=0 if items is None else items.entries.shape[0],
        SLOTS=0 if items is None else items.slots,
        **pdl_options(),
        num_warps=8,
    )


# Query heads of a KV head, rows of the two tiles, keys of a tile, the left window, and True if own keys have holes.
_Shape = namedtuple("_Shape", "GROUP SMALL LARGE BLOCK_N LEFT HOLES")


@triton.jit
def sequence_chunks(query_len, seq_len, word, chunk, shape, prefix):
    """Return an entry's first visible key, first key of the first chunk, chunks (at least one), rows of a tile, tiles.

    The entry's keys are those from the first key in `word`, or of the window, to `seq_len`, without its hole.
    Entries of prefixes (`prefix`) have no window.
    """
    low = word // PACKED * PACKED
    hole = 0
    if shape.LEFT >= 0:
        left = tl.minimum(tl.maximum(seq_len - query_len - shape.LEFT, 0), seq_len)
        if shape.HOLES:
            low = tl.where(prefix, low, left)
            hole = tl.where(prefix, 0, hole_of(word, 0, shape)[1])
        else:
            low = left
    start = low // shape.BLOCK_N * shape.BLOCK_N
    chunks = tl.maximum(tl.cdiv(seq_len - start - hole, chunk), 1)
    tile_rows, num_tiles = row_tiles_of(query_len, word % PACKED == SHARES, shape)
    return low, start, chunks, tile_rows, num_tiles


@triton.jit
def hole_of(word, start, shape):
    """Return the first key of the hole in the own keys of a sequence, which begin at `start`, and its keys."""
    tiles = word // PACKED
    return start + tiles // _WINDOW_TILES * shape.BLOCK_N, tiles % _WINDOW_TILES * shape.BLOCK_N


@triton.jit
def read_record(records, program):
    """Return a program's record, unpacked.

    The values are its entry in `sequences`, chunk there, empty chunks before it and before each unit, keys of a chunk,
    the word of `share_of`, the entry itself, then the programs that attend shared prefixes first.
    """
    record = records + program * RECORD_WORDS
    index, chunk, chunk_keys, ranges, seq, query_start, query_len, seq_len, first, together = load_words(
        record, RECORD_WORDS
    )
    first_chunk, lead = chunk // COSTS, chunk % COSTS
    empty, chunk_keys = chunk_keys % COSTS, chunk_keys // COSTS * COSTS
    return index, first_chunk, lead, empty, chunk_keys, ranges, seq, query_start, query_len, seq_len, first, together


@triton.jit
def share_of(program, ranges):
    """Return chunks of most programs, programs that have one more, and the program's first chunk and end."""
    share, extra = ranges // _RANGES, ranges % _RANGES
    begin = program * share + tl.minimum(program, extra)
    return share, extra, begin, begin + share + (program < extra).to(tl.int32)


@triton.jit
def empty_of(word, empty):
    """Return the number of empty chunks before each unit of a sequence, by its word; it is `empty` if that shares."""
    return tl.where(word % PACKED == SHARES, empty, tl.minimum(empty, UNIT_COST))


@triton.jit
def cut_of(position, chunk, program_share, program, num_chunks, empty):
    """Return a program's part of the unit at a position.

    The values are the first chunk of the unit's keys that is the program's, the number of its chunks, the first and
    last program with keys of the unit, and the slots for partial results of the first program and of this one.
    `program_share` is the program's `share_of`; `num_chunks` are the unit's, without the empty ones before it.
    """
    share, extra, begin, stop = program_share
    key_chunk = chunk % num_chunks
    taken = tl.minimum(num_chunks - key_chunk, stop - position)
    unit_begin = position - key_chunk
    first, last, first_slot = programs_of(unit_begin, num_chunks, share * _RANGES + extra, empty)
    slot = 2 * program + (begin < unit_begin - empty).to(tl.int32)
    return key_chunk, taken, first, last, first_slot, slot


@triton.jit
def programs_of(unit_begin, num_chunks, ranges, empty):
    """Return the first and last program with keys of a unit, and the first one's slot for a partial result.

    `unit_begin` is the position of the unit's first chunk with keys, `ranges` the word of `share_of`.
    """
    share, extra = ranges // _RANGES, ranges % _RANGES
    unit_end = unit_begin + num_chunks - 1
    longer = extra * (share + 1)
    shorter = tl.maximum(share, 1)
    first = tl.where(
        unit_begin < longer, unit_begin // (share + 1), extra + tl.maximum(unit_begin - longer, 0) // shorter
    )
    last = tl.where(unit_end < longer, unit_end // (share + 1), extra + tl.maximum(unit_end - longer, 0) // shorter)
    # A partial result is its program's second if the range begins with keys of another unit.
    first_slot = 2 * first + (first * share + tl.minimum(first, extra) < unit_begin - empty).to(tl.int32)
    return first, last, first_slot


@triton.jit
def row_tiles_of(query_len, shares, shape):
    """Return the rows of a tile, and the number of tiles, of a query of `query_len` tokens.

    Tiles of a sequence that shares prefixes are small: registers hold a large one, or partial results to begin with.
    """
    rows = query_len * shape.GROUP
    tile_rows = tl.where((rows <= shape.SMALL) | shares, shape.SMALL, shape.LARGE)
    return tile_rows, tl.cdiv(rows, tile_rows)


@triton.jit
def _weigh(run_R, begin, shape):
    """Return the keys of runs as whole tiles from key `begin` on, and the tiles that each run saves, if any.

    A run's sequences would each read its keys. It reads them once for each of its tiles of rows, and each of its
    sequences then merges one result more, which costs about as much as a tile.
    """
    first_R, last_R, least_R, tokens_R = run_R
    sequences_R = last_R - first_R + 1
    end_R = tl.where(sequences_R > 1, least_R // shape.BLOCK_N * shape.BLOCK_N, begin)
    _, row_tiles_R = row_tiles_of(tokens_R, False, shape)
    tiles_R = (end_R - begin) // shape.BLOCK_N
    if shape.LEFT >= 0:
        # The window of one sequence may begin after the prefix that two others share.
        tiles_R = tl.maximum(tiles_R, 0)
    saved_R = (sequences_R - row_tiles_R) * tiles_R
    saved_R -= row_tiles_R * UNIT_COST + sequences_R
    return end_R, tl.where(sequences_R > 1, tl.maximum(saved_R, 0), 0)


@triton.jit
def _first_tiles(low_R, joins_R, joins_next_R, shape):
    """Return the first key of the first tile that all queries of each sequence's run see."""
    _, _, least_R = find_runs(-low_R, joins_R, joins_next_R)
    return tl.cdiv(tl.maximum(-least_R, 0), shape.BLOCK_N) * shape.BLOCK_N


@triton.jit
def _find_levels(query_start_loc, shared, lows, num_seqs, shape, SEQS: tl.constexpr):
    """Return the runs of both levels and what they save.

    The values are, for each level, of each sequence's run: begin and end of the keys (equal where there is no run that
    pays), its first sequence and its tokens; then the tiles that all runs save.
    """
    seq_R = tl.arange(0, SEQS)
    low_R = seq_R * 0
    shared_R = tl.load(shared + seq_R, mask=seq_R < num_seqs, other=0)
    next_R = tl.load(shared + seq_R + 1, mask=seq_R + 1 < num_seqs, other=0)
    first_R, last_R, least_R = find_runs(shared_R, shared_R >= MIN_SHARED, next_R >= MIN_SHARED)
    inside_R = last_R < num_seqs
    tokens_R = tl.load(query_start_loc + last_R + 1, mask=inside_R, other=0)
    tokens_R -= tl.load(query_start_loc + first_R, mask=inside_R, other=0)
    begin_R = low_R
    if lows is not None:
        low_R = tl.load(lows + seq_R, mask=seq_R < num_seqs, other=0)
        begin_R = _first_tiles(low_R, shared_R >= MIN_SHARED, next_R >= MIN_SHARED, shape)
    end_R, saved_R = _weigh((first_R, last_R, least_R, tokens_R), begin_R, shape)

    # A run of a longer prefix lies inside one run, all of whose sequences have the same end.
    longer_R = end_R + MIN_SHARED
    first2_R, last2_R, least2_R = find_runs(shared_R, shared_R >= longer_R, next_R >= longer_R)
    end_R = tl.where(saved_R > 0, end_R, 0)
    begin2_R = end_R
    if lows is not None:
        begin_R = tl.where(saved_R > 0, begin_R, 0)
        begin2_R = tl.where(saved_R > 0, end_R, _first_tiles(low_R, shared_R >= longer_R, next_R >= longer_R, shape))
    tokens2_R = tl.load(query_start_loc + last2_R + 1, mask=inside_R, other=0)
    tokens2_R -= tl.load(query_start_loc + first2_R, mask=inside_R, other=0)
    end2_R, saved2_R = _weigh((first2_R, last2_R, least2_R, tokens2_R), begin2_R, shape)
    saved = tl.sum(tl.where(first_R == seq_R, saved_R, 0)) + tl.sum(tl.where(first2_R == seq_R, saved2_R, 0))
    end2_R = tl.where(saved2_R > 0, end2_R, 0)
    if lows is not None:
        begin2_R = tl.where(saved2_R > 0, begin2_R, end_R)
    return begin_R, end_R, first_R, tokens_R, begin2_R, end2_R, first2_R, tokens2_R, saved


@triton.jit
def _divide(tiles_R, units_R, more_tiles_R, more_units_R, programs):
    """Return the tiles of a chunk and the empty chunks before each unit, of two kinds of units."""
    most_R = tl.maximum(tl.where(units_R > 0, tiles_R, 0), tl.where(more_units_R > 0, more_tiles_R, 0))
    # The smallest chunk that leaves no program two chunks: up to half above a fair share, but at most the number
    # of tiles that take as long as the end of a unit and the beginning of the next.
    most = tl.max(most_R)
    least = tl.where(most > _MERGED, 2, 1)
    # A unit in N chunks takes the time of most / N tiles and of merging N results, together the least for this size.
    least = tl.maximum(least, tl.sqrt(most / _RESULTS_MERGED_A_TILE).to(tl.int32))
    fair = tl.maximum(tl.cdiv(tl.sum(tiles_R * units_R + more_tiles_R * more_units_R), programs), least)
    size_C = fair + tl.cdiv(tl.minimum(fair, 2 * UNIT_COST) * tl.arange(0, 16), 32)
    chunks_CR = tl.cdiv(tiles_R[None, :], size_C[:, None]) * units_R[None, :]
    chunks_CR += tl.cdiv(more_tiles_R[None, :], size_C[:, None]) * more_units_R[None, :]
    size = tl.min(tl.where(tl.sum(chunks_CR, 1) <= programs, size_C, _FAR))
    return tl.where(size == _FAR, 1, size), tl.where(size == _FAR, UNIT_COST, 0)


@triton.jit
def _store_records(records, ranges_P, size, index_P, before_P, empty, entry_P, together_P, exists_P, shape, prefix):
    """Write records of programs P, whose ranges begin `before_P` chunks after their entries do."""
    seq_P, begin_P, len_P, keys_P, word_P = entry_P
    _, _, chunks_P, _, _ = sequence_chunks(len_P, keys_P, word_P, size * shape.BLOCK_N, shape, prefix)
    # Chunks of the sequence and of the unit that belong to earlier programs, with empty ones.
    empty_P = empty_of(word_P, empty)
    unit_P = before_P // (chunks_P + empty_P)
    chunk_P = before_P % (chunks_P + empty_P)
    first_chunk_P = (unit_P * chunks_P + tl.maximum(chunk_P - empty_P, 0)) * COSTS + tl.maximum(empty_P - chunk_P, 0)
    chunk_keys_P = size * shape.BLOCK_N + empty + seq_P * 0
    record = index_P, first_chunk_P, chunk_keys_P, ranges_P, seq_P, begin_P, len_P, keys_P, word_P, together_P
    store_words(records, record, exists_P)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _at(is_PR, values_R):
    """Return each program's value, of the sequence in which its range begins."""
    return tl.sum(tl.where(is_PR, values_R[None, :], 0), 1)


@triton.jit(do_not_specialize=["num_seqs", "max_query_len", "divide"])
def _plan_kernel(
    query_start_loc,
    seq_lens,
    shared,
    lows,
    records,
    sequences,
    words,
    units,
    header,
    items,
    multiprocessors,
    num_seqs,
    max_query_len,
    divide,
    PROGRAMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SEQS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    LONG: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    MOST_ITEMS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write AT_ONCE records a program. Each program sums the batch itself, which is faster than waiting for another."""
    SHAPE: tl.constexpr = _Shape(GROUP, SMALL, LARGE, BLOCK_N, LEFT, lows is not None)
    if PDL:
        tl_cuda.gdc_wait()
    seq_R = tl.arange(0, SEQS)
    valid_R = seq_R < num_seqs
    begin_R = tl.load(query_start_loc + seq_R, mask=valid_R, other=0)
    len_R = tl.load(query_start_loc + seq_R + 1, mask=valid_R, other=0) - begin_R
    keys_R = tl.load(seq_lens + seq_R, mask=valid_R, other=0)
    served_R = valid_R & (len_R >= 1) & (len_R <= max_query_len)
    # Keys and tokens of the runs of both levels, the latter at their first sequences.
    low1_R, end1_R, tokens1_R, low2_R, end2_R, tokens2_R = (
        seq_R * 0, seq_R * 0, seq_R * 0, seq_R * 0, seq_R * 0, seq_R * 0,
    )  # fmt: skip
    first1_R, first2_R = seq_R, seq_R
    shares = num_seqs * 0
    if shared is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
        if tl.max(tl.load(shared + seq_R, mask=valid_R, other=0)) >= MIN_SHARED:
            begins_R, ends_R, firsts_R, token_R, begins2_R, ends2_R, firsts2_R, token2_R, saved = _find_levels(
                query_start_loc, shared, lows, num_seqs, SHAPE, SEQS
            )
            if saved * KV_HEADS >= _SHARING_COST * PROGRAMS:
                low1_R, end1_R, first1_R, tokens1_R, low2_R, end2_R, first2_R, tokens2_R = (
                    begins_R, ends_R, firsts_R, token_R, begins2_R, ends2_R, firsts2_R, token2_R,
                )  # fmt: skip
                shares += 1
    own_R = tl.maximum(end1_R, end2_R)
    word_R = own_R + tl.where(own_R > 0, SHARES, 0)
    if lows is None:
        low1_R, low2_R = seq_R * 0, end1_R
    else:
        hole_R = tl.where(end1_R > 0, low1_R, low2_R)
        before_R = hole_R // BLOCK_N - tl.maximum(keys_R - len_R - LEFT, 0) // BLOCK_N
        word_R = (before_R * _WINDOW_TILES + (own_R - hole_R) // BLOCK_N) * PACKED + SHARES
        word_R = tl.where(own_R > 0, word_R, 0)
    _, _, tiles_R, _, units_R = sequence_chunks(len_R, keys_R, word_R, BLOCK_N, SHAPE, False)
    units_R = tl.where(served_R, units_R * KV_HEADS, 0)
    tiles1_R, tiles2_R = (end1_R - low1_R) // BLOCK_N, (own_R - low2_R) // BLOCK_N
    units1_R = tl.where((first1_R == seq_R) & (end1_R > 0), row_tiles_of(tokens1_R, False, SHAPE)[1] * KV_HEADS, 0)
    units2_R = tl.where((first2_R == seq_R) & (end2_R > 0), row_tiles_of(tokens2_R, False, SHAPE)[1] * KV_HEADS, 0)
    work_R = tiles_R * units_R + tiles1_R * units1_R + tiles2_R * units2_R
    programs = PROGRAMS
    if multiprocessors is not None:
        SMS: tl.constexpr = PROGRAMS // EACH
        MOST: tl.constexpr = SMS - (SMS + 15) // 16
        short = tl.sum(work_R.to(tl.float32)) * (BLOCK_N / KV_HEADS)
        long_R = tl.where(valid_R & (len_R > max_query_len), tl.cdiv(len_R * GROUP, LONG), 0)
        seen_R = keys_R
        if LEFT >= 0:
            seen_R = tl.minimum(keys_R, LEFT + len_R)
        # A query sees half of its sequence's new keys, on average.
        seen_R = seen_R - len_R // 2
        long = _LONG_COST * tl.sum(long_R.to(tl.float32) * (seen_R + _TILE_COST).to(tl.float32))
        used = tl.minimum(tl.ceil(SMS * (long / tl.maximum(long + short, 1.0))).to(tl.int32), MOST)
        # At most one for each piece.
        used = tl.minimum(used, tl.sum(long_R * tl.cdiv(seen_R, _PIECE)) * KV_HEADS)
        divided = (divide != 0) & (short > 0)
        programs = tl.where(divided, PROGRAMS - EACH * used, PROGRAMS)
        if tl.program_id(0) == 0:
            tl.store(multiprocessors, tl.where(divided, used, SMS))
    size, empty = _divide(tiles_R, units_R, tiles_R, units_R * 0, programs)
    prefix_units = tl.sum(units1_R + units2_R)
    prefix_tiles = tl.sum(tiles1_R * units1_R + tiles2_R * units2_R)
    if shared is not None:
        # Of sequences that share, by the programs that have keys of a unit of prefixes, of two tiles each or more.
        results = tl.minimum(programs, prefix_tiles // 2)
        take = _TAKE_COST + results // (_RESULTS_A_TILE * tl.maximum(prefix_units, 1))
        empty += tl.where((empty > 0) & (prefix_units > 0), tl.minimum(take, COSTS - 1 - UNIT_COST), 0)
    chunks_R = (tl.cdiv(tiles_R, size) + empty_of(word_R, empty)) * units_R
    first_R = tl.where(served_R, tl.cumsum(chunks_R) - chunks_R, _FAR)
    total = tl.sum(chunks_R)
    if tl.program_id(0) == 0:
        entry_R = sequences + (tl.cumsum(served_R.to(tl.int32)) - 1) * SEQUENCE_WORDS
        store_words(entry_R, (seq_R, begin_R, len_R, keys_R, word_R), served_R)
        if units is not None:
            tl.store(units, prefix_units)
            tl.store(units + 1, tl.sum(units_R))
            tl.store(units + 2, prefix_tiles)

    program_P = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    exists_P = program_P < PROGRAMS
    ranges = total // programs * _RANGES + total % programs
    # Programs without a range begin at the end of the last one, and have no chunks there.
    start_P = tl.minimum(share_of(program_P, ranges)[2], total)
    before_PR = first_R[None, :] <= start_P[:, None]
    index_P = tl.sum(before_PR.to(tl.int32), 1) - 1
    seq_P = tl.maximum(tl.max(tl.where(before_PR, seq_R[None, :], -1), 1), 0)
    first_P = tl.max(tl.where(before_PR, first_R[None, :], 0), 1)
    begin_P = tl.load(query_start_loc + seq_P)
    len_P = tl.load(query_start_loc + seq_P + 1) - begin_P
    word_P = seq_P * 0
    if shares != 0:
        word_P = _at(seq_R[None, :] == seq_P[:, None], word_R)
    entry_P = seq_P, begin_P, len_P, tl.load(seq_lens + seq_P), word_P
    takes_P = program_P < programs
    # After the records of shared prefixes, if there are any.
    together = 0 if items is not None else shares
    record_P = records + (program_P + PROGRAMS * together) * RECORD_WORDS
    together_P = tl.where(takes_P, programs * together, 0)
    ranges_P = tl.where(takes_P, ranges, 0)
    before_P = start_P - first_P
    _store_records(record_P, ranges_P, size, index_P, before_P, empty, entry_P, together_P, exists_P, SHAPE, False)

    if items is not None:
        if tl.program_id(0) == 0:
            tl.store(header, 0)
        if shares != 0:
            rows1_R = tl.where((first1_R == seq_R) & (end1_R > 0), tokens1_R * GROUP, 0)
            rows2_R = tl.where((first2_R == seq_R) & (end2_R > 0), tokens2_R * GROUP, 0)
            CONSTANTS: tl.constexpr = (KV_HEADS, PROGRAMS // EACH, MOST_ITEMS, SLOTS)
            slot1_R, pieces1_R, slot2_R, pieces2_R = store_items(
                header, items, (rows1_R, low1_R, end1_R), (rows2_R, low2_R, own_R), query_start_loc, GROUP, CONSTANTS
            )
            if tl.program_id(0) == 0:
                begin1_R = tl.load(query_start_loc + first1_R, mask=end1_R > 0)
                begin2_R = tl.load(query_start_loc + first2_R, mask=end2_R > 0)
                # A sequence's runs are the last that have begun.
                at1_R = tl.associative_scan(slot1_R, 0, _larger)
                at2_R = tl.associative_scan(slot2_R, 0, _larger)
                of1 = begin1_R, tl.where(end1_R > 0, tokens1_R, 0), at1_R, pieces1_R
                of2 = begin2_R, tl.where(end2_R > 0, tokens2_R, 0), at2_R, pieces2_R
                store_words(words + seq_R * PREFIX_WORDS, of1 + of2 + (seq_R * 0, seq_R * 0), valid_R)
    elif shared is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
        if shares != 0:
            # The same for shared prefixes. A sequence has the entries of the runs that begin with it.
            size, empty = _divide(tiles1_R, units1_R, tiles2_R, units2_R, programs)
            unit1_R, unit2_R = tl.cdiv(tiles1_R, size), tl.cdiv(tiles2_R, size)
            chunks1_R, chunks2_R = (unit1_R + empty) * units1_R, (unit2_R + empty) * units2_R
            position1_R = tl.cumsum(chunks1_R + chunks2_R) - chunks1_R - chunks2_R
            position2_R = position1_R + chunks1_R
            is1_R, is2_R = units1_R > 0, units2_R > 0
            total = tl.sum(chunks1_R + chunks2_R)
            ranges = total // programs * _RANGES + total % programs
            # After the sequences, and the one entry more that is read there.
            index_R = tl.cumsum(is1_R.to(tl.int32) + is2_R.to(tl.int32)) - is1_R.to(tl.int32) - is2_R.to(tl.int32)
            index_R += SEQS + 1
            if tl.program_id(0) == 0:
                run_R = sequences + index_R * SEQUENCE_WORDS
                store_words(run_R, (seq_R, begin_R, tokens1_R, end1_R, low1_R), is1_R)
                run_R += is1_R.to(tl.int32) * SEQUENCE_WORDS
                store_words(run_R, (seq_R, begin_R, tokens2_R, own_R, low2_R + 1), is2_R)
                # A sequence's runs are the last that have begun.
                begin1_R = tl.load(query_start_loc + first1_R, mask=end1_R > 0)
                begin2_R = tl.load(query_start_loc + first2_R, mask=end2_R > 0)
                at1_R = tl.associative_scan(tl.where(is1_R, position1_R, 0), 0, _larger)
                at2_R = tl.associative_scan(tl.where(is2_R, position2_R, 0), 0, _larger)
                of1 = begin1_R, tl.where(end1_R > 0, tokens1_R, 0), at1_R, unit1_R
                of2 = begin2_R, tl.where(end2_R > 0, tokens2_R, 0), at2_R, unit2_R
                store_words(words + seq_R * PREFIX_WORDS, of1 + of2 + (seq_R * 0 + ranges, seq_R * 0 + empty), valid_R)
            start_P = tl.minimum(share_of(program_P, ranges)[2], total)
            before_PR = (position1_R[None, :] <= start_P[:, None]) & (is1_R | is2_R)[None, :]
            seq_P = tl.maximum(tl.max(tl.where(before_PR, seq_R[None, :], -1), 1), 0)
            is_PR = seq_R[None, :] == seq_P[:, None]
            before_P, chunks1_P = start_P - _at(is_PR, position1_R), _at(is_PR, chunks1_R)
            in1_P = before_P < chunks1_P
            len_P = tl.where(in1_P, _at(is_PR, tokens1_R), _at(is_PR, tokens2_R))
            end_P = tl.where(in1_P, _at(is_PR, end1_R), _at(is_PR, own_R))
            word_P = tl.where(in1_P, _at(is_PR, low1_R), _at(is_PR, low2_R) + 1)
            index_P = _at(is_PR, index_R) + tl.where(in1_P, 0, (chunks1_P > 0).to(tl.int32))
            before_P -= tl.where(in1_P, 0, chunks1_P)
            entry_P = seq_P, tl.load(query_start_loc + seq_P), len_P, end_P, word_P
            record_P = records + program_P * RECORD_WORDS
            ranges_P = tl.where(takes_P, ranges, 0)
            _store_records(
                record_P, ranges_P, size, index_P, before_P, empty, entry_P, together_P, exists_P, SHAPE, True
            )
    if PDL:
        _fence()


@triton.jit
def _fence():
    """Make this thread's writes visible to the whole GPU."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
