"""Choice of a token's experts from the logits of a router: the `Routing` as a part of kernels.

Equal scores go to the lower expert. A logit that is not a number comes last, so that a token always has k different
experts, and only the weights of its own row are wrong.

Shapes: r tokens of a program, X experts in groups of equal size; n places of experts, whose groups and members are each
rounded up to a power of two; k experts of a token.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from phonograph.kernels import routing as rules
from phonograph.kernels.routing import Routing

LEAST = tl.constexpr(rules.LEAST)
_NO_KEY = tl.constexpr(-(1 << 31))
"""Key of what cannot be chosen."""


def choice_constants(routing: Routing) -> dict[str, Any]:
    """Return the constants of a routing for a kernel that calls `choose_experts`."""
    return {
        "SIGMOID": routing.sigmoid,
        "RENORMALISED": routing.renormalised,
        "SCALE": routing.scale,
        "LOGIT_FACTOR": routing.logit_factor,
        "GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "GP": triton.next_power_of_2(routing.num_groups),
        "SP": triton.next_power_of_2(routing.num_experts // routing.num_groups),
    }


@triton.jit
def expert_places(X: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr):
    """Return the places [n], the expert of each, and False where a place has none."""
    place = tl.arange(0, GP * SP)
    expert, exists = _experts_at(place, X, GROUPS, SP)
    return place, expert, exists


@triton.jit
def _experts_at(place, X: tl.constexpr, GROUPS: tl.constexpr, SP: tl.constexpr):
    """Return the expert of each place, and False where it has none."""
    return place // SP * (X // GROUPS) + place % SP, (place % SP < X // GROUPS) & (place // SP < GROUPS)


@triton.jit
def load_logits(
    rows, has_row, size, PARTS: tl.constexpr,
    X: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Return the sums [r, n] of the parts of logits in memory, which other programs wrote, by place.

    With as many rows as warps each warp has a row, so that choices need no shared memory. Constants are those of
    `choice_constants`.

    Args:
        rows: pointers to the first part of each row [r].
        has_row: False for rows of zeros.
        size: words of a part.
        PARTS: number of parts, added in their order.
        X: number of experts.
        GROUPS: number of groups.
        GP: the same up to a power of two.
        SP: experts of a group up to a power of two.
    """
    R: tl.constexpr = rows.shape[0]
    N: tl.constexpr = GP * SP
    # A load takes four places at most, so a lane has its places by several.
    LOADS: tl.constexpr = 1 if N <= 128 else 2 if N == 256 else 4
    WIDTH: tl.constexpr = 4 if LOADS > 1 else N // 32 if N >= 32 else 1
    LANES: tl.constexpr = N // LOADS // WIDTH
    lane = tl.arange(0, LANES)[:, None] * (LOADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    loaded = ()
    for load in tl.static_range(LOADS):
        place = lane + load * WIDTH
        # Lanes come first, since of dimensions without contiguous numbers a warp takes the first.
        expert, exists = _experts_at(place, X, GROUPS, SP)
        ptrs = rows[None, :, None] + expert[:, None, :]
        mask = has_row[None, :, None] & exists[:, None, :]
        logits = tl.zeros((LANES, R, WIDTH), tl.float32)
        for part in tl.static_range(PARTS):
            # Bypasses the L1 cache, which may hold older values.
            logits += tl.load(ptrs + part * size, mask, other=0.0, cache_modifier=".cg")
        loaded += (logits,)
    if LOADS == 1:
        joined = tl.permute(loaded[0], (1, 0, 2))
    elif LOADS == 2:
        joined = tl.permute(tl.join(loaded[0], loaded[1]), (1, 0, 3, 2))
    else:
        pairs = tl.join(tl.join(loaded[0], loaded[2]), tl.join(loaded[1], loaded[3]))
        joined = tl.permute(pairs, (1, 0, 3, 4, 2))
    return tl.reshape(joined, (R, N))


@triton.jit
def choose_experts(logits, place, expert, exists, router_bias_ptr, choice_bias_ptr, expert_scale_ptr, one, shape):
    """Return experts [r, k] by falling score, their weights [r, k], and the choice as a mask [r, n].

    Both have columns up to a power of two.

    Args:
        logits: float32 [r, n], products of the router.
        place: of `expert_places`.
        expert: of `expert_places`.
        exists: of `expert_places`.
        router_bias_ptr: added to the logits, or None.
        choice_bias_ptr: added to the scores for the choice only, or None.
        expert_scale_ptr: factor of each expert's weight, or None.
        one: 1, as a number that the compiler does not know, so that the choice stays a loop of little code.
        shape: constants X, K, and those of `choice_constants` in their order.
    """
    X: tl.constexpr = shape[0]
    K: tl.constexpr = shape[1]
    SIGMOID: tl.constexpr = shape[2]
    RENORMALISED: tl.constexpr = shape[3]
    SCALE: tl.constexpr = shape[4]
    LOGIT_FACTOR: tl.constexpr = shape[5]
    GROUPS: tl.constexpr = shape[6]
    TOP_GROUPS: tl.constexpr = shape[7]
    GP: tl.constexpr = shape[8]
    SP: tl.constexpr = shape[9]
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + expert, exists, other=0.0).to(tl.float32)[None, :]
    if LOGIT_FACTOR != 1.0:
        logits *= LOGIT_FACTOR
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
    allowed = tl.broadcast_to(exists[None, :], choice.shape)
    choice = tl.where(choice >= LEAST, choice, LEAST)  # what is not a number comes last
    if GROUPS > 1:
        by_group = tl.where(allowed, choice, float("-inf"))
        allowed = allowed & _in_top_groups(by_group, GROUPS, TOP_GROUPS, GP, SP)

    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    keys = _keys(choice, allowed)
    words = score.to(tl.int32, bitcast=True)
    places = tl.zeros((logits.shape[0], triton.next_power_of_2(K)), tl.int32)
    weights = tl.zeros((logits.shape[0], triton.next_power_of_2(K)), tl.int32)
    for j in range(0, K, one):
        # Warps have one instruction for the maximum of 32 integers.
        best = tl.max(keys, 1)
        found = tl.min(tl.where(keys == best[:, None], place[None, :], GP * SP), 1)
        hit = place[None, :] == found[:, None]
        keys = tl.where(hit, _NO_KEY, keys)
        places = tl.where(column == j, found[:, None], places)
        weights = tl.where(column == j, tl.max(tl.where(hit, words, _NO_KEY), 1)[:, None], weights)
    experts, _ = _experts_at(places, X, GROUPS, SP)
    weights = weights.to(tl.float32, bitcast=True)
    if RENORMALISED:
        weights = weights / tl.sum(weights, 1)[:, None]
    if expert_scale_ptr is not None:
        weights *= tl.load(expert_scale_ptr + experts)
    return experts, weights * SCALE, allowed & (keys == _NO_KEY)


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
def _keys(choice, allowed):
    """Return keys [r, n], int32, in the order of scores."""
    # No score is -0.0, because sums begin with 0.0.
    bits = choice.to(tl.int32, bitcast=True)
    return tl.where(allowed, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NO_KEY)
