"""Routing of tokens to experts: the router's product, the choice, and the lists of work for the experts' products.

Up to `ONE_LAUNCH_TOKENS` tokens take one launch. The product of a tile of tokens is split over experts and inputs. The
program of a tile that arrives last adds the parts in a fixed order and chooses; the last of all tiles makes the lists.
More tokens take two launches: one program a tile computes all logits and chooses, then one program a tile sorts its
pairs, after it has added the counts of all tiles.

    one launch     | tile 0: part 0, part 1, ... last chooses | tile 1 ... | last of all makes the lists
    two launches   | tile 0 | tile 1 | ...      then      | lists of tile 0 | lists of tile 1 | ...

Results depend neither on timing nor on the order of programs. Equal scores go to the lower expert. A logit that is not
a number comes last, so that a token always has k different experts, and only the weights of its own row are wrong.

Shapes: T tokens, E hidden size, X experts, k experts of a token; others are those of `expert_lists`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels import routing as rules
from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.experts.expert_lists import (
    LARGE_TILE,
    ONE_LAUNCH_TOKENS,
    PROGRAMS,
    TILE,
    ExpertLists,
)
from phonograph.kernels.triton.gemm.product_plan import rows_class
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

LEAST = tl.constexpr(rules.LEAST)
_EXPERTS, _INPUTS = 32, 128
"""Experts, and least inputs, of a program of a split product."""


def route(
    x_TE: torch.Tensor,
    router_OE: torch.Tensor,
    routing: Routing,
    lists: ExpertLists,
    *,
    block: int,
    router_bias_O: torch.Tensor | None = None,
    choice_bias_X: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
) -> None:
    """Choose the experts of each row, and list the work of the experts.

    Args:
        x_TE: input of the router.
        router_OE: weights of the router, O = X, or X + 1 if the last output is the gate of a shared expert.
        routing: rule of the choice.
        lists: receives the result.
        block: most pairs of an item, at least `TILE`.
        router_bias_O: added to the logits.
        choice_bias_X: float32, added to the scores for the choice only.
        num_rows: int32 [1], number of rows that are not padding; None for all. Padding has no pairs.
    """
    num_tokens, width = x_TE.shape
    outputs = router_OE.shape[0]
    assert block >= TILE and x_TE.stride(1) == router_OE.stride(1) == 1
    one_launch = num_tokens <= ONE_LAUNCH_TOKENS
    tile = TILE if one_launch else LARGE_TILE
    tiles = triton.cdiv(num_tokens, tile)
    expert_parts = triton.cdiv(outputs, _EXPERTS) if one_launch else 1
    # More tiles keep the GPU busy without parts of the inputs.
    input_parts = _input_parts(num_tokens, expert_parts, width) if one_launch else 1
    group_size = routing.num_experts // routing.num_groups
    shape = {
        "X": routing.num_experts,
        "K": routing.top_k,
        "TILE": tile,
        "XP": triton.next_power_of_2(routing.num_experts),
    }
    _route_kernel[(tiles, expert_parts * input_parts)](
        x_TE,
        router_OE,
        router_bias_O,
        choice_bias_X,
        num_rows,
        *lists,
        num_tokens,
        x_TE.stride(0),
        router_OE.stride(0),
        **shape,
        OUTPUTS=outputs,
        E=width,
        SPLIT_O=_EXPERTS if one_launch else max(16, triton.next_power_of_2(outputs)),
        INPUT_PARTS=input_parts,
        PARTS=expert_parts * input_parts,
        BLOCK_E=64 if one_launch else 32,
        SIGMOID=routing.sigmoid,
        RENORMALISED=routing.renormalised,
        SCALE=routing.scale,
        GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        GP=triton.next_power_of_2(routing.num_groups),
        SP=triton.next_power_of_2(group_size),
        BLOCK=block,
        ONE_LAUNCH=one_launch,
        **pdl_options(),
        num_warps=4,
    )
    if not one_launch:
        _list_kernel[(tiles,)](*lists, num_tokens, **shape, BLOCK=block, **pdl_options(), num_warps=4)


def _input_parts(num_tokens: int, expert_parts: int, width: int) -> int:
    """Return the parts of the inputs, one number for each `rows_class`: each is a kernel of its own."""
    programs = triton.cdiv(rows_class(num_tokens), TILE) * expert_parts
    wanted = min(PROGRAMS // programs, width // _INPUTS)
    return 16 if wanted >= 16 else 4 if wanted >= 4 else 1


@triton.jit
def _best(score, number, NUMBERS: tl.constexpr):
    """Return the highest score of each row [r, n], and the lowest number that has it."""
    best = tl.max(score, 1)
    return best, tl.min(tl.where(score == best[:, None], number[None, :], NUMBERS), 1)


@triton.jit
def _in_top_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr):
    """Return True for the experts [r, GP * SP] in the groups of a row with the highest sums of two scores."""
    ROWS: tl.constexpr = choice.shape[0]
    member = tl.arange(0, SP)
    grouped = tl.reshape(choice, (ROWS * GP, SP))
    first, at = _best(grouped, member, SP)
    second = tl.max(tl.where(member[None, :] == at[:, None], float("-inf"), grouped), 1)
    total = tl.where(second == float("-inf"), first, tl.maximum(first + second, LEAST))
    group = tl.arange(0, GP)
    total = tl.where(group[None, :] < GROUPS, tl.reshape(total, (ROWS, GP)), float("-inf"))
    chosen = tl.zeros((ROWS, GP), tl.int32)
    for _ in range(TOP_GROUPS):
        _, best = _best(total, group, GP)
        hit = group[None, :] == best[:, None]
        chosen = tl.where(hit, 1, chosen)
        total = tl.where(hit, float("-inf"), total)
    return tl.reshape(tl.broadcast_to(chosen[:, :, None], (ROWS, GP, SP)), (ROWS, GP * SP)) > 0


@triton.jit
def _partial_logits(x_ptr, router_ptr, x_stride, router_stride, row, valid, output, begin, end, shape):
    """Return the logits [rows, outputs] of the inputs from `begin` up to `end`."""
    OUTPUTS: tl.constexpr = shape[0]
    BLOCK_E: tl.constexpr = shape[1]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride
    router_ptrs = router_ptr + output.to(tl.int64)[None, :] * router_stride
    sums = tl.zeros((row.shape[0], output.shape[0]), tl.float32)
    for start in range(begin, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        x = tl.load(x_ptrs + e[None, :], valid[:, None] & (e < end)[None, :], other=0.0)
        router = tl.load(router_ptrs + e[:, None], (output < OUTPUTS)[None, :] & (e < end)[:, None], other=0.0)
        sums = tl.dot(x, router, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    x_ptr,
    router_ptr,
    router_bias_ptr,
    choice_bias_ptr,
    num_rows_ptr,
    experts_ptr,
    weights_ptr,
    shared_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    counts_ptr,
    partials_ptr,
    arrived_ptr,
    T,
    x_stride,
    router_stride,
    X: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    XP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    E: tl.constexpr,
    SPLIT_O: tl.constexpr,
    INPUT_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISED: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tile * TILE + tl.arange(0, TILE)
    num_rows = T
    if num_rows_ptr is not None:
        num_rows = tl.minimum(tl.load(num_rows_ptr), T)
    valid = row < num_rows
    output = part // INPUT_PARTS * SPLIT_O + tl.arange(0, SPLIT_O)
    steps: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    begin = part % INPUT_PARTS * steps // INPUT_PARTS * BLOCK_E
    end = tl.minimum((part % INPUT_PARTS + 1) * steps // INPUT_PARTS * BLOCK_E, E)
    sums = _partial_logits(
        x_ptr, router_ptr, x_stride, router_stride, row, valid, output, begin, end, (OUTPUTS, BLOCK_E)
    )  # fmt: skip
    # Logits pass through memory, which puts groups of experts into the order of `_in_top_groups`.
    size = T * OUTPUTS
    at = part % INPUT_PARTS * size + row[:, None] * OUTPUTS + output[None, :]
    tl.store(partials_ptr + at, sums, valid[:, None] & (output < OUTPUTS)[None, :])
    tl.debug_barrier()
    if PARTS > 1:
        arrived = tl.atomic_add(arrived_ptr + 1 + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < PARTS - 1:
            return
        tl.store(arrived_ptr + 1 + tile, 0)

    place = tl.arange(0, GP * SP)
    expert = place // SP * (X // GROUPS) + place % SP
    exists = (place % SP < X // GROUPS) & (place // SP < GROUPS)
    mask = valid[:, None] & exists[None, :]
    logits = tl.zeros((TILE, GP * SP), tl.float32)
    for other in range(INPUT_PARTS):
        # Bypasses the L1 cache, which may hold older values.
        ptrs = partials_ptr + other * size + row[:, None] * OUTPUTS + expert[None, :]
        logits += tl.load(ptrs, mask, other=0.0, cache_modifier=".cg")
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + expert, exists, other=0.0).to(tl.float32)[None, :]
    if SIGMOID:
        score = tl.sigmoid(logits)
        choice = score
    else:
        high = tl.max(tl.where(exists[None, :], logits, float("-inf")), 1)
        power = tl.where(exists[None, :], tl.exp(logits - high[:, None]), 0.0)
        score = power / tl.sum(power, 1)[:, None]
        choice = logits
    if choice_bias_ptr is not None:
        choice += tl.load(choice_bias_ptr + expert, exists, other=0.0)[None, :]
    choice = tl.where(choice >= LEAST, choice, LEAST)
    choice = tl.where(exists[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = tl.where(_in_top_groups(choice, GROUPS, TOP_GROUPS, GP, SP), choice, float("-inf"))

    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    experts = tl.zeros((TILE, triton.next_power_of_2(K)), tl.int32)
    weights = tl.zeros((TILE, triton.next_power_of_2(K)), tl.float32)
    chosen = tl.zeros((TILE, GP * SP), tl.int32)
    for j in range(K):
        _, best = _best(choice, expert, X)
        hit = (expert[None, :] == best[:, None]) & exists[None, :]
        chosen = tl.where(hit, 1, chosen)
        choice = tl.where(hit, float("-inf"), choice)
        experts = tl.where(column == j, best[:, None], experts)
        weights = tl.where(column == j, tl.sum(tl.where(hit, score, 0.0), 1)[:, None], weights)
    if RENORMALISED:
        weights = weights / tl.sum(weights, 1)[:, None]
    own = (row < T)[:, None] & (column < K)
    tl.store(experts_ptr + row[:, None] * K + column, tl.where(valid[:, None], experts, -1), own)
    tl.store(weights_ptr + row[:, None] * K + column, weights * SCALE, own)
    if OUTPUTS > X:
        gate = tl.zeros((TILE,), tl.float32)
        for other in range(INPUT_PARTS):
            gate += tl.load(partials_ptr + other * size + row * OUTPUTS + X, valid, other=0.0, cache_modifier=".cg")
        if router_bias_ptr is not None:
            gate += tl.load(router_bias_ptr + X).to(tl.float32)
        tl.store(shared_ptr + row, tl.sigmoid(gate), valid)
    count = tl.sum(tl.where(valid[:, None], chosen, 0), 0)
    tl.store(counts_ptr + tile * X + expert, count, exists)
    if ONE_LAUNCH:
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            tl.store(arrived_ptr, 0)
            tiles = tl.num_programs(0)
            offset = _offsets(counts_ptr, items_ptr, num_items_ptr, tiles, tiles, True, (X, XP, BLOCK))
            for each in range(0, tiles):
                offset += _sort(experts_ptr, pairs_ptr, offset, each, T, (XP, K, TILE))


@triton.jit
def _offsets(counts_ptr, items_ptr, num_items_ptr, before, tiles, writes_items, shape):
    """Return the place of each expert's first pair [XP], after its pairs of the tiles up to `before`.

    With `before` equal to `tiles` no pairs are skipped. Writes the items too if `writes_items`.
    """
    X: tl.constexpr = shape[0]
    XP: tl.constexpr = shape[1]
    BLOCK: tl.constexpr = shape[2]
    expert = tl.arange(0, XP)
    total = tl.zeros((XP,), tl.int32)
    earlier = tl.zeros((XP,), tl.int32)
    for start in range(0, tiles, 16):
        tile = start + tl.arange(0, 16)
        mask = (tile < tiles)[:, None] & (expert < X)[None, :]
        counts = tl.load(counts_ptr + tile[:, None] * X + expert[None, :], mask, other=0, cache_modifier=".cg")
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where((tile < before)[:, None], counts, 0), 0)
    first = tl.cumsum(total, 0) - total
    if writes_items:
        blocks = (total + BLOCK - 1) // BLOCK
        item = tl.cumsum(blocks, 0) - blocks
        for block in range(0, tl.max(blocks, 0)):
            ptrs = items_ptr + (item + block) * 3
            has = block < blocks
            tl.store(ptrs, expert, has)
            tl.store(ptrs + 1, first + block * BLOCK, has)
            tl.store(ptrs + 2, tl.minimum(total - block * BLOCK, BLOCK), has)
        tl.store(num_items_ptr, tl.sum(blocks, 0))
    return first + tl.where(before < tiles, earlier, 0)


@triton.jit
def _sort(experts_ptr, pairs_ptr, offset, tile, T, shape):
    """Write the pairs of a tile from `offset` [XP] on, and return their numbers [XP]."""
    XP: tl.constexpr = shape[0]
    K: tl.constexpr = shape[1]
    TILE: tl.constexpr = shape[2]
    row = tile * TILE + tl.arange(0, TILE)
    expert = tl.arange(0, XP)
    # One more than the number of the expert among those of the token; 0 for none.
    rank = tl.zeros((TILE, XP), tl.int32)
    for j in range(K):
        chosen = tl.load(experts_ptr + row * K + j, row < T, other=-1, cache_modifier=".cg")
        rank = tl.where(chosen[:, None] == expert[None, :], j + 1, rank)
    has = (rank > 0).to(tl.int32)
    place = offset[None, :] + tl.cumsum(has, 0) - 1
    tl.store(pairs_ptr + place, row[:, None] * K + rank - 1, has > 0)
    return tl.sum(has, 0)


@triton.jit(do_not_specialize=["T"])
def _list_kernel(
    experts_ptr,
    weights_ptr,
    shared_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    counts_ptr,
    partials_ptr,
    arrived_ptr,
    T,
    X: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    XP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    offset = _offsets(counts_ptr, items_ptr, num_items_ptr, tile, tiles, tile == 0, (X, XP, BLOCK))
    _sort(experts_ptr, pairs_ptr, offset, tile, T, (XP, K, TILE))
