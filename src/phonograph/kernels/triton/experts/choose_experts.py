"""Choice of a token's experts from the logits of a router: the `Routing` as a part of kernels.

Equal scores go to the lower expert. A logit that is not a number comes last, so that a token always has k different
experts, and only the weights of its own row are wrong.

Shapes: r tokens of a program, X experts in groups of equal size; n places of experts, whose groups and members are each
rounded up to a power of two; k experts of a token.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from phonograph.kernels import routing as rules
from phonograph.kernels.routing import Routing

LEAST = tl.constexpr(rules.LEAST)
_NO_KEY = tl.constexpr(-(1 << 63))
"""Key of what cannot be chosen."""
_LAST = tl.constexpr((1 << 31) - 1)


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
    expert = place // SP * (X // GROUPS) + place % SP
    return place, expert, (place % SP < X // GROUPS) & (place // SP < GROUPS)


@triton.jit
def choose_experts(logits, place, expert, exists, router_bias_ptr, choice_bias_ptr, expert_scale_ptr, shape):
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
    keys = _keys(choice, place, allowed)
    places = tl.zeros((logits.shape[0], triton.next_power_of_2(K)), tl.int32)
    for j in range(K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], _NO_KEY, keys)
        places = tl.where(column == j, ((best & _LAST) ^ _LAST).to(tl.int32)[:, None], places)
    experts = places // SP * (X // GROUPS) + places % SP
    weights = tl.where(column < K, tl.gather(score, places, 1), 0.0)
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
def _keys(choice, place, allowed):
    """Return keys [r, n], int64, in the order of scores, and of equal ones the lower place first."""
    # No score is -0.0, because sums begin with 0.0.
    bits = choice.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (place ^ _LAST)[None, :].to(tl.int64)
    return tl.where(allowed, keys, _NO_KEY)
