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
   charged UNIT_COST empty chunks before its own.
4. In a batch of few units a chunk has the fewest tiles that give every program at most one chunk, and at least two if a
   unit has many: the more programs have keys of a unit, the longer the last of them merges their results.
5. Where the launch for long queries runs at the same time, it gets multiprocessors by its share of the work, and the
   ranges are cut for the programs on the others.
6. A prefix that neighbouring sequences share (`shared_runs`) is a sequence of its own: its queries are those of the
   run, which see all of its keys. It comes before the first sequence of the run, whose own keys begin after it. Each
   row of these sequences then has a result for each *level*: for one or two runs, and for the sequence's own keys.

    chunks    | e e 0 0 0 0 0 0 | e e 1 1 1 | e e 2 2 2 2 |    e: empty, a number: unit
    programs  |   p0    |   p1    |   p2    |   p3  |          equal ranges, empty chunks included

Sharing is worth it if it leaves the programs less to do by more than the merge of the levels costs (_SHARING_COST).
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
    LEVELS,
    SHARING_COST,
    SHORTEST_PIECE,
    decode_partials,
    key_tile,
    prefill_rows,
    row_tiles,
)
from phonograph.kernels.attention_scratch import UNIT_COST as COST_OF_UNIT
from phonograph.kernels.triton.attention.plan_words import load_words, store_words
from phonograph.kernels.triton.attention.shared_runs import MIN_SHARED, compare_tables, find_runs
from phonograph.kernels.triton.launch.pdl import pdl_options

RECORD_WORDS = tl.constexpr(9)
SEQUENCE_WORDS = tl.constexpr(5)
# Kinds of entries. A sequence's own keys: bits of the levels that it lacks, so that 3 is a sequence that shares none.
ALONE, FIRST_LEVEL, SECOND_LEVEL = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
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
# Largest number of tiles of a unit for which a chunk may be one tile. A program merges about that many results at a
# time, and merging more takes longer than a second tile.
_MERGED = tl.constexpr(8)
# More than UNIT_COST and than any kind; divides the keys of any chunk and each first key. A smaller number shares a
# word with a multiple of this.
PACKED = tl.constexpr(8)
_SHARING_COST = tl.constexpr(SHARING_COST)


class LevelScratch(NamedTuple):
    """Scratch of prefixes that are attended once, for the first T tokens of a batch; H query heads, D head size.

    shared [R]:        keys that each sequence shares with the one before
    arrivals [T, H]:   levels whose results have arrived of a row; zero between launches
    out [3, T, H, D]:  float32, results of the levels: of two runs, and the sequence's own
    lse [3, H, T]:     natural logarithm
    """

    shared: torch.Tensor
    arrivals: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Work of one step, and scratch for its layers: tensors that live as long as any graph.

    records [P, 9]:    by program: entry in `sequences`, chunk in that sequence (and empty ones before it in the range),
                       keys of a chunk (and empty chunks before each unit), chunks of a range (and the number of ranges
                       with one more), then the entry itself
    sequences [N, 5]:  the served sequences, in order: sequence, first token, query length, end of the keys, first key
                       (and kind). With shared prefixes up to two a sequence of the batch, whose table has the keys
    counters [P]:      partial results that have arrived of the unit that begins in this program and ends in another;
                       zero between launches
    partial_out [2P, rows, D], partial_lse [2P, rows]: results of a range's first and last unit where these are cut; D
                       rounded up to a power of two, LSE in base 2
    block_n:           keys in a tile
    levels:            scratch of shared prefixes, or None if each sequence attends alone
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
    levels: LevelScratch | None = None


def make_decode_plan(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_num_seqs: int,
    num_sms: int,
    device: torch.device,
    shared_tokens: int = 0,
) -> DecodePlan:
    """Make the persistent tensors for batches of up to `max_num_seqs` sequences.

    Prefixes are shared among the first `shared_tokens` tokens of a batch.
    """
    group = num_query_heads // num_kv_heads
    slots, rows, width = decode_partials(group, head_size, num_sms, shares=shared_tokens > 0)
    programs = DECODE_PROGRAMS * num_sms
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    floats = partial(torch.zeros, dtype=torch.float32, device=device)
    most_seqs = triton.next_power_of_2(max_num_seqs)
    levels = LevelScratch(
        shared=ints(most_seqs),
        arrivals=ints(shared_tokens, num_query_heads),
        out=floats(LEVELS, shared_tokens, num_query_heads, head_size),
        lse=floats(LEVELS, num_query_heads, shared_tokens),
    )
    return DecodePlan(
        records=ints(programs, RECORD_WORDS.value),
        # One more, because the entry after the last is read, though not used.
        sequences=ints(2 * most_seqs + 1, SEQUENCE_WORDS.value),
        counters=ints(programs),
        partial_out=floats(slots, rows, width),
        partial_lse=floats(slots, rows),
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        programs=programs,
        block_n=key_tile(width),
        levels=levels if shared_tokens else None,
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
    block_table: torch.Tensor | None = None,
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
        block_table: [R, max blocks] int32, rows contiguous, of a plan that shares prefixes
        block_size: keys of a block
    """
    assert plan.programs <= _RANGES.value
    seqs = plan.sequences.shape[0] // 2
    at_once = max(2, min(8, 8192 // seqs))
    small, large = row_tiles(plan.group, plan.partial_out.shape[2], shares=plan.levels is not None)
    shared = None
    if plan.levels is not None:
        assert block_table is not None and window[0] < 0, "a plan that shares prefixes is for whole contexts"
        shared = plan.levels.shared
        compare_tables(
            shared,
            query_start_loc,
            seq_lens,
            block_table,
            block_size=block_size,
            max_query_len=max_query_len,
            max_tokens=plan.levels.arrivals.shape[0],
        )
    _plan_kernel[(triton.cdiv(plan.programs, at_once),)](
        query_start_loc,
        seq_lens,
        shared,
        plan.records,
        plan.sequences,
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
        **pdl_options(),
        num_warps=8,
    )


# Query heads of a KV head, rows of the two tiles, keys of a tile, and the left window.
_Shape = namedtuple("_Shape", "GROUP SMALL LARGE BLOCK_N LEFT")


@triton.jit
def sequence_chunks(query_len, seq_len, first_key, chunk, shape):
    """Return an entry's first visible key, first key of the first chunk, chunks (at least one) and tiles of rows.

    The entry's keys are those from `first_key`, which is 0 with a window, to `seq_len`.
    """
    low = first_key
    if shape.LEFT >= 0:
        low = tl.minimum(tl.maximum(seq_len - query_len - shape.LEFT, 0), seq_len)
    start = low // shape.BLOCK_N * shape.BLOCK_N
    chunks = tl.maximum(tl.cdiv(seq_len - start, chunk), 1)
    return low, start, chunks, _row_tiles(query_len, shape)


@triton.jit
def read_record(records, program):
    """Return a program's record, unpacked.

    The values are its entry in `sequences`, chunk there, empty chunks before it and before each unit, keys of a chunk,
    the word of `share_of`, then the entry itself.
    """
    record = records + program * RECORD_WORDS
    index, chunk, chunk_keys, ranges, seq, query_start, query_len, seq_len, first = load_words(record, RECORD_WORDS)
    first_chunk, lead = chunk // PACKED, chunk % PACKED
    empty, chunk_keys = chunk_keys % PACKED, chunk_keys // PACKED * PACKED
    return index, first_chunk, lead, empty, chunk_keys, ranges, seq, query_start, query_len, seq_len, first


@triton.jit
def share_of(program, ranges):
    """Return chunks of most programs, programs that have one more, and the program's first chunk and end."""
    share, extra = ranges // _RANGES, ranges % _RANGES
    begin = program * share + tl.minimum(program, extra)
    return share, extra, begin, begin + share + (program < extra).to(tl.int32)


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
    unit_end = unit_begin + num_chunks - 1
    longer = extra * (share + 1)
    shorter = tl.maximum(share, 1)
    first = tl.where(
        unit_begin < longer, unit_begin // (share + 1), extra + tl.maximum(unit_begin - longer, 0) // shorter
    )
    last = tl.where(unit_end < longer, unit_end // (share + 1), extra + tl.maximum(unit_end - longer, 0) // shorter)
    # A partial result is its program's second if the range begins with keys of another unit.
    first_slot = 2 * first + (first * share + tl.minimum(first, extra) < unit_begin - empty).to(tl.int32)
    slot = 2 * program + (begin < unit_begin - empty).to(tl.int32)
    return key_chunk, taken, first, last, first_slot, slot


@triton.jit
def _row_tiles(query_len, shape):
    """Return the tiles of rows of a query."""
    rows = query_len * shape.GROUP
    return tl.where(rows <= shape.SMALL, tl.cdiv(rows, shape.SMALL), tl.cdiv(rows, shape.LARGE))


@triton.jit
def _weigh(run_R, begin, shape):
    """Return the keys of runs as whole tiles from key `begin` on, and the tiles that each run saves, if any.

    A run's sequences would each read its keys. It reads them once for each of its tiles of rows, and each of its
    sequences then merges one result more, which costs about as much as a tile.
    """
    first_R, last_R, least_R, tokens_R = run_R
    sequences_R = last_R - first_R + 1
    end_R = tl.where(sequences_R > 1, least_R // shape.BLOCK_N * shape.BLOCK_N, begin)
    row_tiles_R = _row_tiles(tokens_R, shape)
    saved_R = (sequences_R - row_tiles_R) * ((end_R - begin) // shape.BLOCK_N)
    saved_R -= row_tiles_R * UNIT_COST + sequences_R
    return end_R, tl.where(sequences_R > 1, tl.maximum(saved_R, 0), 0)


@triton.jit
def _find_levels(query_start_loc, shared, num_seqs, shape, SEQS: tl.constexpr):
    """Return the runs of both levels and what they save.

    The values are, for each sequence and level, the end of the run's keys (0 where there is no run that pays), and the
    run's tokens, at its first sequence (0 elsewhere); then the tiles that all runs save.
    """
    seq_R = tl.arange(0, SEQS)
    shared_R = tl.load(shared + seq_R, mask=seq_R < num_seqs, other=0)
    next_R = tl.load(shared + seq_R + 1, mask=seq_R + 1 < num_seqs, other=0)
    first_R, last_R, least_R = find_runs(shared_R, shared_R >= MIN_SHARED, next_R >= MIN_SHARED)
    inside_R = last_R < num_seqs
    tokens_R = tl.load(query_start_loc + last_R + 1, mask=inside_R, other=0)
    tokens_R -= tl.load(query_start_loc + first_R, mask=inside_R, other=0)
    end_R, saved_R = _weigh((first_R, last_R, least_R, tokens_R), seq_R * 0, shape)
    heads_R = (first_R == seq_R) & (saved_R > 0)

    # A run of a longer prefix lies inside one run, all of whose sequences have the same end.
    longer_R = end_R + MIN_SHARED
    first2_R, last2_R, least2_R = find_runs(shared_R, shared_R >= longer_R, next_R >= longer_R)
    end_R = tl.where(saved_R > 0, end_R, 0)
    tokens2_R = tl.load(query_start_loc + last2_R + 1, mask=inside_R, other=0)
    tokens2_R -= tl.load(query_start_loc + first2_R, mask=inside_R, other=0)
    end2_R, saved2_R = _weigh((first2_R, last2_R, least2_R, tokens2_R), end_R, shape)
    heads2_R = (first2_R == seq_R) & (saved2_R > 0)
    end2_R = tl.where(saved2_R > 0, end2_R, 0)
    saved = tl.sum(tl.where(heads_R, saved_R, 0)) + tl.sum(tl.where(heads2_R, saved2_R, 0))
    return end_R, tl.where(heads_R, tokens_R, 0), end2_R, tl.where(heads2_R, tokens2_R, 0), saved


@triton.jit
def _at(is_PR, values_R):
    """Return each program's value, of the sequence in which its range begins."""
    return tl.sum(tl.where(is_PR, values_R[None, :], 0), 1)


@triton.jit(do_not_specialize=["num_seqs", "max_query_len", "divide"])
def _plan_kernel(
    query_start_loc,
    seq_lens,
    shared,
    records,
    sequences,
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
    PDL: tl.constexpr,
):
    """Write AT_ONCE records a program. Each program sums the batch itself, which is faster than waiting for another."""
    SHAPE: tl.constexpr = _Shape(GROUP, SMALL, LARGE, BLOCK_N, LEFT)
    if PDL:
        tl_cuda.gdc_wait()
    seq_R = tl.arange(0, SEQS)
    valid_R = seq_R < num_seqs
    begin_R = tl.load(query_start_loc + seq_R, mask=valid_R, other=0)
    len_R = tl.load(query_start_loc + seq_R + 1, mask=valid_R, other=0) - begin_R
    keys_R = tl.load(seq_lens + seq_R, mask=valid_R, other=0)
    served_R = valid_R & (len_R >= 1) & (len_R <= max_query_len)
    # Ends and tokens of the runs of both levels; a sequence's own keys begin at the last end.
    end1_R, tokens1_R, end2_R, tokens2_R = seq_R * 0, seq_R * 0, seq_R * 0, seq_R * 0
    num_shared = num_seqs * 0
    if shared is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
        if tl.max(tl.load(shared + seq_R, mask=valid_R, other=0)) >= MIN_SHARED:
            ends_R, heads_R, ends2_R, heads2_R, saved = _find_levels(query_start_loc, shared, num_seqs, SHAPE, SEQS)
            if saved * KV_HEADS >= _SHARING_COST * PROGRAMS:
                end1_R, tokens1_R, end2_R, tokens2_R = ends_R, heads_R, ends2_R, heads2_R
                num_shared = tl.sum((tokens1_R > 0).to(tl.int32) + (tokens2_R > 0).to(tl.int32))
    own_R = tl.maximum(end1_R, end2_R)
    _, _, tiles_R, units_R = sequence_chunks(len_R, keys_R, own_R, BLOCK_N, SHAPE)
    units_R = tl.where(served_R, units_R * KV_HEADS, 0)
    # No tokens have no tiles.
    tiles1_R, units1_R = end1_R // BLOCK_N, _row_tiles(tokens1_R, SHAPE) * KV_HEADS
    tiles2_R, units2_R = (own_R - end1_R) // BLOCK_N, _row_tiles(tokens2_R, SHAPE) * KV_HEADS
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
    # The smallest chunk that leaves no program two chunks: up to half above a fair share, but at most the number
    # of tiles that take as long as the end of a unit and the beginning of the next.
    most_R = tl.maximum(tl.where(served_R, tiles_R, 0), tl.maximum(tiles1_R, tiles2_R))
    least = tl.where(tl.max(most_R) > _MERGED, 2, 1)
    fair = tl.maximum(tl.cdiv(tl.sum(work_R), programs), least)
    size_C = fair + tl.cdiv(tl.minimum(fair, 2 * UNIT_COST) * tl.arange(0, 16), 32)
    chunks_C = tl.sum(tl.cdiv(tiles_R[None, :], size_C[:, None]) * units_R[None, :], 1)
    if num_shared > 0:
        chunks_C += tl.sum(tl.cdiv(tiles1_R[None, :], size_C[:, None]) * units1_R[None, :], 1)
        chunks_C += tl.sum(tl.cdiv(tiles2_R[None, :], size_C[:, None]) * units2_R[None, :], 1)
    size = tl.min(tl.where(chunks_C <= programs, size_C, _FAR))
    empty = tl.where(size == _FAR, UNIT_COST, 0)
    size = tl.where(size == _FAR, 1, size)

    # Entries of a sequence: the runs that begin with it, then its own.
    chunks1_R = (tl.cdiv(tiles1_R, size) + empty) * units1_R
    chunks2_R = (tl.cdiv(tiles2_R, size) + empty) * units2_R
    chunks_R = (tl.cdiv(tiles_R, size) + empty) * units_R + chunks1_R + chunks2_R
    first_R = tl.where(served_R, tl.cumsum(chunks_R) - chunks_R, _FAR)
    total = tl.sum(chunks_R)
    is1_R, is2_R = (tokens1_R > 0).to(tl.int32), (tokens2_R > 0).to(tl.int32)
    num_R = served_R.to(tl.int32) + is1_R + is2_R
    index_R = tl.cumsum(num_R) - num_R
    kind_R = (end1_R == 0).to(tl.int32) + 2 * (end2_R == 0).to(tl.int32)
    if tl.program_id(0) == 0:
        entry_R = sequences + index_R * SEQUENCE_WORDS
        if num_shared > 0:
            store_words(entry_R, (seq_R, begin_R, tokens1_R, end1_R, seq_R * 0 + FIRST_LEVEL), is1_R > 0)
            entry_R += is1_R * SEQUENCE_WORDS
            store_words(entry_R, (seq_R, begin_R, tokens2_R, end2_R, end1_R + SECOND_LEVEL), is2_R > 0)
            entry_R += is2_R * SEQUENCE_WORDS
        store_words(entry_R, (seq_R, begin_R, len_R, keys_R, own_R + kind_R), served_R)

    program_P = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    exists_P = program_P < PROGRAMS
    ranges = total // programs * _RANGES + total % programs
    # Programs without a range begin at the end of the last one, and have no chunks there.
    start_P = tl.minimum(share_of(program_P, ranges)[2], total)
    before_PR = first_R[None, :] <= start_P[:, None]
    seq_P = tl.maximum(tl.max(tl.where(before_PR, seq_R[None, :], -1), 1), 0)
    first_P = tl.max(tl.where(before_PR, first_R[None, :], 0), 1)
    begin_P = tl.load(query_start_loc + seq_P)
    len_P = tl.load(query_start_loc + seq_P + 1) - begin_P
    keys_P = tl.load(seq_lens + seq_P)
    is_PR = seq_R[None, :] == seq_P[:, None]
    index_P = _at(is_PR, index_R)
    word_P = seq_P * 0 + ALONE
    before_P = start_P - first_P
    if num_shared > 0:
        chunks1_P, chunks2_P = _at(is_PR, chunks1_R), _at(is_PR, chunks2_R)
        end1_P, end2_P, own_P = _at(is_PR, end1_R), _at(is_PR, end2_R), _at(is_PR, own_R + kind_R)
        in1_P = before_P < chunks1_P
        in2_P = ~in1_P & (before_P < chunks1_P + chunks2_P)
        index_P += tl.where(in1_P, 0, (chunks1_P > 0).to(tl.int32))
        index_P += tl.where(in1_P | in2_P, 0, (chunks2_P > 0).to(tl.int32))
        before_P -= tl.where(in1_P, 0, chunks1_P + tl.where(in2_P, 0, chunks2_P))
        len_P = tl.where(in1_P, _at(is_PR, tokens1_R), tl.where(in2_P, _at(is_PR, tokens2_R), len_P))
        keys_P = tl.where(in1_P, end1_P, tl.where(in2_P, end2_P, keys_P))
        word_P = tl.where(in1_P, FIRST_LEVEL, tl.where(in2_P, end1_P + SECOND_LEVEL, own_P))
    _, _, chunks_P, _ = sequence_chunks(len_P, keys_P, word_P // PACKED * PACKED, size * BLOCK_N, SHAPE)
    # Chunks of the sequence and of the unit that belong to earlier programs, with empty ones.
    unit_P = before_P // (chunks_P + empty)
    chunk_P = before_P % (chunks_P + empty)
    record_P = records + program_P * RECORD_WORDS
    first_chunk_P = (unit_P * chunks_P + tl.maximum(chunk_P - empty, 0)) * PACKED + tl.maximum(empty - chunk_P, 0)
    chunk_keys_P = size * BLOCK_N + empty + program_P * 0
    ranges_P = tl.where(program_P < programs, ranges, 0)
    record = index_P, first_chunk_P, chunk_keys_P, ranges_P, seq_P, begin_P, len_P, keys_P, word_P
    store_words(record_P, record, exists_P)
    if PDL:
        _fence()


@triton.jit
def _fence():
    """Make this thread's writes visible to the whole GPU."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
