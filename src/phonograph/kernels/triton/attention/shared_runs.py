"""Prefixes that neighbouring sequences of a batch share, found on the device.

Shapes: R sequences of the batch; N entries of a block table.

Two sequences share the keys of their leading pages, as far as these are equal in all KV groups with this plan. The
scheduler places sequences that share pages next to each other in the batch. That order is a hint: only the block tables
decide here.
1. `compare_tables` writes for each sequence how many keys it shares with the one before. A page counts only if both
   sequences had computed all of it before this step, so no page is shared in which a sequence still writes.
2. `find_runs`, a part of the plan of `decode_attention`, makes two levels of *runs* of these numbers. A run of level 1
   is a maximal range of neighbours that share MIN_SHARED keys or more. A run of level 2 is a range inside it whose
   sequences share MIN_SHARED keys more than all of the run do. The length of a run is what all its sequences share.
3. A run is attended once where that saves more tiles of keys than it costs (`decode_plan`).

    shared      |  0   9k   9k   2k   9k |  0 |  0   5k |     keys shared with the sequence before
    level 1     |          2k            |    |    5k   |
    level 2     |    9k       |    9k    |    |         |     from key 2k on
    sequences   |  0    1    2 |  3    4 |  5 |  6    7 |     each attends alone to the keys after the last level

With a window, two sequences share the keys from the first that all queries of both see. Pages before it are not
compared, as they may have been freed. A run begins with the first whole tile of keys that all its queries see.
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.attention_scratch import MIN_SHARED as LEAST_SHARED
from phonograph.kernels.attention_scratch import PREFILL_ROWS, SHORTEST_PIECE
from phonograph.kernels.triton.attention.plan_words import store_words
from phonograph.kernels.triton.attention.prefill_plan import ENTRY_WORDS, KEY_STEP
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

MIN_SHARED = tl.constexpr(LEAST_SHARED)
_FAR = tl.constexpr(2147483647)
_ROWS = tl.constexpr(PREFILL_ROWS)
_LEAST_PIECE = tl.constexpr(SHORTEST_PIECE)
# Cost of starting and ending a piece of a cut tile, in keys.
_PIECE_COST = tl.constexpr(128)
# Items that a program writes at a time.
_WRITTEN = tl.constexpr(8)
# Block ids of two sequences that a program compares at a time.
_COMPARED = 1024


def compare_tables(
    shared: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: tuple[torch.Tensor, ...],
    *,
    block_size: int,
    max_query_len: int,
    max_tokens: int,
    lows: torch.Tensor | None = None,
    left: int = -1,
) -> None:
    """Write the number of keys that each sequence shares with the one before; one launch.

    Args:
        shared: receives them, [>= R] int32; 0 where one of both has no query, or one that is not served here
        query_start_loc: [R+1] int32, cumulative query lengths
        seq_lens: [R] int32, keys of each sequence, the queries' own included
        block_tables: each [R, N] int32, rows contiguous and of one stride. Keys are shared whose pages are equal in all
        block_size: keys of a page
        max_query_len: longest query served
        max_tokens: sequences with later tokens share nothing
        lows: with a window receives the first key that all queries of both sequences see, [>= R] int32. Of two that
            have less than MIN_SHARED equal keys from there on, `shared` is 0
        left: keys before a query that it sees; -1 for all
    """
    _compare_kernel[(seq_lens.shape[0],)](
        shared,
        query_start_loc,
        seq_lens,
        block_tables,
        block_tables[0].stride(0),
        max_query_len,
        max_tokens,
        lows,
        LEFT=left,
        BLOCK_SIZE=block_size,
        BLOCK=_COMPARED,
        **pdl_options(),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["max_query_len", "max_tokens"])
def _compare_kernel(
    shared,
    query_start_loc,
    seq_lens,
    block_tables,
    stride_table,
    max_query_len,
    max_tokens,
    lows,
    LEFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r compares sequences r - 1 and r."""
    pdl_begin(PDL)
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    begin_before = tl.load(query_start_loc + before)
    begin = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    len_before, query_len = begin - begin_before, end - begin
    context = tl.minimum(tl.load(seq_lens + before) - len_before, tl.load(seq_lens + row) - query_len)
    joins = (query_len >= 1) & (query_len <= max_query_len) & (len_before >= 1) & (len_before <= max_query_len)
    pages = tl.where(joins & (row > 0) & (end <= max_tokens), tl.maximum(context, 0) // BLOCK_SIZE, 0)
    equal = pages
    low_page = 0
    if LEFT >= 0:
        keys = tl.maximum(tl.load(seq_lens + before), tl.load(seq_lens + row))
        low = tl.maximum(keys - 1 - LEFT, 0)
        tl.store(lows + row, low)
        low_page = low // BLOCK_SIZE
    for number in tl.static_range(len(block_tables)):
        table_before = block_tables[number] + before.to(tl.int64) * stride_table
        table = block_tables[number] + row.to(tl.int64) * stride_table
        first = low_page
        while first < equal:
            column = first + tl.arange(0, BLOCK)
            inside = column < pages
            id_before = tl.load(table_before + column, mask=inside, other=0)
            block_id = tl.load(table + column, mask=inside, other=0)
            equal = tl.minimum(equal, tl.min(tl.where(id_before == block_id, _FAR, column)))
            first += BLOCK
    if LEFT >= 0:
        equal = tl.where(equal * BLOCK_SIZE - low >= MIN_SHARED, equal, 0)
    tl.store(shared + row, equal * BLOCK_SIZE)


@triton.jit
def _scan_run(least_a, end_a, ends_a, least_b, end_b, ends_b):
    """Continue a run from `a` to its next sequence `b`, or begin another one at `b`."""
    restarts = ends_b != 0
    least = tl.where(restarts, least_b, tl.minimum(least_a, least_b))
    return least, tl.where(restarts, end_b, end_a), ends_a | ends_b


@triton.jit
def find_runs(shared_R, joins_R, joins_next_R):
    """Return first and last sequence of each sequence's run, and the keys that all of the run share.

    A sequence joins the run of the one before where `joins_R`; `joins_next_R` is the same of the sequence after. A run
    of one sequence shares more keys than there are.
    """
    seq_R = tl.arange(0, shared_R.shape[0])
    least_R = tl.where(joins_R, shared_R, _FAR)
    forward_R, first_R, _ = tl.associative_scan((least_R, seq_R, (~joins_R).to(tl.int32)), 0, _scan_run)
    backward_R, last_R, _ = tl.associative_scan(
        (least_R, seq_R, (~joins_next_R).to(tl.int32)), 0, _scan_run, reverse=True
    )
    return first_R, last_R, tl.minimum(forward_R, backward_R)


@triton.jit
def store_items(header, items, level1, level2, query_start_loc, GROUP: tl.constexpr, CONSTANTS: tl.constexpr):
    """Write the tiles of all runs for the launch for long queries, cut into pieces of keys where that ends earlier.

    All tiles have pieces of at most one length: of 16 candidates the one whose rounds of pieces end first.

    Args:
        header: receives the number of items.
        items: receives the entries; see `PrefixItems`.
        level1: for each sequence rows of the run that begins with it (0 if none does), first key and end of its run.
        level2: the same of the second level.
        query_start_loc: [R+1].
        GROUP: query heads of a KV head.
        CONSTANTS: KV heads, multiprocessors, items at most, slots.

    Returns:
        For each level the first slot of the run that begins with a sequence, and the pieces of a tile of its run.
    """
    KV_HEADS: tl.constexpr = CONSTANTS[0]
    SMS: tl.constexpr = CONSTANTS[1]
    rows1_R, low1_R, end1_R = level1
    rows2_R, low2_R, end2_R = level2
    seq_R = tl.arange(0, rows1_R.shape[0])
    keys1_R, keys2_R = end1_R - low1_R, end2_R - low2_R
    tiles1_R, tiles2_R = tl.cdiv(rows1_R, _ROWS), tl.cdiv(rows2_R, _ROWS)
    work = tl.sum(tiles1_R.to(tl.float32) * keys1_R + tiles2_R.to(tl.float32) * keys2_R)
    longest = tl.max(tl.maximum(keys1_R, keys2_R))
    number_C = tl.arange(0, 16)
    even_C = work * KV_HEADS / SMS * (1 + number_C.to(tl.float32) / 8)
    length_C = tl.minimum(tl.maximum(tl.ceil(even_C).to(tl.int32), _LEAST_PIECE), longest)
    length_C = tl.where(number_C == 15, longest, length_C)
    pieces1_CR = tl.cdiv(keys1_R[None, :], length_C[:, None])
    pieces2_CR = tl.cdiv(keys2_R[None, :], length_C[:, None])
    cut1_CR = tl.where(pieces1_CR > 1, pieces1_CR * tiles1_R[None, :], 0)
    cut_C = tl.sum(cut1_CR + tl.where(pieces2_CR > 1, pieces2_CR * tiles2_R[None, :], 0), 1)
    count_C = tl.sum(pieces1_CR * tiles1_R[None, :] + pieces2_CR * tiles2_R[None, :], 1)
    size1_CR = tl.cdiv(keys1_R[None, :], tl.maximum(pieces1_CR, 1))
    size_C = tl.max(tl.maximum(size1_CR, tl.cdiv(keys2_R[None, :], tl.maximum(pieces2_CR, 1))), 1)
    mean_C = work / tl.maximum(count_C, 1).to(tl.float32)
    time_C = tl.maximum(tl.cdiv(count_C * KV_HEADS, SMS) * (mean_C + _PIECE_COST), size_C.to(tl.float32) + _PIECE_COST)
    time_C = tl.where((cut_C <= CONSTANTS[3]) | (number_C == 15), time_C, float("inf"))
    length = tl.max(tl.where(number_C == tl.argmin(time_C, 0), length_C, 1))

    pieces1_R, pieces2_R = tl.cdiv(keys1_R, length), tl.cdiv(keys2_R, length)
    count1_R, count2_R = tiles1_R * pieces1_R, tiles2_R * pieces2_R
    cut1_R, cut2_R = tl.where(pieces1_R > 1, count1_R, 0), tl.where(pieces2_R > 1, count2_R, 0)
    first_R = tl.cumsum(count1_R + count2_R) - count1_R - count2_R
    slot1_R = tl.cumsum(cut1_R + cut2_R) - cut1_R - cut2_R
    slot2_R = slot1_R + cut1_R
    total = tl.sum(count1_R + count2_R)
    if tl.program_id(0) == 0:
        tl.store(header, total)
    for begin in range(tl.program_id(0) * _WRITTEN, total, tl.num_programs(0) * _WRITTEN):
        item_E = begin + tl.arange(0, _WRITTEN)
        before_ER = (first_R[None, :] <= item_E[:, None]) & (count1_R + count2_R > 0)[None, :]
        seq_E = tl.maximum(tl.max(tl.where(before_ER, seq_R[None, :], -1), 1), 0)
        is_ER = seq_R[None, :] == seq_E[:, None]
        local_E = item_E - _at(is_ER, first_R)
        of1_E = _at(is_ER, count1_R)
        second_E = local_E >= of1_E
        local_E -= tl.where(second_E, of1_E, 0)
        is1_ER, is2_ER = is_ER & ~second_E[:, None], is_ER & second_E[:, None]
        pieces_E = tl.maximum(_at(is1_ER, pieces1_R) + _at(is2_ER, pieces2_R), 1)
        low_E = _at(is1_ER, low1_R) + _at(is2_ER, low2_R)
        end_E = _at(is1_ER, end1_R) + _at(is2_ER, end2_R)
        rows_E = _at(is1_ER, rows1_R) + _at(is2_ER, rows2_R)
        slot_E = _at(is1_ER, slot1_R) + _at(is2_ER, slot2_R) + local_E
        size_E = tl.cdiv(tl.cdiv(end_E - low_E, pieces_E), KEY_STEP) * KEY_STEP
        start_E = tl.minimum(low_E + local_E % pieces_E * size_E, end_E)
        stop_E = tl.minimum(start_E + size_E, end_E)
        slot_E = tl.where(pieces_E > 1, slot_E, -1 - second_E.to(tl.int32))
        exists_E = (item_E < total) & (item_E < CONSTANTS[2])
        start_of_E = tl.load(query_start_loc + seq_E)
        span = seq_E, local_E // pieces_E, start_E, stop_E, slot_E, start_of_E, rows_E // GROUP, end_E
        store_words(items + item_E * ENTRY_WORDS, span, exists_E)
    return tl.where(rows1_R > 0, slot1_R, 0), pieces1_R, tl.where(rows2_R > 0, slot2_R, 0), pieces2_R


@triton.jit
def _at(is_ER, values_R):
    """Return each item's value, of the sequence with which its run begins."""
    return tl.sum(tl.where(is_ER, values_R[None, :], 0), 1)
