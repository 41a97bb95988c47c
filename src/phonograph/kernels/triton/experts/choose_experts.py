"""Choice of a token's experts from the logits of a router: the `Routing` as a part of kernels.

Equal scores go to the lower expert. A logit that is not a number comes last, so that a token always has k different
experts, and only the weights of its own row are wrong.

Shapes: r tokens of a program, X experts in groups of equal size; n places of experts, whose groups and members are each
rounded up to a power of two; k experts of a token.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels import routing as rules

LEAST = tl.constexpr(rules.LEAST)
_NO_KEY = tl.constexpr(-(1 << 63))
"""Key of what cannot be chosen."""
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def choose_experts(logits, place, expert, exists, choice_bias_ptr, expert_scale_ptr, shape):
    """Return experts [r, k] by falling score, their weights without the scale [r, k], and the choice as a mask [r, n].

    Both have columns up to a power of two.

    Args:
        logits: float32 [r, n].
        place: 0, 1, ... [n].
        expert: of each place.
        exists: False where a place has no expert.
        choice_bias_ptr: added to the scores for the choice only, or None.
        expert_scale_ptr: factor of each expert's weight, or None.
        shape: constants X, K, SIGMOID, RENORMALISED, GROUPS, TOP_GROUPS, and powers of two of groups and members.
    """
    X: tl.constexpr = shape[0]
    K: tl.constexpr = shape[1]
    SIGMOID: tl.constexpr = shape[2]
    RENORMALISED: tl.constexpr = shape[3]
    GROUPS: tl.constexpr = shape[4]
    TOP_GROUPS: tl.constexpr = shape[5]
    GP: tl.constexpr = shape[6]
    SP: tl.constexpr = shape[7]
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
    return experts, weights, allowed & (keys == _NO_KEY)


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
