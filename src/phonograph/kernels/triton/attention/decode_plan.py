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

    chunks    | e e 0 0 0 0 0 0 | e e 1 1 1 | e e 2 2 2 2 |    e: empty, a number: unit
    programs  |   p0    |   p1    |   p2    |   p3  |          equal ranges, empty chunks included
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.attention_scratch import (
    DECODE_PROGRAMS,
    SHORTEST_PIECE,
    decode_partials,
    key_tile,
    prefill_rows,
    row_tiles,
)
from phonograph.kernels.triton.attention.plan_words import load_words, store_words
from phonograph.kernels.triton.launch.pdl import pdl_options

RECORD_WORDS = tl.constexpr(8)
SEQUENCE_WORDS = tl.constexpr(4)
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
UNIT_COST = tl.constexpr(2)
# Largest number of tiles of a unit for which a chunk may be one tile. A program merges about that many results at a
# time, and merging more takes longer than a second tile.
_MERGED = tl.constexpr(8)
# More than UNIT_COST; divides the keys of any chunk. A smaller number shares a word with a multiple of this.
PACKED = tl.constexpr(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Work of one step, and scratch for its layers: tensors that live as long as any graph.

    records [P, 8]:    by program: entry in `sequences`, chunk in that sequence (and empty ones before it in the range),
                       keys of a chunk (and empty chunks before each unit), chunks of a range (and the number of ranges
                       with one more), then the entry itself
    sequences [R, 4]:  the served sequences, in order: sequence, first token, query length, keys
    counters [P]:      partial results that have arrived of the unit that begins in this program and ends in another;
                       zero between launches
    partial_out [2P, rows, D], partial_lse [2P, rows]: results of a range's first and last unit where these are cut; D
                       rounded up to a power of two, LSE in base 2
    block_n:           keys in a tile
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


def make_decode_plan(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_num_seqs: int,
    num_sms: int,
    device: torch.device,
) -> DecodePlan:
    """Make the persistent tensors for batches of up to `max_num_seqs` sequences."""
    group = num_query_heads // num_kv_heads
    slots, rows, width = decode_partials(group, head_size, num_sms)
    programs = DECODE_PROGRAMS * num_sms
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    return DecodePlan(
        records=ints(programs, RECORD_WORDS.value),
        # One more, because the entry after the last is read, though not used.
        sequences=ints(triton.next_power_of_2(max_num_seqs) + 1, SEQUENCE_WORDS.value),
        counters=ints(programs),
        partial_out=torch.zeros(slots, rows, width, dtype=torch.float32, device=device),
        partial_lse=torch.zeros(slots, rows, dtype=torch.float32, device=device),
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        programs=programs,
        block_n=key_tile(width),
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
) -> None:
    """Write the ranges of the sequences with 1 to `max_query_len` queries; one launch.

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
    """
    assert plan.programs <= _RANGES.value
    seqs = plan.sequences.shape[0] - 1
    at_once = max(2, min(8, 8192 // seqs))
    small, large = row_tiles(plan.group, plan.partial_out.shape[2])
    _plan_kernel[(triton.cdiv(plan.programs, at_once),)](
        query_start_loc,
        seq_lens,
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
def sequence_chunks(query_len, seq_len, chunk, shape):
    """Return a sequence's first visible key, first key of the first chunk, chunks (at least one) and tiles of rows."""
    low = seq_len * 0
    if shape.LEFT >= 0:
        low = tl.minimum(tl.maximum(seq_len - query_len - shape.LEFT, 0), seq_len)
    start = low // shape.BLOCK_N * shape.BLOCK_N
    chunks = tl.maximum(tl.cdiv(seq_len - start, chunk), 1)
    rows = query_len * shape.GROUP
    tiles = tl.where(rows <= shape.SMALL, tl.cdiv(rows, shape.SMALL), tl.cdiv(rows, shape.LARGE))
    return low, start, chunks, tiles


@triton.jit
def read_record(records, program):
    """Return a program's record, unpacked.

    The values are its entry in `sequences`, chunk there, empty chunks before it and before each unit, keys of a chunk,
    the word of `share_of`, then the entry itself.
    """
    record = records + program * RECORD_WORDS
    index, chunk, chunk_keys, ranges, seq, query_start, query_len, seq_len = load_words(record, RECORD_WORDS)
    first_chunk, lead = chunk // PACKED, chunk % PACKED
    empty, chunk_keys = chunk_keys % PACKED, chunk_keys // PACKED * PACKED
    return index, first_chunk, lead, empty, chunk_keys, ranges, seq, query_start, query_len, seq_len


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


@triton.jit(do_not_specialize=["num_seqs", "max_query_len", "divide"])
def _plan_kernel(
    query_start_loc,
    seq_lens,
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
    _, _, tiles_R, units_R = sequence_chunks(len_R, keys_R, BLOCK_N, SHAPE)
    units_R = tl.where(served_R, units_R * KV_HEADS, 0)
    programs = PROGRAMS
    if multiprocessors is not None:
        SMS: tl.constexpr = PROGRAMS // EACH
        MOST: tl.constexpr = SMS - (SMS + 15) // 16
        short = tl.sum((tiles_R * units_R).to(tl.float32)) * (BLOCK_N / KV_HEADS)
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
    least = tl.where(tl.max(tl.where(served_R, tiles_R, 0)) > _MERGED, 2, 1)
    fair = tl.maximum(tl.cdiv(tl.sum(tiles_R * units_R), programs), least)
    size_C = fair + tl.cdiv(tl.minimum(fair, 2 * UNIT_COST) * tl.arange(0, 16), 32)
    chunks_C = tl.sum(tl.cdiv(tiles_R[None, :], size_C[:, None]) * units_R[None, :], 1)
    size = tl.min(tl.where(chunks_C <= programs, size_C, _FAR))
    empty = tl.where(size == _FAR, UNIT_COST, 0)
    size = tl.where(size == _FAR, 1, size)

    chunks_R = (tl.cdiv(tiles_R, size) + empty) * units_R
    first_R = tl.where(served_R, tl.cumsum(chunks_R) - chunks_R, _FAR)
    total = tl.sum(chunks_R)
    if tl.program_id(0) == 0:
        entry_R = sequences + (tl.cumsum(served_R.to(tl.int32)) - 1) * SEQUENCE_WORDS
        store_words(entry_R, (seq_R, begin_R, len_R, keys_R), served_R)

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
    keys_P = tl.load(seq_lens + seq_P)
    _, _, chunks_P, _ = sequence_chunks(len_P, keys_P, size * BLOCK_N, SHAPE)
    # Chunks of the sequence and of the unit that belong to earlier programs, with empty ones.
    before_P = start_P - first_P
    unit_P = before_P // (chunks_P + empty)
    chunk_P = before_P % (chunks_P + empty)
    record_P = records + program_P * RECORD_WORDS
    first_chunk_P = (unit_P * chunks_P + tl.maximum(chunk_P - empty, 0)) * PACKED + tl.maximum(empty - chunk_P, 0)
    chunk_keys_P = size * BLOCK_N + empty + program_P * 0
    ranges_P = tl.where(program_P < programs, ranges, 0)
    record = index_P, first_chunk_P, chunk_keys_P, ranges_P, seq_P, begin_P, len_P, keys_P
    store_words(record_P, record, exists_P)
    if PDL:
        _fence()


@triton.jit
def _fence():
    """Make this thread's writes visible to the whole GPU."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
