"""Attention of prefills for Hopper: the kernel of `prefill`, with warps specialised for loads and for products.

Shapes: M rows of a group of warps, N keys of a piece (64, of one block; two pieces are a tile), D head size, W words of
an entry, P partial sums of a row; others as in `prefill`.

Algorithm: FlashAttention 3 (Shah et al., 2024).
1. One warp makes the copy engine load keys and values into a ring. Two groups of four warps take half of a tile's rows
   each.
2. A group issues the products of a tile's keys together with the products of the previous tile's values. It computes
   the left half of the tile's weights while the values' products run, and the right half while it scales the sums.
3. The groups take turns at the tensor cores, so that one's softmax runs during the other's products.
4. A program takes every PROGRAMS-th piece of the plan's list, alternately from the front and from the back of each
   round. The list is sorted by length, so all programs get equal work without counters or waits.
5. The loading warp stores each piece's entry with the piece's first keys, so the other warps wait for memory only once.

    loading warp   K0 | K1 V0 | K2 V1 | K3 V2 | ...              one stage of the ring each
    group 0        Q K0   | softmax 0 | Q K1, W0 V0 | softmax 1 | ...
    group 1               | Q K0      | softmax 0   | Q K1, W0 V0 | ...

Triton's interpreter does not run Gluon. Without a Hopper GPU, tests compile the kernel and run it on threads
(`tests/support/gluon_on_threads.py`).
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportRedeclaration=false
from __future__ import annotations

from collections import namedtuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.attention_scratch import DECODE_PROGRAMS, PREFILL_ROWS
from phonograph.kernels.triton.attention.decode_plan import DecodePlan
from phonograph.kernels.triton.attention.prefill_plan import (
    ENTRY_WORDS,
    PrefillPlan,
    cache_matrix,
    read_entry,
    tile_keys,
)
from phonograph.kernels.triton.attention.tile import LN_2, LOG2_E, in_window, token_and_head
from phonograph.kernels.triton.launch.gluon import (
    let_next_kernel_start,
    make_barriers,
    next_stage,
    wait_for_kernel_before,
)
from phonograph.kernels.triton.launch.pdl import pdl_options

PIECE = 64
"""Keys of one load by the copy engine. A block has that many, or a multiple."""
_COLUMNS = 64
"""Columns of one load by the copy engine: 128 bytes, a row of its pattern in shared memory."""
_TILES = 3
"""Stages of the ring: a tile of keys with the values of the previous tile."""
_WORDS = gl.constexpr(ENTRY_WORDS.value)
_INFINITY = gl.constexpr(float("inf"))
_LEAST = gl.constexpr(-3.4028234663852886e38)
"""Initial running maximum. Finite, so that exp(-inf - max) is 0, not NaN."""
_PARTS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
"""Layout of eight partial sums of a row: two for each of the four threads that share its logits."""


def attend_on_hopper(
    plan: PrefillPlan,
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    matrix: tuple[int, int, bool],
    *,
    scale: float,
    window: tuple[int, int],
    sinks: torch.Tensor | None,
    causal: bool,
) -> None:
    """Attend like `prefill.prefill_attention`, for 16-bit tensors, heads of 64 or 128 and plans that cut keys.

    `matrix` is `cache_matrix` of the cache.
    """
    work = plan.header, plan.entries, plan.partial_out, plan.partial_lse
    rows = plan.rows, 0, 0, 0
    window = window[0], 0 if causal else window[1]
    _launch(work, plan.num_sms, plan.group, rows, query_THD, kv_cache, block_table, out_THD, lse_HT, matrix, scale,
            window, sinks)  # fmt: skip


def attend_prefixes_on_hopper(
    plan: DecodePlan,
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attend the prefixes that sequences share, and leave partial results in the plan's.

    Args:
        plan: with the items of this batch.
        query_THD: as in `decode.decode_attention`, in 16 bits, with heads of 64 or 128.
        kv_cache: as there, of the same type, in blocks of 64 or a multiple of 128 slots.
        block_table: as there.
        scale: factor of the logits.
    """
    assert plan.prefixes is not None and plan.prefixes.items is not None
    items = plan.prefixes.items
    work = items.header, items.entries, plan.partial_out, plan.partial_lse
    whole = 4 * plan.programs * plan.partial_out.shape[1]
    rows = PREFILL_ROWS, items.first_row, whole, plan.prefixes.num_tokens
    _launch(work, plan.programs // DECODE_PROGRAMS, plan.group, rows, query_THD, kv_cache, block_table, query_THD, None,
            cache_matrix(kv_cache), scale, (-1, -1), None)  # fmt: skip


def _launch(
    work: tuple[torch.Tensor, ...],
    num_sms: int,
    group: int,
    rows: tuple[int, int, int, int],
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    matrix: tuple[int, int, bool],
    scale: float,
    window: tuple[int, int],
    sinks: torch.Tensor | None,
) -> None:
    """Launch the kernel for the items in `work`: header, entries, partial results and their LSE.

    `rows` are those of a tile and, of prefixes, the first row of cut and of whole results, and the tokens that share.
    """
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    matrix_rows, columns, heads_outside = matrix
    tile_rows, cut_row, whole_row, shared_tokens = rows
    kind = gl.bfloat16 if kv_cache.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([PIECE, _COLUMNS], kind)
    _prefill_kernel[(num_sms,)](
        query_THD,
        TensorDescriptor(kv_cache, [matrix_rows, columns], [columns, 1], [PIECE, _COLUMNS], layout),
        block_table,
        out_THD,
        lse_HT,
        sinks,
        *work,
        query_THD.stride(0),
        matrix_rows // 2,
        num_kv_heads if heads_outside else 1,
        block_table.stride(0),
        lse_HT.stride(0) if lse_HT is not None else 0,
        scale,
        PROGRAMS=num_sms,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows // 2,
        LEFT=window[0],
        RIGHT=window[1],
        HEADS_OUTSIDE=heads_outside,
        CUT_ROW=cut_row,
        WHOLE_ROW=whole_row,
        SHARED_TOKENS=shared_tokens,
        TILES=_TILES,
        **pdl_options(),
        num_warps=4,
        maxnreg=168,
    )


# Constants of the kernel.
_Shape = namedtuple(
    "_Shape",
    "PROGRAMS KV_HEADS GROUP HEAD_SIZE BLOCK_SIZE ROWS LEFT RIGHT HEADS_OUTSIDE CUT_ROW WHOLE_ROW SHARED_TOKENS PDL",
)


@gluon.jit
def _item(number, PROGRAMS: gl.constexpr):
    """Return the program's item of the list in a round; rounds alternate their direction."""
    program = gl.program_id(0)
    return number * PROGRAMS + gl.where(number % 2 == 0, program, PROGRAMS - 1 - program)


@gluon.jit
def _num_tiles(start, stop, SIZE: gl.constexpr):
    """Return the tiles of an item: at least one, because the next entry comes with the last tile's values."""
    return gl.maximum((stop - start + 2 * SIZE - 1) // (2 * SIZE), 1)


@gluon.jit
def _word(entry_W, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, _WORDS, layout=LAYOUT) == NUMBER, entry_W, 0), 0)


@gluon.jit
def _read_item(words, stage):
    """Return the item whose first keys are in a stage, and its `read_entry`, without the sequence."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([_WORDS], [32], [4], [0])
    entry_W = words.index(stage).load(LAYOUT)
    item, tile, start = _word(entry_W, 0, LAYOUT), _word(entry_W, 1, LAYOUT), _word(entry_W, 2, LAYOUT)
    stop, slot, query_start = _word(entry_W, 3, LAYOUT), _word(entry_W, 4, LAYOUT), _word(entry_W, 5, LAYOUT)
    query_len, seq_len = _word(entry_W, 6, LAYOUT), _word(entry_W, 7, LAYOUT)
    return item, tile, start, stop, slot, query_start, query_len, seq_len


@gluon.jit
def _load(cache, rings, block_table, header, entries, values_row, heads_of_block, stride_table, shape):
    """Load the tiles of all of the program's items, end to end, by the copy engine.

    Keys come with the values of the previous tile, because their products are issued together.
    """
    keys, values, words, full, empty = rings
    TILES: gl.constexpr = words.type.shape[0]
    SIZE: gl.constexpr = values.type.shape[1]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BYTES: gl.constexpr = 2 * shape.HEAD_SIZE // cache.block_type.shape[1] * cache.block_type.nbytes
    if shape.PDL:
        wait_for_kernel_before()
    num_items = gl.load(header) * shape.KV_HEADS
    stage, phase = 0, 0
    # Rows and columns of the previous tile. The values that come with the first tile are arbitrary, and not used.
    left_before, right_before, column_before = 0, 0, 0
    word_W = gl.arange(0, _WORDS, layout=LANES)
    number, item = 0, gl.program_id(0)
    while item < num_items:
        entry = entries + item // shape.KV_HEADS * _WORDS
        kv_head = item % shape.KV_HEADS
        table = block_table + gl.load(entry).to(gl.int64) * stride_table
        entry_W = gl.where(word_W == 0, item, gl.load(entry + word_W))
        start = gl.load(entry + 2)
        stop = gl.load(entry + 3)
        tiles = _num_tiles(start, stop, SIZE)
        for tile in range(0, tiles):
            key = start + tile * (2 * SIZE)
            left = gl.load(table + key // shape.BLOCK_SIZE, mask=key < stop, other=0)
            # After the last key, written keys are loaded again, not an arbitrary block, so that masks remove them.
            right = gl.load(table + (key + SIZE) // shape.BLOCK_SIZE, mask=key + SIZE < stop, other=left)
            column = kv_head * shape.HEAD_SIZE
            if shape.HEADS_OUTSIDE:
                left = left * heads_of_block + kv_head
                right = right * heads_of_block + kv_head
                column = 0
            left = left * shape.BLOCK_SIZE + key % shape.BLOCK_SIZE
            right = right * shape.BLOCK_SIZE + (key + SIZE) % shape.BLOCK_SIZE
            mbarrier.wait(empty.index(stage), phase ^ 1)
            if tile == 0:
                words.index(stage).store(entry_W)
            mbarrier.expect(full.index(stage), 2 * BYTES)
            _load_piece(cache, keys.index(stage), full.index(stage), left, column, 0, 2)
            _load_piece(cache, keys.index(stage), full.index(stage), right, column, 1, 2)
            _load_values(cache, values, full, stage, values_row + left_before, values_row + right_before, column_before)
            left_before, right_before, column_before = left, right, column
            stage, phase = next_stage(stage, phase, TILES)
        number += 1
        item = _item(number, shape.PROGRAMS)
    if gl.program_id(0) < num_items:
        mbarrier.wait(empty.index(stage), phase ^ 1)
        words.index(stage).store(gl.full([_WORDS], num_items, gl.int32, LANES))
        mbarrier.expect(full.index(stage), BYTES)
        _load_values(cache, values, full, stage, values_row + left_before, values_row + right_before, column_before)


@gluon.jit
def _load_piece(cache, memory, barrier, row, column, FIRST: gl.constexpr, STEP: gl.constexpr):
    """Load a piece into every STEP-th box of `memory` from FIRST on.

    Boxes are in the tensor cores' order: all rows of the first columns, then of the next.
    """
    SIZE: gl.constexpr = cache.block_type.shape[0]
    WIDTH: gl.constexpr = cache.block_type.shape[1]
    NUMBER: gl.constexpr = memory.type.shape[1] // WIDTH
    boxes = memory._reinterpret(cache.dtype, [STEP * NUMBER, SIZE, WIDTH], cache.layout)
    for box in gl.static_range(NUMBER):
        tma.async_copy_global_to_shared(cache, [row, column + box * WIDTH], barrier, boxes.index(FIRST + STEP * box))


@gluon.jit
def _load_values(cache, values, full, stage, left, right, column):
    _load_piece(cache, values.index(2 * stage), full.index(stage), left, column, 0, 1)
    _load_piece(cache, values.index(2 * stage + 1), full.index(stage), right, column, 0, 1)


@gluon.jit
def _logits(query_MD, keys, stage, LAYOUT: gl.constexpr):
    """Issue the products of a tile's keys."""
    M: gl.constexpr = query_MD.shape[0]
    N: gl.constexpr = keys.type.shape[1]
    zeros = gl.zeros([M, N], gl.float32, LAYOUT)
    return warpgroup_mma(query_MD, keys.index(stage).permute((1, 0)), zeros, is_async=True)


@gluon.jit
def _halves(logits_MN, HALF: gl.constexpr):
    """Split a tile's logits by its two pieces. Nothing moves: a thread has the same columns of both."""
    M: gl.constexpr = logits_MN.shape[0]
    N: gl.constexpr = logits_MN.shape[1]
    left_MN, right_MN = gl.split(logits_MN.reshape([M, 2, N // 2]).permute(0, 2, 1))
    left_MN = gl.convert_layout(left_MN, HALF, assert_trivial=True)
    return left_MN, gl.convert_layout(right_MN, HALF, assert_trivial=True)


@gluon.jit
def _masked(logits_MN, first_key, position_M, low, high, shape, LAYOUT: gl.constexpr):
    """Return a tile's logits, with minus infinity for keys that do not exist or are not seen."""
    key_N = first_key + gl.arange(0, logits_MN.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    key_1N = key_N[None, :]
    seen_MN = in_window((key_1N >= low) & (key_1N < high), key_N, position_M, shape.LEFT, shape.RIGHT)
    return gl.where(seen_MN, logits_MN, -_INFINITY)


@gluon.jit
def _clear(values, stage, first_key, low, high, written):
    """Zero the values of a tile's keys that may not exist: unwritten slots may hold NaN, which no weight removes.

    The first `written` keys of a sequence exist, but before `low` they may be freed.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SIZE: gl.constexpr = values.type.shape[1]
    if (first_key < low) | (first_key + 2 * SIZE > written):
        for half in gl.static_range(2):
            piece = values.index(2 * stage + half)
            key_N = (first_key + half * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT)))[:, None]
            piece.store(gl.where((key_N >= low) & (key_N < high), piece.load(LAYOUT), 0.0))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _largest(
    logits_MN, max_M, unit, masked, first_key, position_M, low, high, shape, LAYOUT: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """Return a tile's two pieces, masked, and the new running maximum, in the tile's layout and in a piece's."""
    if masked:
        logits_MN = _masked(logits_MN, first_key, position_M, low, high, shape, LAYOUT)
    max_M = gl.maximum(max_M, gl.max(logits_MN, 1) * unit)
    left_MN, right_MN = _halves(logits_MN, HALF)
    return left_MN, right_MN, max_M, gl.convert_layout(max_M, gl.SliceLayout(1, HALF), assert_trivial=True)


@gluon.jit
def _sum_parts(weight_MN):
    """Return each thread's part of a row's sum, [M, 8]; threads exchange parts once, at the end."""
    M: gl.constexpr = weight_MN.shape[0]
    N: gl.constexpr = weight_MN.shape[1]
    return gl.convert_layout(gl.sum(weight_MN.reshape([M, N // 8, 8]), 1), _PARTS, assert_trivial=True)


@gluon.jit
def _order_before(sum_MP):
    """Order sums, four a thread, before the instructions that follow; return the same sums.

    ptxas moves a wait before work that does not need it, but not before a store of that work's result. The store here
    never happens, because sums of powers are not below zero.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred %never;
        .reg .b32 %place;
        .reg .f32 %first, %second;
        mov.b32 %place, 0;
        add.f32 %first, $4, $5;
        add.f32 %second, $6, $7;
        add.f32 %first, %first, %second;
        setp.lt.f32 %never, %first, 0f00000000;
        @%never st.volatile.shared.f32 [%place], %first;
        mov.f32 $0, $4;
        mov.f32 $1, $5;
        mov.f32 $2, $6;
        mov.f32 $3, $7;
        }
        """,
        "=f,=f,=f,=f,f,f,f,f",
        [sum_MP],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _add_values(left_weights, right_weights, values, stage, sums_MD):
    """Issue the products of a tile's values."""
    sums_MD = warpgroup_mma(left_weights, values.index(2 * stage), sums_MD, is_async=True)
    return warpgroup_mma(right_weights, values.index(2 * stage + 1), sums_MD, is_async=True)


@gluon.jit
def _take_turn(turns, num_turns, GROUP_OF_WARPS: gl.constexpr):
    """Wait for the other group of warps; the first group begins."""
    mbarrier.wait(turns.index(GROUP_OF_WARPS), (num_turns & 1) ^ (1 - GROUP_OF_WARPS))
    return num_turns + 1


@gluon.jit
def _free(empty, stage):
    """Free a stage, once all warps have read it."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _attend(
    query_MD,
    rings,
    turns,
    ring_state,
    span,
    position_M,
    unit,
    shape,
    GROUP_OF_WARPS: gl.constexpr,
    LAYOUT: gl.constexpr,
    OUT: gl.constexpr,
):
    """Attend an item's keys. Return sums [M, D], the weights' sum, the maximum, and the new state of the ring.

    `span` is the first key, the end, [low, high) that some row sees, positions of the first and last row, and the
    number of written keys. `ring_state` is the stage, its phase, and the turns that the group has taken.
    """
    start, stop, low, high, first, last, written = span
    keys, values, words, full, empty = rings
    TILES: gl.constexpr = words.type.shape[0]
    SIZE: gl.constexpr = values.type.shape[1]
    M: gl.constexpr = query_MD.shape[0]
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    stage, phase, num_turns = ring_state
    sums_MD = warpgroup_mma_init(gl.zeros([M, shape.HEAD_SIZE], gl.float32, OUT))
    max_M = gl.full([M], _LEAST, gl.float32, gl.SliceLayout(1, LAYOUT))
    tiles = _num_tiles(start, stop, SIZE)
    # All rows see all keys from `plain` to `edge`.
    plain = start
    if shape.LEFT >= 0:
        plain = last - shape.LEFT
    edge = stop
    if shape.RIGHT >= 0:
        edge = gl.minimum(stop, first + shape.RIGHT + 1)
    # Wait for data before the turn, because the turn keeps the other group waiting.
    mbarrier.wait(full.index(stage), phase)
    num_turns = _take_turn(turns, num_turns, GROUP_OF_WARPS)
    logits_MN = _logits(query_MD, keys, stage, LAYOUT)
    mbarrier.arrive(turns.index(1 - GROUP_OF_WARPS), count=1)
    logits_MN = warpgroup_mma_wait(0, deps=(logits_MN,))
    _free(empty, stage)
    stage, phase = next_stage(stage, phase, TILES)
    masked = (start < plain) | (start + 2 * SIZE > edge)
    left_MN, right_MN, max_M, half_max_M = _largest(
        logits_MN, max_M, unit, masked, start, position_M, low, high, shape, LAYOUT, HALF
    )
    left_MN = gl.exp2(left_MN * unit - half_max_M[:, None])
    right_MN = gl.exp2(right_MN * unit - half_max_M[:, None])
    sum_MP = _sum_parts(left_MN + right_MN)
    left_weights = gl.convert_layout(left_MN.to(query_MD.dtype), WEIGHTS)
    right_weights = gl.convert_layout(right_MN.to(query_MD.dtype), WEIGHTS)
    for tile in range(1, tiles):
        key = start + tile * (2 * SIZE)
        mbarrier.wait(full.index(stage), phase)
        if GROUP_OF_WARPS == 0:
            # For both groups: the other's turn with these values comes later.
            _clear(values, stage, key - 2 * SIZE, low, high, written)
        num_turns = _take_turn(turns, num_turns, GROUP_OF_WARPS)
        logits_MN = _logits(query_MD, keys, stage, LAYOUT)
        sums_MD = _add_values(left_weights, right_weights, values, stage, sums_MD)
        mbarrier.arrive(turns.index(1 - GROUP_OF_WARPS), count=1)
        logits_MN = warpgroup_mma_wait(2, deps=(logits_MN,))
        masked = (key < plain) | (key + 2 * SIZE > edge)
        left_MN, right_MN, new_max_M, half_max_M = _largest(
            logits_MN, max_M, unit, masked, key, position_M, low, high, shape, LAYOUT, HALF
        )
        decay_M = gl.exp2(max_M - new_max_M)
        max_M = new_max_M
        left_MN = gl.exp2(left_MN * unit - half_max_M[:, None])
        decay_MP = gl.convert_layout(decay_M, gl.SliceLayout(1, _PARTS), assert_trivial=True)[:, None]
        sum_MP = _order_before(sum_MP * decay_MP + _sum_parts(left_MN))
        # The products of the values end about now.
        done_MD, _, _, left_MN, right_MN = warpgroup_mma_wait(
            0, deps=(sums_MD, left_weights, right_weights, left_MN, right_MN)
        )
        _free(empty, stage)
        stage, phase = next_stage(stage, phase, TILES)
        right_MN = gl.exp2(right_MN * unit - half_max_M[:, None])
        sum_MP += _sum_parts(right_MN)
        left_weights = gl.convert_layout(left_MN.to(query_MD.dtype), WEIGHTS)
        right_weights = gl.convert_layout(right_MN.to(query_MD.dtype), WEIGHTS)
        done_MD *= gl.convert_layout(decay_M, gl.SliceLayout(1, OUT))[:, None]
        sums_MD = warpgroup_mma_init(done_MD)
    # The last values come with the next item's first keys, so the next item frees the stage.
    mbarrier.wait(full.index(stage), phase)
    if GROUP_OF_WARPS == 0:
        _clear(values, stage, start + (tiles - 1) * (2 * SIZE), low, high, written)
    num_turns = _take_turn(turns, num_turns, GROUP_OF_WARPS)
    sums_MD = _add_values(left_weights, right_weights, values, stage, sums_MD)
    mbarrier.arrive(turns.index(1 - GROUP_OF_WARPS), count=1)
    done_MD, _, _ = warpgroup_mma_wait(0, deps=(sums_MD, left_weights, right_weights))
    sums_MD = warpgroup_mma_init(done_MD)
    sum_M = gl.convert_layout(gl.sum(sum_MP, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return warpgroup_mma_wait(0, deps=(sums_MD,)), sum_M, max_M, (stage, phase, num_turns)


@gluon.jit
def _load_query(query_THD, num_items, work, stride_token, shape, GROUP_OF_WARPS: gl.constexpr, COPY: gl.constexpr):
    """Return the group's rows of an item, [M, D]; zeros if there is no item."""
    item, tile, _, _, _, query_start, query_len, _ = work
    row_M = (
        tile * (2 * shape.ROWS) + GROUP_OF_WARPS * shape.ROWS + gl.arange(0, shape.ROWS, layout=gl.SliceLayout(1, COPY))
    )
    dim = gl.arange(0, shape.HEAD_SIZE, layout=gl.SliceLayout(0, COPY))
    token_M, head_M = token_and_head(row_M, item % shape.KV_HEADS, shape.GROUP)
    # 64 bits for the tile's first token, 32 within the tile.
    first_token = tile * (2 * shape.ROWS) // shape.GROUP
    query = query_THD + (query_start + first_token).to(gl.int64) * stride_token
    pointers = query + ((token_M - first_token) * stride_token + head_M * shape.HEAD_SIZE)[:, None] + dim[None, :]
    exists_M = (token_M < query_len) & (item < num_items)
    return gl.load(pointers, mask=exists_M[:, None], other=0.0)


@gluon.jit
def _run(rings, turns, tensors, strides, scale, shape, GROUP_OF_WARPS: gl.constexpr):
    """Run a group of four warps: its half of the rows of each of the program's items."""
    query_THD, out_THD, lse_HT, sinks, header, entries, partial_out, partial_lse = tensors
    stride_token, stride_lse = strides
    KV_HEADS: gl.constexpr = shape.KV_HEADS
    GROUP: gl.constexpr = shape.GROUP
    HEAD_SIZE: gl.constexpr = shape.HEAD_SIZE
    ROWS: gl.constexpr = shape.ROWS
    keys, _, words, _, _ = rings
    SIZE: gl.constexpr = keys.type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIZE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_SIZE, 16])
    QUERY: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    # Sixteen bytes a thread, along a row.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    if shape.PDL:
        wait_for_kernel_before()
    num_items = gl.load(header) * KV_HEADS
    dim = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, COPY))
    ring_state = (0, 0, 0)
    item = gl.program_id(0)
    # Without work, the values read are arbitrary, and not used.
    first_entry = entries + gl.where(item < num_items, item, 0) // KV_HEADS * _WORDS
    _, tile, start, stop, slot, query_start, query_len, seq_len = read_entry(first_entry)
    work = (item, tile, start, stop, slot, query_start, query_len, seq_len)
    query_MD = _load_query(query_THD, num_items, work, stride_token, shape, GROUP_OF_WARPS, COPY)
    while item < num_items:
        kv_head = item % KV_HEADS
        _, tile, start, stop, slot, query_start, query_len, seq_len = work
        # For the whole tile, because its two groups of warps share tiles of keys.
        low, high, first, last = tile_keys(tile, query_len, seq_len, GROUP, 2 * ROWS, shape.LEFT, shape.RIGHT)
        # An item without keys still has a tile, of an arbitrary block.
        high, written = gl.minimum(high, stop), gl.where(start < stop, seq_len, 0)
        first_row = tile * (2 * ROWS) + GROUP_OF_WARPS * ROWS

        operand_MD = gl.convert_layout(query_MD, QUERY)
        position_M = seq_len - query_len + (first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))) // GROUP

        span = start, stop, low, high, first, last, written
        sums_MD, sum_M, max_M, ring_state = _attend(
            operand_MD, rings, turns, ring_state, span, position_M, scale * LOG2_E, shape, GROUP_OF_WARPS, LAYOUT, OUT
        )
        # The next item's rows are loaded while this one's are written.
        work = _read_item(words, ring_state[0])
        query_MD = _load_query(query_THD, num_items, work, stride_token, shape, GROUP_OF_WARPS, COPY)

        row_M = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        token_M, head_M = token_and_head(row_M, kv_head, GROUP)
        factor_M = gl.where(sum_M > 0, 1.0, 0.0)
        if sinks is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
            if slot < 0:
                sink_M = gl.load(sinks + head_M) * LOG2_E
                new_max_M = gl.maximum(max_M, sink_M)
                factor_M = gl.exp2(max_M - new_max_M)
                sum_M = sum_M * factor_M + gl.exp2(sink_M - new_max_M)
                max_M = new_max_M
        factor_M = gl.where(sum_M > 0, factor_M / sum_M, 0.0)
        lse_M = gl.where(sum_M > 0, max_M + gl.log2(sum_M), -_INFINITY)
        sums_MD *= gl.convert_layout(factor_M, gl.SliceLayout(1, OUT))[:, None]
        if shape.SHARED_TOKENS > 0:
            # As `decode._after_prefixes` reads them. The slot of a whole result is -1 - level.
            offset = (slot * KV_HEADS + kv_head) * (2 * ROWS) + shape.CUT_ROW
            shared_row = (-1 - slot) * shape.SHARED_TOKENS + query_start
            place_M = gl.where(slot < 0, (shared_row + token_M) * (KV_HEADS * GROUP) + head_M + shape.WHOLE_ROW,
                               offset + row_M % (2 * ROWS))  # fmt: skip
            gl.store(partial_lse + place_M, lse_M, mask=token_M < query_len)
            place_M = gl.convert_layout(place_M, gl.SliceLayout(1, OUT))
            exists_M = gl.convert_layout(token_M < query_len, gl.SliceLayout(1, OUT))
            partial_ptrs = partial_out + place_M.to(gl.int64)[:, None] * HEAD_SIZE
            columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT))
            gl.store(partial_ptrs + columns[None, :], sums_MD, mask=exists_M[:, None])
        elif slot < 0:
            if lse_HT is not None:
                lse_ptrs = lse_HT + head_M.to(gl.int64) * stride_lse + query_start + token_M
                gl.store(lse_ptrs, lse_M * LN_2, mask=token_M < query_len)
            rounded_MD = gl.convert_layout(sums_MD.to(out_THD.dtype.element_ty), COPY)
            copied_M = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
            first_token = tile * (2 * ROWS) // GROUP
            offset_M = (copied_M // GROUP - first_token) * (KV_HEADS * GROUP) + kv_head * GROUP + copied_M % GROUP
            out = out_THD + (query_start + first_token).to(gl.int64) * (KV_HEADS * GROUP * HEAD_SIZE)
            out_ptrs = out + offset_M[:, None] * HEAD_SIZE + dim[None, :]
            gl.store(out_ptrs, rounded_MD, mask=(copied_M // GROUP < query_len)[:, None])
        else:
            scratch_row = (slot * KV_HEADS + kv_head) * (2 * ROWS) + GROUP_OF_WARPS * ROWS
            gl.store(partial_lse + scratch_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), lse_M)
            partial_M = scratch_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
            partial_ptrs = partial_out + partial_M.to(gl.int64)[:, None] * HEAD_SIZE
            gl.store(partial_ptrs + gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, OUT))[None, :], sums_MD)
        item, _, _, _, _, _, _, _ = work


@gluon.jit(do_not_specialize=["stride_table", "stride_lse"])
def _prefill_kernel(
    query_THD,
    cache,
    block_table,
    out_THD,
    lse_HT,
    sinks,
    header,
    entries,
    partial_out,
    partial_lse,
    stride_token,
    values_row,
    heads_of_block,
    stride_table,
    stride_lse,
    scale,
    PROGRAMS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    HEADS_OUTSIDE: gl.constexpr,
    CUT_ROW: gl.constexpr,
    WHOLE_ROW: gl.constexpr,
    SHARED_TOKENS: gl.constexpr,
    TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Attend a plan's items; `values_row` is the cache's first row of values, `heads_of_block` its heads with rows."""
    if PDL:
        let_next_kernel_start()
    SHAPE: gl.constexpr = _Shape(
        PROGRAMS, KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE, ROWS, LEFT, RIGHT, HEADS_OUTSIDE, CUT_ROW, WHOLE_ROW,
        SHARED_TOKENS, PDL,
    )  # fmt: skip
    SIZE: gl.constexpr = cache.block_type.shape[0]
    # Keys and values have the same pattern in shared memory as a box of the copy engine.
    keys = gl.allocate_shared_memory(cache.dtype, [TILES, 2 * SIZE, HEAD_SIZE], cache.layout)
    values = gl.allocate_shared_memory(cache.dtype, [2 * TILES, SIZE, HEAD_SIZE], cache.layout)
    # Both groups of warps read a stage before it is free.
    full, empty = make_barriers(TILES, 1), make_barriers(TILES, 2)
    turns = make_barriers(2, 1)
    fence_async_shared()
    # The entry of the item whose first keys are in a stage.
    words = gl.allocate_shared_memory(gl.int32, [TILES, _WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = (keys, values, words, full, empty)
    tensors = (query_THD, out_THD, lse_HT, sinks, header, entries, partial_out, partial_lse)
    strides = (stride_token, stride_lse)
    gl.warp_specialize(
        [
            (_run, (rings, turns, tensors, strides, scale, SHAPE, 0)),
            (_run, (rings, turns, tensors, strides, scale, SHAPE, 1)),
            (_load, (cache, rings, block_table, header, entries, values_row, heads_of_block, stride_table, SHAPE)),
        ],
        [4, 1],
        [240, 24],
    )
