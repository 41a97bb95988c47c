"""The attention kernel of short queries for Hopper: what `attention_decode` does, by warps with work of their own.

There a program's loads end with each unit, a sequence's keys of one head, and begin anew with the next: of 8 tiles of
keys it reads the first with nothing else under way. Here one warp has the copy engine bring the keys of all the
program's units, end to end, and another the values, each as far ahead as its ring has room; four warps attend.

The products are Hopper's, of 64 rows, of which a decode has as many as there are query heads to a KV head. The tensor
cores have time for that: a tile of 64 keys keeps them busy for a third of what its bytes take.

Plan, ranges, partial results and who merges them are those of `attention_decode`. Written in Gluon, as
`attention_prefill_hopper`, whose ring of keys this is.

Shapes: M rows of a unit, N keys of a tile, D head size; the rest as in `attention_decode`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportRedeclaration=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from phonograph.kernels.triton.attention_hopper import (
    INFINITY,
    LN_2,
    LOG2_E,
    clear,
    describe,
    free,
    load_rows,
    masked,
    place_of,
)
from phonograph.kernels.triton.attention_plan import (
    SEQUENCE_WORDS,
    DecodePlan,
    add_parts,
    cut_of,
    read_record,
    row_tiles,
    sequence_chunks,
    share_of,
)
from phonograph.kernels.triton.cache_matrix import TILE, CacheMatrix
from phonograph.kernels.triton.hopper import behind, let_next_kernel_start, make_barriers, wait_for_kernel_before
from phonograph.kernels.triton.pdl import pdl_usable

_RING_BYTES = 48 * 1024
"""Of keys, and of values, under way: two programs have room on a multiprocessor."""
_MERGE_VALUES = 8192
"""Values that a merge has in flight, over all its threads."""
_WORDS = gl.constexpr(SEQUENCE_WORDS.value)


def decode_on_hopper(
    plan: DecodePlan,
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    *,
    matrix: CacheMatrix,
    scale: float,
    window: tuple[int, int],
    sinks: torch.Tensor | None,
    causal: bool,
) -> None:
    """As `attention_decode.decode_attention`: 16-bit, heads of 64 or 128, plans with tiles of 64 keys.

    matrix: the cache for the copy engine
    """
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    small, large = row_tiles(plan.group, head_size)
    merge_rows = 4 if plan.group <= 4 else 8
    pdl = pdl_usable()
    _decode_kernel[(plan.programs,)](
        query_THD,
        describe(kv_cache, matrix),
        kv_cache,
        matrix.columns,
        block_table,
        query_start_loc,
        out_THD,
        lse_HT,
        sinks,
        plan.records,
        plan.sequences,
        plan.counters,
        plan.partial_out,
        plan.partial_lse,
        query_THD.shape[0],
        seq_lens.shape[0],
        matrix.rows // 2,
        num_kv_heads if matrix.heads_outside else 1,
        block_table.stride(0),
        lse_HT.stride(0) if lse_HT is not None else 0,
        scale,
        PROGRAMS=plan.programs,
        KV_HEADS=num_kv_heads,
        GROUP=plan.group,
        HEAD_SIZE=head_size,
        STRIDE_TOKEN=query_THD.stride(0),
        BLOCK_SIZE=block_size,
        SMALL=small,
        LARGE=large,
        SCRATCH_ROWS=plan.partial_out.shape[1],
        LEFT=window[0],
        RIGHT=0 if causal else window[1],
        HEADS_OUTSIDE=matrix.heads_outside,
        TILES=_RING_BYTES // (TILE * head_size * kv_cache.element_size()),
        MERGE_ROWS=merge_rows,
        PARTS=_MERGE_VALUES // (merge_rows * head_size),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
        maxnreg=128,
    )


@gluon.jit
def _ask_for(tile, columns, SIZE: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Has the second-level cache read a tile's rows. What is not written yet does no harm there."""
    row_N = gl.arange(0, SIZE, layout=gl.BlockedLayout([SIZE // 32], [32], [1], [0]))
    for line in gl.static_range(HEAD_SIZE // 64):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [tile + row_N * columns + line * 64],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _load(
    cache,
    memory,
    columns,
    ring,
    full,
    empty,
    tensors,
    first_row,
    blocks_of_heads,
    stride_table,
    PROGRAMS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr,
    LARGE: gl.constexpr,
    LEFT: gl.constexpr,
    HEADS_OUTSIDE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Has the copy engine bring the keys, or the values, of the program's range, tile after tile."""
    block_table, records, sequences = tensors
    TILES: gl.constexpr = ring.type.shape[0]
    SIZE: gl.constexpr = ring.type.shape[1]
    program = gl.program_id(0)
    index, chunk, chunk_keys, total, seq, _, query_len, seq_len = read_record(records, program)
    own = share_of(program, total, PROGRAMS)
    position = own[2]
    at, turn = 0, 0
    while position < own[3]:
        entry = sequences + (index + 1) * _WORDS
        next_seq = gl.load(entry)
        next_len = gl.load(entry + 2)
        next_keys = gl.load(entry + 3)
        _, start, num_chunks, num_row_tiles = sequence_chunks(
            query_len, seq_len, chunk_keys, GROUP, SMALL, LARGE, SIZE, LEFT
        )
        key_chunk, taken, _, _, _, _ = cut_of(position, chunk, own, program, num_chunks)
        kv_head = chunk // num_chunks // num_row_tiles
        table = block_table + seq.to(gl.int64) * stride_table
        first_key = start + key_chunk * chunk_keys
        key_end = gl.minimum(first_key + taken * chunk_keys, seq_len)
        if PDL:
            if (position == own[2]) & (first_key < key_end):
                block = gl.load(table + first_key // BLOCK_SIZE)
                row, column = place_of(block, first_key, kv_head, blocks_of_heads, HEAD_SIZE, BLOCK_SIZE, HEADS_OUTSIDE)
                _ask_for(memory + (first_row + row).to(gl.int64) * columns + column, columns, SIZE, HEAD_SIZE)
            # For all keys, not those of this step's tokens alone: other sequences may have found blocks that it writes.
            wait_for_kernel_before()
        for key in range(first_key, key_end, SIZE):
            block = gl.load(table + key // BLOCK_SIZE)
            row, column = place_of(block, key, kv_head, blocks_of_heads, HEAD_SIZE, BLOCK_SIZE, HEADS_OUTSIDE)
            mbarrier.wait(empty.index(at), turn ^ 1)
            mbarrier.expect(full.index(at), cache.block_type.nbytes)
            tma.async_copy_global_to_shared(cache, [first_row + row, column], full.index(at), ring.index(at))
            at, turn = behind(at, turn, TILES)
        position = position + taken  # not in place: on threads a tensor is torch's
        chunk = chunk + taken
        if chunk == num_chunks * num_row_tiles * KV_HEADS:
            chunk = chunk * 0
            index = index + 1
            seq = next_seq
            query_len = next_len
            seq_len = next_keys


@gluon.jit
def _attend(
    query_MD,
    rings,
    at,
    turn,
    span,
    position_M,
    unit,
    HEAD_SIZE: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    LAYOUT: gl.constexpr,
    OUT: gl.constexpr,
):
    """A unit's keys in the program's range: sums [M, D], the weights' sum, the largest logit, the place in the rings.

    span: first key and the one behind the last, [low, high) that are there, positions of the first and last row
    """
    start, stop, low, high, first, last = span
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    TILES: gl.constexpr = keys.type.shape[0]
    SIZE: gl.constexpr = keys.type.shape[1]
    M: gl.constexpr = query_MD.shape[0]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    sums_MD = gl.zeros([M, HEAD_SIZE], gl.float32, OUT)
    sum_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, LAYOUT))
    max_M = gl.full([M], -INFINITY, gl.float32, gl.SliceLayout(1, LAYOUT))
    # All rows see all keys from `plain` to `edge`.
    plain = low
    if LEFT >= 0:
        plain = gl.maximum(low, last - LEFT)
    edge = high
    if RIGHT >= 0:
        edge = gl.minimum(high, first + RIGHT + 1)
    for key in range(start, stop, SIZE):
        is_masked = (key < plain) | (key + SIZE > edge)
        mbarrier.wait(keys_full.index(at), turn)
        zeros = gl.zeros([M, SIZE], gl.float32, LAYOUT)
        logits_MN = warpgroup_mma(query_MD, keys.index(at).permute((1, 0)), zeros, is_async=True)
        logits_MN = warpgroup_mma_wait(0, deps=(logits_MN,))
        free(keys_empty, at)
        if is_masked:
            logits_MN = masked(logits_MN, key, position_M, low, high, LEFT, RIGHT, LAYOUT)
        new_max_M = gl.maximum(max_M, gl.max(logits_MN, 1) * unit)
        shift_M = gl.where(new_max_M == -INFINITY, 0.0, new_max_M)
        weight_MN = gl.exp2(logits_MN * unit - shift_M[:, None])
        decay_M = gl.exp2(max_M - shift_M)
        sum_M = sum_M * decay_M + gl.sum(weight_MN, 1)
        max_M = new_max_M
        weights = gl.convert_layout(weight_MN.to(query_MD.dtype), WEIGHTS)
        sums_MD *= gl.convert_layout(decay_M, gl.SliceLayout(1, OUT))[:, None]
        mbarrier.wait(values_full.index(at), turn)
        if is_masked:
            clear(values.index(at), key, low, high)
            fence_async_shared()
            gl.thread_barrier()
        sums_MD = warpgroup_mma(weights, values.index(at), sums_MD, is_async=True)
        sums_MD, _ = warpgroup_mma_wait(0, deps=(sums_MD, weights))
        free(values_empty, at)
        at, turn = behind(at, turn, TILES)
    return sums_MD, sum_M, max_M, at, turn


@gluon.jit
def _merge(
    tensors,
    stride_lse,
    query_start,
    kv_head,
    first_row,
    num_rows,
    first,
    last,
    first_slot,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    SCRATCH_ROWS: gl.constexpr,
    STRIP: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Merges what programs `first` to `last` left of a unit, PARTS of them and a strip of STRIP rows at a time."""
    _, out_THD, lse_HT, sinks, _, _, _, partial_out, partial_lse = tensors
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, HEAD_SIZE // 32], [1, 32], [4, 1], [1, 0])
    dim = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, LAYOUT))
    num_parts = last - first + 1
    out = out_THD + query_start.to(gl.int64) * (KV_HEADS * GROUP * HEAD_SIZE)
    for strip in range(0, num_rows, STRIP):
        scratch_M = strip + gl.arange(0, STRIP, layout=gl.SliceLayout(1, LAYOUT))
        row_M = first_row + scratch_M
        token_M = row_M // GROUP
        head_M = kv_head * GROUP + row_M % GROUP
        valid_M = scratch_M < num_rows
        max_M = gl.full([STRIP], -INFINITY, gl.float32, gl.SliceLayout(1, LAYOUT))
        sum_M = gl.zeros([STRIP], gl.float32, gl.SliceLayout(1, LAYOUT))
        acc_MD = gl.zeros([STRIP, HEAD_SIZE], gl.float32, LAYOUT)
        if sinks is not None:
            max_M = gl.load(sinks + head_M, mask=valid_M, other=0.0) * LOG2_E
            sum_M += 1.0
        max_M, sum_M, acc_MD = add_parts(
            partial_out, partial_lse, scratch_M, valid_M, dim, first, num_parts, first_slot, max_M, sum_M, acc_MD,
            HEAD_SIZE, SCRATCH_ROWS, PARTS,
        )  # fmt: skip
        acc_MD *= gl.where(sum_M > 0, 1.0 / sum_M, 0.0)[:, None]
        pointers = out + ((token_M * (KV_HEADS * GROUP) + head_M) * HEAD_SIZE)[:, None] + dim[None, :]
        gl.store(pointers, acc_MD.to(out_THD.dtype.element_ty), mask=valid_M[:, None])
        if lse_HT is not None:
            lse_M = gl.where(sum_M > 0, max_M + gl.log2(sum_M), -INFINITY) * LN_2
            gl.store(lse_HT + head_M.to(gl.int64) * stride_lse + query_start + token_M, lse_M, mask=valid_M)


@gluon.jit
def _run(
    rings,
    tensors,
    stride_lse,
    num_tokens,
    num_seqs,
    scale,
    PROGRAMS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    STRIDE_TOKEN: gl.constexpr,
    SMALL: gl.constexpr,
    LARGE: gl.constexpr,
    SCRATCH_ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    MERGE_ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Four warps: the units of the program's range, one after another."""
    query_THD, out_THD, lse_HT, sinks, query_start_loc, plan, counters, partial_out, partial_lse = tensors
    records, sequences = plan
    SIZE: gl.constexpr = rings[0].type.shape[1]
    M: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_SIZE, 16])
    QUERY: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    # Sixteen bytes a thread, along a row.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    program = gl.program_id(0)
    index, chunk, chunk_keys, total, seq, query_start, query_len, seq_len = read_record(records, program)
    end = gl.load(query_start_loc + num_seqs)
    own = share_of(program, total, PROGRAMS)
    position = own[2]
    if PDL:
        wait_for_kernel_before()
    at, turn = 0, 0
    while position < own[3]:
        entry = sequences + (index + 1) * _WORDS
        next_start = gl.load(entry + 1)
        next_len = gl.load(entry + 2)
        next_keys = gl.load(entry + 3)
        low, start, num_chunks, num_row_tiles = sequence_chunks(
            query_len, seq_len, chunk_keys, GROUP, SMALL, LARGE, SIZE, LEFT
        )
        key_chunk, taken, first, last, first_slot, slot = cut_of(position, chunk, own, program, num_chunks)
        unit = chunk // num_chunks
        kv_head = unit // num_row_tiles
        tile_rows = gl.where(query_len * GROUP <= SMALL, SMALL, LARGE)
        first_row = unit % num_row_tiles * tile_rows
        first_key = start + key_chunk * chunk_keys
        key_end = gl.minimum(first_key + taken * chunk_keys, seq_len)

        query_MD = load_rows(
            query_THD, STRIDE_TOKEN, query_start, query_len, kv_head, first_row, GROUP, HEAD_SIZE, M, COPY
        )
        row_M = first_row + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        token_M = row_M // GROUP
        sums_MD, sum_M, max_M, at, turn = _attend(
            gl.convert_layout(query_MD, QUERY),
            rings,
            at,
            turn,
            (first_key, key_end, low, seq_len, seq_len - query_len + first_row // GROUP, seq_len - 1),
            seq_len - query_len + token_M,
            scale * LOG2_E,
            HEAD_SIZE,
            LEFT,
            RIGHT,
            LAYOUT,
            OUT,
        )
        num_rows = gl.minimum(query_len * GROUP - first_row, tile_rows)
        local_M = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
        head_M = kv_head * GROUP + row_M % GROUP
        factor_M = gl.where(sum_M > 0, 1.0, 0.0)
        if sinks is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
            if first == last:
                sink_M = gl.load(sinks + head_M, mask=local_M < num_rows, other=0.0) * LOG2_E
                new_max_M = gl.maximum(max_M, sink_M)
                factor_M = gl.exp2(max_M - new_max_M)
                sum_M = sum_M * factor_M + gl.exp2(sink_M - new_max_M)
                max_M = new_max_M
        factor_M = gl.where(sum_M > 0, factor_M / sum_M, 0.0)
        lse_M = gl.where(sum_M > 0, max_M + gl.log2(sum_M), -INFINITY)
        sums_MD *= gl.convert_layout(factor_M, gl.SliceLayout(1, OUT))[:, None]
        out_M = gl.arange(0, M, layout=gl.SliceLayout(1, OUT))
        dim = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT))
        if first == last:
            if lse_HT is not None:
                lse_ptrs = lse_HT + head_M.to(gl.int64) * stride_lse + query_start + token_M
                gl.store(lse_ptrs, lse_M * LN_2, mask=local_M < num_rows)
            place_M = (first_row + out_M) // GROUP * (KV_HEADS * GROUP) + kv_head * GROUP + (first_row + out_M) % GROUP
            out = out_THD + query_start.to(gl.int64) * (KV_HEADS * GROUP * HEAD_SIZE)
            out_ptrs = out + (place_M * HEAD_SIZE)[:, None] + dim[None, :]
            gl.store(out_ptrs, sums_MD.to(out_THD.dtype.element_ty), mask=(out_M < num_rows)[:, None])
        else:
            gl.store(partial_lse + slot * SCRATCH_ROWS + local_M, lse_M, mask=local_M < num_rows)
            partial_ptrs = partial_out + ((slot * SCRATCH_ROWS + out_M) * HEAD_SIZE)[:, None] + dim[None, :]
            gl.store(partial_ptrs, sums_MD, mask=(out_M < num_rows)[:, None])
            # All threads have written before one of them says so.
            gl.thread_barrier()
            arrived = gl.atomic_add(counters + first, 1, sem="acq_rel", scope="gpu")
            if arrived == last - first:
                _merge(
                    tensors, stride_lse, query_start, kv_head, first_row, num_rows, first, last, first_slot,
                    KV_HEADS, GROUP, HEAD_SIZE, SCRATCH_ROWS, MERGE_ROWS, PARTS,
                )  # fmt: skip
                gl.store(counters + first, 0)

        position = position + taken  # not in place: on threads a tensor is torch's
        chunk = chunk + taken
        if chunk == num_chunks * num_row_tiles * KV_HEADS:
            chunk = chunk * 0
            index = index + 1
            query_start = next_start
            query_len = next_len
            seq_len = next_keys

    # Rows of nobody.
    LINE: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    ROW: gl.constexpr = KV_HEADS * GROUP * HEAD_SIZE
    for row in range(end + program, num_tokens, PROGRAMS):
        for column in range(0, ROW, 1024):
            offset = column + gl.arange(0, 1024, layout=LINE)
            zeros = gl.zeros([1024], gl.float32, LINE).to(out_THD.dtype.element_ty)
            gl.store(out_THD + row * ROW + offset, zeros, mask=offset < ROW)
        if lse_HT is not None:
            for head in range(KV_HEADS * GROUP):
                gl.store(lse_HT + head * stride_lse + row, -INFINITY)


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs", "stride_table", "stride_lse"])
def _decode_kernel(
    query_THD,
    cache,
    memory,
    columns,
    block_table,
    query_start_loc,
    out_THD,
    lse_HT,
    sinks,
    records,
    sequences,
    counters,
    partial_out,
    partial_lse,
    num_tokens,
    num_seqs,
    values_row,
    blocks_of_heads,
    stride_table,
    stride_lse,
    scale,
    PROGRAMS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    STRIDE_TOKEN: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SMALL: gl.constexpr,
    LARGE: gl.constexpr,
    SCRATCH_ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    HEADS_OUTSIDE: gl.constexpr,
    TILES: gl.constexpr,
    MERGE_ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """memory, columns: of `cache`; values_row: of its rows the first of values; blocks_of_heads: heads, where each
    has a block's rows."""
    if PDL:
        let_next_kernel_start()
    shape: gl.constexpr = [TILES, cache.block_type.shape[0], HEAD_SIZE]
    keys = gl.allocate_shared_memory(cache.dtype, shape, cache.layout)
    values = gl.allocate_shared_memory(cache.dtype, shape, cache.layout)
    keys_full, keys_empty = make_barriers(TILES, 1), make_barriers(TILES, 1)
    values_full, values_empty = make_barriers(TILES, 1), make_barriers(TILES, 1)
    fence_async_shared()
    rings = (keys, keys_full, keys_empty, values, values_full, values_empty)
    tensors = (
        query_THD, out_THD, lse_HT, sinks, query_start_loc, (records, sequences), counters, partial_out, partial_lse,
    )  # fmt: skip
    read = (block_table, records, sequences)
    gl.warp_specialize(
        [
            (
                _run,
                (
                    rings, tensors, stride_lse, num_tokens, num_seqs, scale, PROGRAMS, KV_HEADS, GROUP, HEAD_SIZE,
                    STRIDE_TOKEN, SMALL, LARGE, SCRATCH_ROWS, LEFT, RIGHT, MERGE_ROWS, PARTS, PDL,
                ),
            ),
            (
                _load,
                (
                    cache, memory, columns, keys, keys_full, keys_empty, read, 0, blocks_of_heads, stride_table,
                    PROGRAMS, KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE, SMALL, LARGE, LEFT, HEADS_OUTSIDE, PDL,
                ),
            ),
            (
                _load,
                (
                    cache, memory, columns, values, values_full, values_empty, read, values_row, blocks_of_heads,
                    stride_table, PROGRAMS, KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE, SMALL, LARGE, LEFT, HEADS_OUTSIDE,
                    PDL,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
