"""Routing of tokens to experts: the router's product, the choice, and the lists of work for the experts' products.

The product of a tile of tokens is split over experts and inputs. The program of a tile that arrives last adds the parts
in a fixed order and chooses; it keeps a mask for each expert, with the bit of each token that has the expert. A pair's
place in the lists follows from masks alone: pairs of lower experts, pairs of the expert in lower tiles, and the bits
below its own. Up to `ONE_LAUNCH_TOKENS` tokens, the last program of all makes the lists of all tiles. If one tile has
few pairs, its program compares them with each other, without masks. For more tokens, programs multiply more rows by
more experts, so that few read the same rows and the same weights, and a program of a second launch makes the lists of a
few tiles.

    one launch     | tile 0: part 0, part 1, ... last chooses | tile 1 ... | last of all makes the lists
    two launches   | tiles 0, 1: part 0, ... last chooses | tiles 2, 3 ... |  then  | lists of tiles 0 to 3 | 4 to 7 ...

Results depend neither on timing nor on the order of programs. Equal scores go to the lower expert. A logit that is not
a number comes last, so that a token always has k different experts, and only the weights of its own row are wrong.

Shapes: T tokens, E hidden size, X experts, k experts of a token; see `expert_lists` for others.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.experts.choose_experts import (
    choice_constants,
    choose_experts,
    expert_places,
    load_logits,
)
from phonograph.kernels.triton.experts.expert_lists import (
    EXPERTS,
    LARGE_TILE,
    LEAST_BLOCK,
    LIST_TILES,
    MOST_EXPERTS,
    ONE_LAUNCH_TOKENS,
    PROGRAMS,
    SMALL_TILE,
    SMALL_TILES_TOKENS,
    TILE,
    ExpertLists,
    aligned,
)
from phonograph.kernels.triton.experts.list_few_pairs import MOST_LISTED, MOST_PAIRS, list_few_pairs
from phonograph.kernels.triton.gemm.product_plan import rows_class
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_let_next_start, pdl_options, pdl_wait

_INPUTS = 128
"""Inputs of a step of the product (half of them with float32 in two launches), and least inputs of a program."""
_ROWS, _LEAST_STEPS = 64, 4
"""Rows of a program of two launches, and least steps of its product."""
_REGISTERS = 128
"""Registers of a thread in one launch: two programs a multiprocessor, and most parts of logits are loaded at once."""
MOST_MASKS = tl.constexpr(8192)
"""Masks that a program of the second launch reads at once."""
_PAIRS = 2048
"""Most pairs that a program places at once."""


def route(
    x_TE: torch.Tensor,
    router_OE: torch.Tensor,
    routing: Routing,
    lists: ExpertLists,
    *,
    block: int,
    router_bias_O: torch.Tensor | None = None,
    choice_bias_X: torch.Tensor | None = None,
    expert_scale_X: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
) -> None:
    """Choose the experts of each row, and list the work of the experts.

    Args:
        x_TE: input of the router.
        router_OE: weights of the router, O = X, or X + 1 if the last output is the gate of a shared expert.
        routing: rule of the choice.
        lists: receives the result.
        block: most pairs of an item, at least `LEAST_BLOCK`.
        router_bias_O: added to the logits.
        choice_bias_X: float32, added to the scores for the choice only.
        expert_scale_X: float32, factor of each expert's weight.
        num_rows: int32 [1], number of rows that are not padding; None for all. Padding has no pairs.
    """
    num_tokens, width = x_TE.shape
    outputs = router_OE.shape[0]
    assert block >= LEAST_BLOCK and x_TE.stride(1) == router_OE.stride(1) == 1
    one_launch = num_tokens <= ONE_LAUNCH_TOKENS
    rows = max(rows_class(num_tokens), SMALL_TILE)
    pairs = rows * triton.next_power_of_2(routing.top_k)
    few_pairs = one_launch and rows <= TILE and pairs <= MOST_PAIRS and routing.num_experts <= MOST_LISTED
    small = SMALL_TILE if rows <= SMALL_TILES_TOKENS else TILE
    tile = rows if few_pairs else small if one_launch else LARGE_TILE
    experts = EXPERTS if one_launch else max(EXPERTS, min(MOST_EXPERTS, triton.next_power_of_2(outputs)))
    program_rows = tile if one_launch else _ROWS
    expert_parts = triton.cdiv(outputs, experts)
    least_inputs = _INPUTS if one_launch else _LEAST_STEPS * _INPUTS
    input_parts = _input_parts(triton.cdiv(rows, tile) * expert_parts, width // least_inputs)
    stride = aligned(outputs)
    assert input_parts * num_tokens * stride <= lists.partials.numel()
    shape = list_constants(routing, tile, rows if one_launch else LIST_TILES * tile, block)
    _route_kernel[(triton.cdiv(num_tokens, program_rows), expert_parts * input_parts)](
        x_TE,
        router_OE,
        router_bias_O,
        choice_bias_X,
        expert_scale_X,
        num_rows,
        *lists,
        num_tokens,
        x_TE.stride(0),
        router_OE.stride(0),
        OUTPUTS=outputs,
        STRIDE=stride,
        E=width,
        ROWS=program_rows,
        SPLIT_O=experts,
        INPUT_PARTS=input_parts,
        PARTS=expert_parts * input_parts,
        BLOCK_E=_INPUTS if one_launch else 2 * _INPUTS // x_TE.element_size(),
        **choice_constants(routing),
        ONE_LAUNCH=one_launch,
        TILES=triton.cdiv(rows, tile) if one_launch else 0,
        FEW_PAIRS=few_pairs,
        **shape,
        **pdl_options(),
        num_warps=8,
        maxnreg=_REGISTERS if one_launch else None,
    )
    if not one_launch:
        list_pairs(lists, num_tokens, shape)


def list_constants(routing: Routing, tile: int, rows: int, block: int) -> dict[str, Any]:
    """Return the constants of kernels that make lists, for programs that place the pairs of `rows` tokens."""
    return {
        "X": routing.num_experts,
        "K": routing.top_k,
        "SHARED": int(routing.shared),
        "TILE": tile,
        "XP": triton.next_power_of_2(routing.num_experts),
        "BLOCK": block,
        "PAIRS": min(triton.next_power_of_2(rows * routing.num_pairs), _PAIRS),
    }


def list_pairs(lists: ExpertLists, num_tokens: int, shape: dict[str, Any]) -> None:
    """Write pairs and items of T tokens, whose experts and masks of tiles are there, with the `list_constants`."""
    _list_kernel[(triton.cdiv(num_tokens, LIST_TILES * shape["TILE"]),)](
        lists.experts_Tk,
        lists.pairs_P,
        lists.items_I3,
        lists.num_items,
        lists.masks_NX,
        lists.starts_NX,
        num_tokens,
        **shape,
        LIST_TILES=LIST_TILES,
        **pdl_options(),
        num_warps=8,
    )


def _input_parts(programs: int, most: int) -> int:
    """Return into how many parts the inputs are split, for a product of that many programs.

    Each number is compiled as a separate kernel.
    """
    wanted = min(PROGRAMS // programs, most)
    return 16 if wanted >= 16 else 4 if wanted >= 4 else 1


@triton.jit
def _num_bits(mask):
    """Return the number of bits of a uint32 that are 1."""
    mask = mask - ((mask >> 1) & 0x55555555)
    mask = (mask & 0x33333333) + ((mask >> 2) & 0x33333333)
    mask = (mask + (mask >> 4)) & 0x0F0F0F0F
    return ((mask * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    x_ptr,
    router_ptr,
    router_bias_ptr,
    choice_bias_ptr,
    expert_scale_ptr,
    num_rows_ptr,
    experts_ptr,
    weights_ptr,
    shared_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    masks_ptr,
    starts_ptr,
    partials_ptr,
    arrived_ptr,
    T,
    x_stride,
    router_stride,
    X: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    XP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STRIDE: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_O: tl.constexpr,
    INPUT_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISED: tl.constexpr,
    SCALE: tl.constexpr,
    LOGIT_FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    TILES: tl.constexpr,
    FEW_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_let_next_start(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    output = part // INPUT_PARTS * SPLIT_O + tl.arange(0, SPLIT_O)
    steps: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    begin = part % INPUT_PARTS * steps // INPUT_PARTS * BLOCK_E
    end = tl.minimum((part % INPUT_PARTS + 1) * steps // INPUT_PARTS * BLOCK_E, E)
    router_ptrs = router_ptr + output.to(tl.int64)[None, :] * router_stride
    is_output = (output < OUTPUTS)[None, :]
    if ONE_LAUNCH:
        e = begin + tl.arange(0, BLOCK_E)
        # Weights are constants, so the first step's come before the wait.
        router = tl.load(router_ptrs + e[:, None], is_output & (e < end)[:, None], other=0.0)
    pdl_wait(PDL)
    # Tensor cores multiply at least 16 rows.
    index = tl.arange(0, 16 if ROWS < 16 else ROWS)
    x_row = tile * ROWS + index
    num_rows = T
    if num_rows_ptr is not None:
        num_rows = tl.minimum(tl.load(num_rows_ptr), T)
    has_row = (x_row < num_rows) & (index < ROWS)
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * x_stride
    if ONE_LAUNCH:
        x = tl.load(x_ptrs + e[None, :], has_row[:, None] & (e < end)[None, :], other=0.0)
        sums = tl.dot(x, router, input_precision="ieee")
        begin += BLOCK_E
    else:
        sums = tl.zeros((ROWS, SPLIT_O), tl.float32)
    if not ONE_LAUNCH or steps > INPUT_PARTS:
        for start in range(begin, end, BLOCK_E):
            e = start + tl.arange(0, BLOCK_E)
            x = tl.load(x_ptrs + e[None, :], has_row[:, None] & (e < end)[None, :], other=0.0)
            router = tl.load(router_ptrs + e[:, None], is_output & (e < end)[:, None], other=0.0)
            sums = tl.dot(x, router, sums, input_precision="ieee")
    # Logits pass through memory, which puts groups of experts into the order of `_in_top_groups`.
    # Their rows begin at addresses that are loaded as vectors, also with the gate of a shared expert.
    size = T * STRIDE
    at = part % INPUT_PARTS * size + x_row[:, None] * STRIDE + output[None, :]
    tl.store(partials_ptr + at, sums, has_row[:, None] & is_output)
    tl.debug_barrier()
    if PARTS > 1:
        arrived = tl.atomic_add(arrived_ptr + 1 + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < PARTS - 1:
            return
        tl.store(arrived_ptr + 1 + tile, 0)

    place, expert, exists = expert_places(X, GROUPS, GP, SP)
    # A choice of more rows at once would spill registers.
    for half in range(ROWS // TILE):
        row = tile * ROWS + half * TILE + tl.arange(0, TILE)
        valid = row < num_rows
        gates = ()
        if OUTPUTS > X:
            for other in tl.static_range(INPUT_PARTS):
                ptrs = partials_ptr + other * size + row * STRIDE + X
                gates += (tl.load(ptrs, valid, other=0.0, cache_modifier=".cg"),)
        logits = load_logits(partials_ptr + row * STRIDE, valid, size, INPUT_PARTS, X, GROUPS, GP, SP)
        if OUTPUTS > X:
            gate = tl.zeros((TILE,), tl.float32)
            for other in tl.static_range(INPUT_PARTS):
                gate += gates[other]
            if router_bias_ptr is not None:
                gate += tl.load(router_bias_ptr + X).to(tl.float32)
            tl.store(shared_ptr + row, tl.sigmoid(gate), valid)
        experts, weights, chosen = choose_experts(
            logits, place, expert, exists, router_bias_ptr, choice_bias_ptr, expert_scale_ptr,
            tl.minimum(T, 1), (X, K, SIGMOID, RENORMALISED, SCALE, LOGIT_FACTOR, GROUPS, TOP_GROUPS, GP, SP),
        )  # fmt: skip
        column = tl.arange(0, triton.next_power_of_2(K))[None, :]
        own = (row < T)[:, None] & (column < K)
        tl.store(experts_ptr + row[:, None] * (K + SHARED) + column, tl.where(valid[:, None], experts, -1), own)
        tl.store(weights_ptr + row[:, None] * (K + SHARED) + column, weights, own)
        if SHARED:
            pair = row * (K + 1) + K
            tl.store(experts_ptr + pair, tl.where(valid, X, -1), row < T)
            tl.store(weights_ptr + pair, tl.sigmoid(gate) if OUTPUTS > X else 1.0, row < T)
        if FEW_PAIRS:
            list_few_pairs(experts, row, num_rows, pairs_ptr, items_ptr, num_items_ptr, X, K, SHARED, BLOCK)
        else:
            chosen = (valid[:, None] & chosen).to(tl.uint32)
            mask = tl.sum(chosen << tl.arange(0, TILE).to(tl.uint32)[:, None], 0)
            tl.store(masks_ptr + (tile * (ROWS // TILE) + half) * X + expert, mask.to(tl.int32, bitcast=True), exists)
    if ONE_LAUNCH and not FEW_PAIRS:
        tl.debug_barrier()
        tiles = tl.num_programs(0)
        last = True
        if TILES > 1:
            last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tiles - 1
        if last:
            tl.store(arrived_ptr, 0)
            _list_tiles(
                experts_ptr, pairs_ptr, items_ptr, num_items_ptr, masks_ptr, starts_ptr, tiles, T,
                (X, K, TILE, XP, BLOCK, PAIRS, SHARED, TILES),
            )  # fmt: skip


@triton.jit
def _list_tiles(
    experts_ptr, pairs_ptr, items_ptr, num_items_ptr, masks_ptr, starts_ptr, tiles, T, shape
):  # fmt: skip
    """Write the items, and the pairs of all tiles."""
    X: tl.constexpr = shape[0]
    K: tl.constexpr = shape[1] + shape[6]
    XP: tl.constexpr = shape[3]
    PAIRS: tl.constexpr = shape[5]
    TILES: tl.constexpr = shape[7]
    tile, expert = tl.arange(0, TILES), tl.arange(0, XP)
    at = tile[:, None] * X + expert[None, :]
    has = (tile < tiles)[:, None] & (expert < X)[None, :]
    counts = _counts(masks_ptr + at, has)
    total = tl.sum(counts, 0)
    first = tl.cumsum(total, 0) - total
    _write_items(first, total, items_ptr, num_items_ptr, shape)
    num_routed = tl.sum(total, 0)
    tl.store(starts_ptr + at, first[None, :] + tl.cumsum(counts, 0) - counts, has)
    tl.debug_barrier()
    for begin in range(0, T * K, PAIRS):
        _write_pairs(experts_ptr, pairs_ptr, masks_ptr, starts_ptr, num_routed, begin, T * K, shape)


@triton.jit
def _counts(ptrs, has):
    """Return the bits of masks in memory, which other programs wrote."""
    return _num_bits(tl.load(ptrs, has, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True))


@triton.jit
def _write_items(first, total, items_ptr, num_items_ptr, shape):
    """Write the items of experts with `total` [XP] pairs from `first` on."""
    BLOCK: tl.constexpr = shape[4]
    expert = tl.arange(0, shape[3])
    blocks = (total + BLOCK - 1) // BLOCK
    item = tl.cumsum(blocks, 0) - blocks
    for block in range(0, tl.max(blocks, 0)):
        ptrs = items_ptr + (item + block) * 3
        has = block < blocks
        tl.store(ptrs, expert, has)
        tl.store(ptrs + 1, first + block * BLOCK, has)
        tl.store(ptrs + 2, tl.minimum(total - block * BLOCK, BLOCK), has)
    num_items = tl.sum(blocks, 0)
    if shape[6]:
        # Each token has k pairs of others.
        start = tl.sum(total, 0)
        tokens = start // shape[1]
        for begin in range(0, tokens, BLOCK):
            ptrs = items_ptr + num_items * 3
            tl.store(ptrs, shape[0])
            tl.store(ptrs + 1, start + begin)
            tl.store(ptrs + 2, tl.minimum(tokens - begin, BLOCK))
            num_items += 1
    tl.store(num_items_ptr, num_items)


@triton.jit
def _write_pairs(experts_ptr, pairs_ptr, masks_ptr, starts_ptr, num_routed, begin, end, shape):
    """Write the pairs from `begin` on to their places.

    A pair comes after the pairs of the same expert in lower tiles, and in lower rows of its tile. Pairs of a shared
    expert follow the `num_routed` others.
    """
    X: tl.constexpr = shape[0]
    K: tl.constexpr = shape[1] + shape[6]
    TILE: tl.constexpr = shape[2]
    pair = begin + tl.arange(0, shape[5])
    row = pair // K
    expert = tl.load(experts_ptr + pair, pair < end, other=-1, cache_modifier=".cg")
    has = expert >= 0
    if shape[6]:
        tl.store(pairs_ptr + num_routed + row, pair, expert == X)
        has = has & (expert < X)
    at = row // TILE * X + expert
    mask = tl.load(masks_ptr + at, has, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    start = tl.load(starts_ptr + at, has, other=0, cache_modifier=".cg")
    bit = tl.full(row.shape, 1, tl.uint32) << (row % TILE).to(tl.uint32)
    tl.store(pairs_ptr + start + _num_bits(mask & (bit - 1)), pair, has)


@triton.jit(do_not_specialize=["T"])
def _list_kernel(
    experts_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    masks_ptr,
    starts_ptr,
    T,
    X: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    XP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    LIST_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    own, tiles = tl.program_id(0) * LIST_TILES, tl.cdiv(T, TILE)
    shape: tl.constexpr = (X, K, TILE, XP, BLOCK, PAIRS, SHARED)
    TILES: tl.constexpr = MOST_MASKS // XP
    expert = tl.arange(0, XP)
    # Sums over warps follow the loop.
    total = tl.zeros((TILES, XP), tl.int32)
    earlier = tl.zeros((TILES, XP), tl.int32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        has = (tile < tiles)[:, None] & (expert < X)[None, :]
        counts = _counts(masks_ptr + tile[:, None] * X + expert[None, :], has)
        total += counts
        earlier += tl.where((tile < own)[:, None], counts, 0)
    total = tl.sum(total, 0)
    first = tl.cumsum(total, 0) - total
    if own == 0:
        _write_items(first, total, items_ptr, num_items_ptr, shape)
    tile = own + tl.arange(0, LIST_TILES)
    at, has = tile[:, None] * X + expert[None, :], (tile < tiles)[:, None] & (expert < X)[None, :]
    counts = _counts(masks_ptr + at, has)
    tl.store(starts_ptr + at, (first + tl.sum(earlier, 0))[None, :] + tl.cumsum(counts, 0) - counts, has)
    tl.debug_barrier()
    num_routed = tl.sum(total, 0)
    begin, end = own * TILE * (K + SHARED), tl.minimum((own + LIST_TILES) * TILE, T) * (K + SHARED)
    for place in range(begin, end, PAIRS):
        _write_pairs(experts_ptr, pairs_ptr, masks_ptr, starts_ptr, num_routed, place, end, shape)
