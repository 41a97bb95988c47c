"""Attention of short queries (decodes, with or without drafts) over the paged cache, in one launch.

Shapes: T tokens, R sequences, H query heads, K KV heads, D head size, B blocks of S slots; M rows of a tile, which are
(token, query head of one KV head), heads innermost; N keys of a tile.

Algorithm: split keys with a merge by LSE (Flash-Decoding, Dao et al., 2023), divided as in Stream-K (Osama et al.,
2023).
1. Decode is bound by reading the cache. `plan_decode` lays the keys of the batch end to end, unit after unit (sequence,
   KV head, tile of rows), and gives each program a range that takes equally long.
2. A program runs the online softmax of `tile` over each unit of its range, and writes the rows of whole units.
3. A unit that is cut between programs leaves normalized partial results with their LSE.
4. The program that completes the unit merges them in the order of their keys: without a second launch, and with a
   result that does not depend on which program comes last. Where few units are each cut between many programs, these
   wait for each other, and each merges other rows.
5. Prefixes that sequences share (`shared_runs`) come first: all programs attend them, as sequences with the queries of
   all that share them, and leave partial results. Then the programs wait for each other. The softmax of a sequence that
   shares begins with the partial results of its prefixes, in the order of their keys. With a window they lie amid the
   sequence's own keys, which then have a hole.

    units     |  sequence 0, KV head 0  | 0, 1 | 0, 2 |   1, 0   |   ...
    key tiles | t  t  t  t  t  t  t  t  | t  t | t  t | t  t  t  |
    programs  |   0   |   1   |     2     |     3     |     4    ...
                  unit (0, 0) is cut in three: programs 0, 1 and 2 leave partial results, and the last of them merges
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections import namedtuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.attention_scratch import PREFILL_ROWS, holds_all_programs, row_tiles
from phonograph.kernels.triton.attention.decode_plan import (
    PACKED,
    PREFIX_WORDS,
    RECORD_WORDS,
    SEQUENCE_WORDS,
    SHARES,
    DecodePlan,
    cut_of,
    empty_of,
    hole_of,
    programs_of,
    read_record,
    row_tiles_of,
    sequence_chunks,
    share_of,
)
from phonograph.kernels.triton.attention.fp8 import fp8_in_one_instruction, pairs_apart, rows_in_float16
from phonograph.kernels.triton.attention.plan_words import load_words
from phonograph.kernels.triton.attention.tile import (
    LOG2_E,
    add_sink,
    in_window,
    merge_parts,
    normalize,
    score,
    softmax_step,
    store_rows,
    token_and_head,
)
from phonograph.kernels.triton.launch.pdl import pdl_options, pdl_wait_if
from phonograph.kernels.triton.launch.shared_memory import shared_memory

# Values per warp that a merge has in flight; they limit how many programs' results it reads at once.
_MERGE_VALUES = 2048
# Number of programs for each sequence and KV head from which the programs of a unit merge its rows together. With two
# programs, the wait for each other takes longer than one needs to merge the rows.
_TOGETHER_FROM = 4
# Upper bounds of the bytes of keys and values that a program has in flight, with and without a large tile of queries in
# shared memory. Each leaves room for exactly two programs on a multiprocessor. With room for three, some
# multiprocessors would get three and some one, because a program starts where one of the previous kernel ends.
_IN_FLIGHT = 80 * 1024, 96 * 1024
# Upper bound of the other bytes of shared memory.
_OTHER_BYTES = 19 * 1024
_MAX_STAGES = 6
_NUM_WARPS = 4
# Keys of each program that are prefetched into the L2 cache before the launch may begin.
_AHEAD = 64
# Prefixes that are attended once, own keys, and both with a wait between them. The interpreter runs one program after
# the other, so that no program can wait there.
_SHARED, _OWN, _BOTH = 1, 2, 3
_ITEM_ROWS = tl.constexpr(PREFILL_ROWS)


def decode_attention(
    plan: DecodePlan,
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    causal: bool,
    max_query_len: int,
    in_tiles: bool = False,
    overlaps_prefill: bool = False,
) -> None:
    """Attend the queries of the planned sequences to their keys; padding rows get zeros and an LSE of -inf.

    Rows of sequences that the plan does not serve stay as they are.

    Args:
        plan: of these sequences and this window
        query_THD: heads and head size contiguous, tokens at any stride
        kv_cache: [2, B, S, K, D], keys and values, at any strides but contiguous in D; S a multiple of 16
        block_table: [R, max blocks] int32, rows contiguous
        query_start_loc: [R+1] int32
        seq_lens: [R] int32
        out_THD: contiguous
        lse_HT: [H, T] float32, natural logarithm, or None
        scale: factor of the logits, above 0
        window: (left, right) keys before and after the query; -1 for no bound
        softcap: of the scaled logits; 0 for none
        alibi_slopes: [H] float32, of the bias added last, or None
        sinks: [H] float32, or None; a sink joins the denominator and the LSE
        k_scale: [K] float32 factors of FP8 keys, or None
        v_scale: [K] float32 factors of FP8 values, or None
        causal: a query sees no key after its own
        max_query_len: longest query that the plan serves
        in_tiles: as in `plan_decode`
        overlaps_prefill: the previous launch is `prefill_attention`, and may run at the same time (`prefill_overlaps`)
    """
    width = plan.partial_out.shape[2]
    shares = plan.prefixes_of(seq_lens.shape[0], max_query_len)
    small, large = row_tiles(plan.group, width, shares=shares is not None)
    few_rows = min(max(4, 512 // width), plan.partial_out.shape[1])
    merge_rows = few_rows if plan.group <= 4 else min(max(8, 512 // width), plan.partial_out.shape[1])
    merge_together = plan.programs >= _TOGETHER_FROM * plan.num_kv_heads * seq_lens.shape[0]
    one_tile = max_query_len * plan.group <= small
    items = shares.items if shares is not None and in_tiles else None
    largest = small if one_tile and (shares is None or items is not None) else large
    in_flight = min(_IN_FLIGHT[largest <= 16], shared_memory() - _OTHER_BYTES)
    if query_THD.element_size() > 2 * kv_cache.element_size():
        in_flight //= 2  # FP8 in float32 takes the other half
    stages = 1 + in_flight // (2 * plan.block_n * width * kv_cache.element_size())
    stride_kv, stride_block, stride_slot, stride_head, _ = kv_cache.stride()
    prefixes, arrivals, shared_tokens, item_row = None, None, 0, 0
    phases: tuple[int, ...] = (_OWN,)
    if shares is not None:
        prefixes, arrivals, shared_tokens = shares.words, shares.arrivals, shares.num_tokens
        phases = (_SHARED, _OWN) if knobs.runtime.interpret else (_BOTH,)
        if items is not None:
            # Imported here, because other versions of Triton lack parts of Gluon.
            from phonograph.kernels.triton.attention.prefill_hopper import attend_prefixes_on_hopper

            attend_prefixes_on_hopper(plan, query_THD, kv_cache, block_table, scale=scale)
            phases, item_row = (_OWN,), items.first_row
    for phase in phases:
        _attention_kernel[(plan.programs,)](
            query_THD,
            kv_cache,
            block_table,
            query_start_loc,
            out_THD,
            lse_HT,
            alibi_slopes,
            sinks,
            k_scale,
            v_scale,
            plan.records,
            plan.sequences,
            plan.counters,
            plan.partial_out,
            plan.partial_lse,
            prefixes,
            arrivals,
            query_THD.shape[0],
            seq_lens.shape[0],
            stride_kv,
            block_table.stride(0),
            lse_HT.stride(0) if lse_HT is not None else 0,
            scale,
            softcap,
            int(overlaps_prefill),
            int(merge_together),
            PHASES=phase,
            ONE_TILE=one_tile,
            SHARED_TOKENS=shared_tokens,
            ITEM_ROW=item_row,
            PROGRAMS=plan.programs,
            KV_HEADS=plan.num_kv_heads,
            GROUP=plan.group,
            HEAD_SIZE=plan.head_size,
            WIDTH=width,
            STRIDE_TOKEN=query_THD.stride(0),
            STRIDE_BLOCK=stride_block,
            STRIDE_SLOT=stride_slot,
            STRIDE_HEAD=stride_head,
            BLOCK_SIZE=kv_cache.shape[2],
            SMALL=small,
            LARGE=large,
            SCRATCH_ROWS=plan.partial_out.shape[1],
            BLOCK_N=plan.block_n,
            LEFT=window[0],
            RIGHT=0 if causal else window[1],
            SOFTCAP=softcap != 0.0,
            MERGE_ROWS=merge_rows,
            FEW_ROWS=few_rows if _may_wait() and max_query_len * plan.group > few_rows else 0,
            MERGED=_MERGE_VALUES * _NUM_WARPS,
            STAGES=min(max(stages, 2), _MAX_STAGES),
            AHEAD=_AHEAD,
            FP8_AT_ONCE=fp8_in_one_instruction(),
            **pdl_options(),
            num_warps=_NUM_WARPS,
        )


@functools.cache
def _may_wait() -> bool:
    """Return True if programs may wait for each other, because all run at once. Without a GPU, that is Hopper.

    The interpreter runs one after the other.
    """
    on_gpu = torch.cuda.is_available()
    return not knobs.runtime.interpret and (not on_gpu or holds_all_programs(torch.cuda.get_device_capability()))


# Operands of the kernel, with their strides and factors.
_Tensors = namedtuple(
    "_Tensors",
    "query_THD cache block_table out_THD lse_HT alibi_slopes sinks k_scale v_scale counters partial_out partial_lse "
    "prefixes stride_kv stride_table stride_lse scale softcap merge_together",
)
# A program's keys of one unit: `first` and `last` are the programs that have keys of the unit, `slot` and `first_slot`
# the partial results of this one and of the first. `kind` is the level of a prefix, and SHARES for the first own keys
# after a prefix. `first_key` and `key_end` do not count the `hole` keys from `hole_begin` on (`_skip_hole`).
_Unit = namedtuple(
    "_Unit",
    "seq query_start query_len seq_len kind low kv_head row_tile first_key key_end hole_begin hole first last slot "
    "first_slot",
)
# Constants of the kernel.
_Shape = namedtuple(
    "_Shape",
    "KV_HEADS GROUP SMALL LARGE ONE_TILE HEAD_SIZE WIDTH STRIDE_TOKEN STRIDE_BLOCK STRIDE_SLOT STRIDE_HEAD BLOCK_SIZE "
    "SCRATCH_ROWS SHARED_TOKENS ITEM_ROW PROGRAMS BLOCK_N LEFT HOLES RIGHT SOFTCAP MERGE_ROWS FEW_ROWS MERGED STAGES "
    "FP8_AT_ONCE",
)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "stride_lse", "overlaps_prefill", "merge_together"])
def _attention_kernel(
    query_THD,
    cache,
    block_table,
    query_start_loc,
    out_THD,
    lse_HT,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    records,
    sequences,
    counters,
    partial_out,
    partial_lse,
    prefixes,
    arrivals,
    num_tokens,
    num_seqs,
    stride_kv,
    stride_table,
    stride_lse,
    scale,
    softcap,
    overlaps_prefill,
    merge_together,
    PHASES: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SHARED_TOKENS: tl.constexpr,
    ITEM_ROW: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    SCRATCH_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    FP8_AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    # The plan and the block table are complete before this kernel's predecessor has ended (`plan_decode`).
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tensors = _Tensors(
        query_THD, cache, block_table, out_THD, lse_HT, alibi_slopes, sinks, k_scale, v_scale, counters,
        partial_out, partial_lse, prefixes, stride_kv, stride_table, stride_lse, scale, softcap, merge_together,
    )  # fmt: skip
    SHAPE: tl.constexpr = _Shape(
        KV_HEADS, GROUP, SMALL, LARGE, ONE_TILE, HEAD_SIZE, WIDTH, STRIDE_TOKEN, STRIDE_BLOCK, STRIDE_SLOT,
        STRIDE_HEAD, BLOCK_SIZE, SCRATCH_ROWS, SHARED_TOKENS, ITEM_ROW, PROGRAMS, BLOCK_N, LEFT,
        LEFT >= 0 and SHARED_TOKENS > 0, RIGHT, SOFTCAP, MERGE_ROWS, FEW_ROWS, MERGED, STAGES, FP8_AT_ONCE,
    )  # fmt: skip
    program = tl.program_id(0)
    record = read_record(records, program)
    if PHASES == 2 and prefixes is not None:
        record = read_record(records + tl.where(record[11] > 0, PROGRAMS * RECORD_WORDS, 0), program)
    _, chunk, lead, _, chunk_keys, ranges, seq, _, query_len, seq_len, first_word, together = record
    end = tl.load(query_start_loc + num_seqs)
    if PDL:
        share = share_of(program, ranges)
        if AHEAD > 0 and share[2] + lead < share[3]:
            # A first record of own keys has no hole, since nothing is shared.
            _, start, num_chunks, _, num_row_tiles = sequence_chunks(
                query_len, seq_len, first_word, chunk_keys, SHAPE, together > 0
            )
            base = cache + chunk // num_chunks // num_row_tiles * STRIDE_HEAD
            table = block_table + seq.to(tl.int64) * stride_table
            _prefetch(base, table, start + chunk % num_chunks * chunk_keys, seq_len, stride_kv, SHAPE, AHEAD)
        # A prefill at the same time has waited for its predecessors before it let this kernel start (`pdl_wait_first`).
        pdl_wait_if(overlaps_prefill == 0)
    # The first record is of shared prefixes, if there are any.
    if PHASES % 2:  # noqa: SIM102 (one is known when compiled, the other is not)
        if together > 0:
            _attend_range(tensors, sequences, record, program, SHAPE, SHARED=True)
            if PHASES == 3:
                _wait_for_programs(arrivals, together)
                record = read_record(records + PROGRAMS * RECORD_WORDS, program)
    if PHASES >= 2:
        _attend_range(tensors, sequences, record, program, SHAPE, SHARED=False)

    # Zero the padding rows.
    ROW: tl.constexpr = KV_HEADS * GROUP * HEAD_SIZE
    row = (end + program).to(tl.int64)
    while row < num_tokens:
        for column in range(0, ROW, 1024):
            offset = column + tl.arange(0, 1024)
            zeros = tl.zeros([1024], out_THD.dtype.element_ty)
            tl.store(out_THD + row * ROW + offset, zeros, mask=offset < ROW)
        if lse_HT is not None:
            for head in range(KV_HEADS * GROUP):
                tl.store(lse_HT + head * stride_lse.to(tl.int64) + row, float("-inf"))
        row += PROGRAMS

    # A dependent of this kernel also waits for the prefill.
    if PDL:
        pdl_wait_if(overlaps_prefill != 0)


@triton.jit
def _attend_range(tensors, sequences, record, program, shape, SHARED: tl.constexpr):
    """Attend the units of a program's range, from that of its record on: of shared prefixes, or of own keys."""
    index, chunk, lead, empty, chunk_keys, ranges, seq, query_start, query_len, seq_len, first_word, _ = record
    # `position` counts the chunks of the batch, `chunk` the sequence's chunks that have keys.
    share = share_of(program, ranges)
    position, stop = share[2] + lead, share[3]
    while position < stop:
        # Loaded early, used at the end.
        entry = sequences + (index + 1) * SEQUENCE_WORDS
        next_seq, next_start, next_len, next_keys, next_first = load_words(entry, SEQUENCE_WORDS)

        low, start, num_chunks, tile_rows, num_row_tiles = sequence_chunks(
            query_len, seq_len, first_word, chunk_keys, shape, SHARED
        )
        unit = chunk // num_chunks
        before = _empty_before(first_word, empty, shape, SHARED)
        key_chunk, taken, first, last, first_slot, slot = cut_of(position, chunk, share, program, num_chunks, before)
        kv_head = unit // num_row_tiles
        row_tile = unit % num_row_tiles
        key = start + key_chunk * chunk_keys
        hole_begin, hole = 0, 0
        if shape.HOLES and not SHARED:
            hole_begin, hole = hole_of(first_word, start, shape)
        key_end = tl.minimum(key + taken * chunk_keys, seq_len - hole)
        kind = first_word % PACKED
        if not SHARED:
            # The first of a sequence's keys follow its prefixes.
            kind = tl.where(key_chunk > 0, 0, kind)
        part_of_unit = _Unit(
            seq, query_start, query_len, seq_len, kind, low, kv_head, row_tile, key, key_end, hole_begin, hole, first,
            last, slot, first_slot,
        )  # fmt: skip
        # Each tile that a kernel has costs time where it is not used too (docs/notebook/shared-prefixes.md).
        if SHARED:
            complete = _attend_unit(tensors, part_of_unit, shape, shape.LARGE, SHARED)
        elif shape.ONE_TILE or shape.SMALL == shape.LARGE or tile_rows == shape.SMALL:  # noqa: PLR1714 (constants)
            complete = _attend_unit(tensors, part_of_unit, shape, shape.SMALL, SHARED)
        else:
            complete = _attend_unit(tensors, part_of_unit, shape, shape.LARGE, SHARED)
        if not SHARED:
            first_row = row_tile * tile_rows
            num_rows = tl.minimum(query_len * shape.GROUP - first_row, tile_rows)
            if shape.FEW_ROWS > 0:  # noqa: SIM102 (one is known when compiled, the other is not)
                # Where no program has two chunks, none is waited for that waits itself.
                if (tensors.merge_together != 0) & (first < last) & (empty == 0):
                    counter, parts = tensors.counters + first, last - first + 1
                    mergers = tl.minimum(parts, tl.cdiv(num_rows, shape.FEW_ROWS))
                    if program - first < mergers:
                        _wait_for_count(counter, tl.atomic_add(counter, 0), parts)
                        _merge_unit(
                            tensors, part_of_unit, shape, first_row, num_rows, program - first, mergers, shape.FEW_ROWS
                        )
                        if tl.atomic_add(counter, 1) == parts + mergers - 1:
                            tl.store(counter, 0)
                    complete = complete * 0
            if complete != 0:
                _merge_unit(tensors, part_of_unit, shape, first_row, num_rows, 0, 1, shape.MERGE_ROWS)
                tl.store(tensors.counters + first, 0)

        position += taken
        chunk += taken
        if chunk == num_chunks * num_row_tiles * shape.KV_HEADS:
            chunk = chunk * 0
            index += 1
            seq = next_seq
            query_start = next_start
            query_len = next_len
            seq_len = next_keys
            first_word = next_first
        position += _empty_before(first_word, empty, shape, SHARED)


@triton.jit
def _empty_before(word, empty, shape, SHARED: tl.constexpr):
    """Return the empty chunks before the units of an entry, in kernels of sequences that may share by `empty_of`."""
    if shape.SHARED_TOKENS and not SHARED:
        empty = empty_of(word, empty)
    return empty


@triton.jit
def _wait_for_programs(arrivals, count):
    """Wait until `count` programs have come here; all of them run at the same time.

    The first counter has those that have come, the second those that go on. The last of these sets both to zero.
    """
    # All threads have written before one of them counts the program.
    tl.debug_barrier()
    _wait_for_count(arrivals, tl.atomic_add(arrivals, 1) + 1, count)
    if tl.atomic_add(arrivals + 1, 1) == count - 1:
        tl.store(arrivals, 0)
        tl.store(arrivals + 1, 0)


@triton.jit
def _wait_for_count(counter, arrived, count):
    """Wait until a counter, which was at `arrived`, is at `count`."""
    while arrived < count:
        arrived = tl.atomic_add(counter, 0)


@triton.jit
def _prefetch(base, table, first_key, seq_len, stride_kv, shape, AHEAD: tl.constexpr):
    """Prefetch AHEAD keys and their values into the L2 cache, where a slot may still be written."""
    HEAD_SIZE: tl.constexpr = shape.HEAD_SIZE
    BLOCK_SIZE: tl.constexpr = shape.BLOCK_SIZE
    LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(HEAD_SIZE // LINE) if HEAD_SIZE > LINE else 1
    key_N = tl.maximum(tl.minimum(first_key + tl.arange(0, AHEAD), seq_len - 1), 0)
    block_N = tl.load(table + key_N // BLOCK_SIZE)
    slot_N = block_N.to(tl.int64) * shape.STRIDE_BLOCK + key_N % BLOCK_SIZE * shape.STRIDE_SLOT
    offset_L = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_SIZE - 1)
    pointer_NL = base + slot_N[:, None] + offset_L[None, :]
    for _ in tl.static_range(2):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer_NL], dtype=tl.int32, is_pure=False, pack=1
        )
        pointer_NL += stride_kv


@triton.jit
def _skip_hole(key, unit, HOLES: tl.constexpr):
    """Return the key at a place among a unit's keys; places do not count the keys of the hole."""
    if HOLES:
        key += tl.where(key >= unit.hole_begin, unit.hole, 0)
    return key


@triton.jit
def _attend_unit(tensors, unit, shape, BLOCK_M: tl.constexpr, SHARED: tl.constexpr):
    """Attend a unit's rows to its keys from `first_key` to `key_end`; write the result, or a partial one.

    Returns 1 if that was the last partial result of a unit of own keys, else 0.
    """
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_SIZE: tl.constexpr = shape.BLOCK_SIZE
    WIDTH: tl.constexpr = shape.WIDTH
    HEAD_SIZE: tl.constexpr = shape.HEAD_SIZE
    # All queries of a shared prefix see all of its keys.
    LEFT: tl.constexpr = -1 if SHARED else shape.LEFT
    HOLES: tl.constexpr = shape.HOLES and not SHARED
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    FP8: tl.constexpr = tensors.cache.dtype.element_ty.primitive_bitwidth == 8
    E5M2: tl.constexpr = tensors.cache.dtype.element_ty == tl.float8e5
    # Neighbouring FP8 values of a head are moved as one, and have a sum each. Not in Hopper's products of 64 rows for
    # heads of up to 64: keys and values then share an address with different swizzles, which ptxas 12.8 compiles
    # wrongly (tests/kernels/compile_for_hopper.py).
    PAIRS: tl.constexpr = FP8 and (BLOCK_M < 64 or WIDTH >= 128)
    ALIBI: tl.constexpr = tensors.alibi_slopes is not None
    dim = tl.arange(0, WIDTH)
    half = tl.arange(0, WIDTH // 2)
    row_M = unit.row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token_M, head_M = token_and_head(row_M, unit.kv_head, shape.GROUP)
    valid_M = token_M < unit.query_len
    # The queries of a shared prefix come after all of its keys.
    position_M = unit.seq_len + token_M
    if not SHARED:
        position_M -= unit.query_len
    offset_N = tl.arange(0, BLOCK_N)
    table = tensors.block_table + unit.seq.to(tl.int64) * tensors.stride_table
    # Block ids are read one tile ahead, so that no tile waits for them before it requests its keys.
    first_key = _skip_hole(unit.first_key, unit, HOLES)
    if ONE_BLOCK:
        next_block = tl.load(table + first_key // BLOCK_SIZE, mask=unit.first_key < unit.key_end, other=0)
    else:
        key_N = first_key + offset_N
        next_block = tl.load(table + key_N // BLOCK_SIZE, mask=(key_N >= unit.low) & (key_N < unit.seq_len), other=0)
    query = tensors.query_THD + unit.query_start.to(tl.int64) * shape.STRIDE_TOKEN
    mask_MD = valid_M[:, None] & (dim < HEAD_SIZE)[None, :]
    pointer_MD = query + (token_M * shape.STRIDE_TOKEN + head_M * HEAD_SIZE)[:, None] + dim[None, :]
    query_MD = tl.load(pointer_MD, mask_MD, 0.0)
    factor = tensors.scale
    if tensors.k_scale is not None:
        factor *= tl.load(tensors.k_scale + unit.kv_head)
    if FP8 and query_MD.dtype == tl.bfloat16:
        query_MD, power_M = rows_in_float16(query_MD)
        factor = (factor * power_M)[:, None]
    slope_M = None
    if ALIBI:
        slope_M = tl.load(tensors.alibi_slopes + head_M) * LOG2_E
    base = tensors.cache + unit.kv_head * shape.STRIDE_HEAD

    acc_MD = tl.zeros([BLOCK_M, WIDTH // 2 if PAIRS else WIDTH], tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    odd_MD = acc_MD
    if shape.SHARED_TOKENS and not SHARED and BLOCK_M == shape.SMALL:  # noqa: SIM102 (known when compiled)
        if unit.kind == SHARES:
            state_MD, sum_M, max_M = _after_prefixes(tensors, unit, shape, token_M, head_M, valid_M)
            # Both branches end in the layout of products' sums: else each unit would convert them, shared or not.
            sum_M = tl.max(_as_sums(sum_M[:, None] + acc_MD, query_MD.dtype), 1)
            max_M = tl.max(_as_sums(max_M[:, None] + acc_MD, query_MD.dtype), 1)
            if PAIRS:
                acc_MD, odd_MD = tl.split(tl.reshape(state_MD, (BLOCK_M, WIDTH // 2, 2)))
                odd_MD = _as_sums(odd_MD, query_MD.dtype)
            else:
                acc_MD = state_MD
            acc_MD = _as_sums(acc_MD, query_MD.dtype)
    # From 64 rows on, Hopper's products are asynchronous and hold one tile more.
    STAGES: tl.constexpr = shape.STAGES - 1 if BLOCK_M >= 64 else shape.STAGES
    for place in tl.range(unit.first_key, unit.key_end, BLOCK_N, num_stages=STAGES):
        key = _skip_hole(place, unit, HOLES)
        key_N = key + offset_N
        seen_N = key_N < unit.seq_len
        if LEFT >= 0:
            seen_N = seen_N & (key_N >= unit.low)
        block = next_block
        ahead = place + BLOCK_N
        ahead_key = _skip_hole(ahead, unit, HOLES)
        if ONE_BLOCK:
            next_block = tl.load(table + ahead_key // BLOCK_SIZE, mask=ahead < unit.key_end, other=0)
            tile = base + block.to(tl.int64) * shape.STRIDE_BLOCK + key % BLOCK_SIZE * shape.STRIDE_SLOT
            slot_N = offset_N * shape.STRIDE_SLOT
        else:
            ahead_N = ahead + offset_N
            inside_N = (ahead_N >= unit.low) & (ahead_N < unit.key_end)
            next_block = tl.load(table + (ahead_key + offset_N) // BLOCK_SIZE, mask=inside_N, other=0)
            slot_N = block.to(tl.int64) * shape.STRIDE_BLOCK + key_N % BLOCK_SIZE * shape.STRIDE_SLOT
            tile = base
        # Unwritten slots may hold NaN, which a weight of zero does not remove.
        mask_ND = seen_N[:, None]
        if WIDTH != HEAD_SIZE:
            mask_ND = mask_ND & (dim < HEAD_SIZE)[None, :]
        pointer_ND = tile + slot_N[:, None] + dim[None, :]
        key_ND = tl.load(pointer_ND, mask=mask_ND, other=0.0)
        if PAIRS:
            mask_ND = seen_N[:, None]
            if WIDTH != HEAD_SIZE:
                mask_ND = mask_ND & (half < HEAD_SIZE // 2)[None, :]
            pairs = (tile + tensors.stride_kv).to(tl.pointer_type(tl.int16))
            value_ND = tl.load(pairs + (slot_N // 2)[:, None] + half[None, :], mask=mask_ND, other=0)
        else:
            value_ND = tl.load(pointer_ND + tensors.stride_kv, mask=mask_ND, other=0.0)
        logits_MN = tl.dot(query_MD, key_ND.to(query_MD.dtype).trans(), input_precision="ieee")
        logits_MN, rest = score(logits_MN, factor, tensors.softcap, slope_M, key_N, position_M, shape.SOFTCAP, ALIBI)
        logits_MN = logits_MN * rest
        seen_MN = in_window(seen_N[None, :], key_N, position_M, LEFT, shape.RIGHT)
        logits_MN = tl.where(seen_MN, logits_MN, float("-inf"))
        weight_MN, decay_M, sum_M, max_M = softmax_step(logits_MN, 1.0, sum_M, max_M, True)
        acc_MD = acc_MD * decay_M[:, None]
        if PAIRS:
            even_ND, odd_ND = pairs_apart(value_ND, E5M2, shape.FP8_AT_ONCE)
            odd_MD = odd_MD * decay_M[:, None]
            odd_MD = tl.dot(weight_MN.to(query_MD.dtype), odd_ND.to(query_MD.dtype), odd_MD, input_precision="ieee")
        else:
            even_ND = value_ND
        acc_MD = tl.dot(weight_MN.to(query_MD.dtype), even_ND.to(query_MD.dtype), acc_MD, input_precision="ieee")

    if PAIRS:
        acc_MD = tl.reshape(tl.join(acc_MD, odd_MD), (BLOCK_M, WIDTH))
    value_factor = 1.0
    # The sequences that share a prefix apply it, as to their own keys.
    if tensors.v_scale is not None and not SHARED:
        value_factor = tl.load(tensors.v_scale + unit.kv_head)
    complete = unit.slot * 0
    if SHARED:
        acc_MD, lse_M = normalize(acc_MD, sum_M, max_M, value_factor)
        shared_M = _rows_of_prefix(unit.kind, unit.query_start + token_M, head_M, shape)
        cut_M = (2 * shape.PROGRAMS + unit.slot) * shape.SCRATCH_ROWS + tl.arange(0, BLOCK_M)
        scratch_M = tl.where(unit.first == unit.last, shared_M, cut_M)
        _store_partial(tensors, scratch_M, acc_MD, lse_M, valid_M)
    elif unit.first == unit.last:
        if tensors.sinks is not None:
            acc_MD, sum_M, max_M = add_sink(tensors.sinks, head_M, acc_MD, sum_M, max_M)
        acc_MD, lse_M = normalize(acc_MD, sum_M, max_M, value_factor)
        store_rows(
            tensors.out_THD, tensors.lse_HT, tensors.stride_lse, acc_MD, lse_M,
            unit.query_start, 0, token_M, head_M, valid_M, shape.KV_HEADS * shape.GROUP, HEAD_SIZE,
        )  # fmt: skip
    else:
        acc_MD, lse_M = normalize(acc_MD, sum_M, max_M, value_factor)
        scratch_M = unit.slot * shape.SCRATCH_ROWS + tl.arange(0, BLOCK_M)
        _store_partial(tensors, scratch_M, acc_MD, lse_M, valid_M)
        # All threads have written before one of them counts the result.
        tl.debug_barrier()
        arrived = tl.atomic_add(tensors.counters + unit.first, 1)
        complete = (arrived == unit.last - unit.first).to(tl.int32)
    return complete


@triton.jit
def _store_partial(tensors, row_M, acc_MD, lse_M, valid_M):
    """Write a partial result to rows of `partial_out`."""
    WIDTH: tl.constexpr = acc_MD.shape[1]
    tl.store(tensors.partial_out + row_M[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc_MD, mask=valid_M[:, None])
    tl.store(tensors.partial_lse + row_M, lse_M, mask=valid_M)


@triton.jit
def _as_sums(value_MD, dtype: tl.constexpr):
    """Return the values as the sums of a product, which adds nothing to them."""
    left = tl.zeros([value_MD.shape[0], 16], dtype)
    right = tl.zeros([16, value_MD.shape[1]], dtype)
    return tl.dot(left, right, value_MD, input_precision="ieee")


@triton.jit
def _rows_of_prefix(level, token_M, head_M, shape):
    """Return the rows of `partial_out` that have the results of a prefix's whole units."""
    HEADS: tl.constexpr = shape.KV_HEADS * shape.GROUP
    FIRST: tl.constexpr = 4 * shape.PROGRAMS * shape.SCRATCH_ROWS
    return FIRST + (level * shape.SHARED_TOKENS + token_M) * HEADS + head_M


@triton.jit
def _after_prefixes(tensors, unit, shape, token_M, head_M, valid_M):
    """Return sums of values and weights, and the maximum, after the prefixes that the unit's sequence shares."""
    WIDTH: tl.constexpr = shape.WIDTH
    GROUP: tl.constexpr = shape.GROUP
    ROWS: tl.constexpr = token_M.shape[0]
    PARTS: tl.constexpr = max(1, shape.MERGED // (ROWS * WIDTH))
    dim = tl.arange(0, WIDTH)
    acc_MD = tl.zeros([ROWS, WIDTH], tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    max_M = tl.full([ROWS], float("-inf"), tl.float32)
    words = tensors.prefixes + unit.seq * PREFIX_WORDS
    ranges, empty = load_words(words + 8, 2)
    for level in range(2):
        first_token, num_tokens, position, num_chunks = load_words(words + 4 * level, 4)
        if num_tokens > 0:
            row_M = (unit.query_start + token_M - first_token) * GROUP + head_M % GROUP
            if shape.ITEM_ROW > 0:
                # `position` and `num_chunks` are the first slot and the pieces of a tile (`PrefixItems`).
                num_parts_M = tl.where(valid_M, num_chunks, 0)
                whole_M = num_parts_M <= 1
                slot_M = position + row_M // _ITEM_ROWS * num_chunks
                cut_M = (slot_M * shape.KV_HEADS + unit.kv_head) * _ITEM_ROWS + row_M % _ITEM_ROWS + shape.ITEM_ROW
                skipped_M = row_M * 0
                ROWS_OF_PART: tl.constexpr = shape.KV_HEADS * _ITEM_ROWS
            else:
                tile_rows, num_tiles = row_tiles_of(num_tokens, False, shape)
                unit_M = unit.kv_head * num_tiles + row_M // tile_rows
                begin_M = position + unit_M * (num_chunks + empty) + empty
                first_M, last_M, slot_M = programs_of(begin_M, num_chunks, ranges, empty)
                num_parts_M = tl.where(valid_M, last_M - first_M + 1, 0)
                whole_M = first_M == last_M
                cut_M = (2 * shape.PROGRAMS + 2 * first_M) * shape.SCRATCH_ROWS + row_M % tile_rows
                # The first partial result may be its program's second.
                skipped_M = tl.where(whole_M, 0, (slot_M - 2 * first_M) * shape.SCRATCH_ROWS)
                ROWS_OF_PART: tl.constexpr = 2 * shape.SCRATCH_ROWS
            first_row_M = tl.where(whole_M, _rows_of_prefix(level, unit.query_start + token_M, head_M, shape), cut_M)
            for part in range(0, tl.max(num_parts_M), PARTS):
                lses = ()
                parts = ()
                new_max_M = max_M
                # As in `_merge_unit`, all loads are issued before the first value is used, and bypass the L1 cache.
                for offset in tl.static_range(PARTS):
                    exists_M = part + offset < num_parts_M
                    scratch_M = first_row_M + (part + offset) * ROWS_OF_PART
                    if offset == 0:
                        scratch_M += tl.where(part == 0, skipped_M, 0)
                    pointer_MD = tensors.partial_out + scratch_M[:, None] * WIDTH + dim[None, :]
                    lse_M = tl.load(
                        tensors.partial_lse + scratch_M, mask=exists_M, other=float("-inf"), cache_modifier=".cg"
                    )
                    part_MD = tl.load(pointer_MD, mask=exists_M[:, None], other=0.0, cache_modifier=".cg")
                    lses = lses + (lse_M,)
                    parts = parts + (part_MD,)
                    new_max_M = tl.maximum(new_max_M, lse_M)
                acc_MD, sum_M = merge_parts(acc_MD, sum_M, max_M, new_max_M, lses, parts)
                max_M = new_max_M
    return acc_MD, sum_M, max_M


@triton.jit
def _merge_unit(
    tensors, unit, shape, first_row, num_rows, begin, mergers, ROWS: tl.constexpr
):  # fmt: skip
    """Merge a unit's partial results of programs `first` to `last`, PARTS of them and ROWS rows at a time.

    Of `mergers` programs this is number `begin`; each merges other rows.
    """
    WIDTH: tl.constexpr = shape.WIDTH
    PARTS: tl.constexpr = max(2, shape.MERGED // (ROWS * WIDTH))
    dim = tl.arange(0, WIDTH)
    num_parts = unit.last - unit.first + 1
    for strip in range(begin * ROWS, num_rows, mergers * ROWS):
        scratch_M = strip + tl.arange(0, ROWS)
        token_M, head_M = token_and_head(first_row + scratch_M, unit.kv_head, shape.GROUP)
        valid_M = scratch_M < num_rows
        max_M = tl.full([ROWS], float("-inf"), tl.float32)
        sum_M = tl.zeros([ROWS], tl.float32)
        acc_MD = tl.zeros([ROWS, WIDTH], tl.float32)
        if tensors.sinks is not None:
            max_M = tl.load(tensors.sinks + head_M, mask=valid_M, other=0.0) * LOG2_E
            sum_M += 1.0
        first_M = 2 * unit.first * shape.SCRATCH_ROWS + scratch_M
        lse_of_M = tensors.partial_lse + first_M
        part_of_MD = tensors.partial_out + first_M[:, None] * WIDTH + dim[None, :]
        # The first partial result may be its program's second.
        first_rows = (unit.first_slot - 2 * unit.first) * shape.SCRATCH_ROWS
        for part in range(0, num_parts, PARTS):
            lses = ()
            parts = ()
            new_max_M = max_M
            # All loads are issued before the first value is used. They bypass the L1 cache, which does not see other
            # multiprocessors' writes. Each has few operations, because the time of a compiler pass grows with their
            # square.
            for offset in tl.static_range(PARTS):
                rows = (part + offset) * (2 * shape.SCRATCH_ROWS)
                if offset == 0:
                    rows = tl.where(part == 0, first_rows, rows)
                exists = part + offset < num_parts
                lse_M = tl.load(lse_of_M + rows, mask=exists, other=float("-inf"), cache_modifier=".cg")
                part_MD = tl.load(part_of_MD + rows * WIDTH, mask=exists, other=0.0, cache_modifier=".cg")
                lses = lses + (lse_M,)
                parts = parts + (part_MD,)
                new_max_M = tl.maximum(new_max_M, lse_M)
            acc_MD, sum_M = merge_parts(acc_MD, sum_M, max_M, new_max_M, lses, parts)
            max_M = new_max_M
        acc_MD, lse_M = normalize(acc_MD, sum_M, max_M, 1.0)
        store_rows(
            tensors.out_THD, tensors.lse_HT, tensors.stride_lse, acc_MD, lse_M,
            unit.query_start, 0, token_M, head_M, valid_M, shape.KV_HEADS * shape.GROUP, shape.HEAD_SIZE,
        )  # fmt: skip
