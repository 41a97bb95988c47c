"""Second launch of sampling: top-k, top-p and min-p. It ends at once for rows without them.

Shapes: V vocabulary.

Algorithm: selection by a search for the threshold, without a sort, and Gumbel-max sampling.
1. Every token has a distinct integer that orders the row by falling logit, then by token id. A filter keeps all tokens
   from some integer on, and a search of three levels a pass finds this integer exactly.
2. So that the search need not read the row repeatedly, a first pass over the row, in parts, sums the mass above 15
   levels below the maximum.
3. The program that finishes last copies the tokens above the right level, a small superset of the kept tokens, and
   searches only these. If no level helps (a nearly flat distribution) it searches the row itself, which is slower.
4. The token is the largest sum of scaled logit and Gumbel noise among the kept tokens.

    row        | part 0 | part 1 | ... | part p |       one program each: sums above the levels
    last one   | candidates above a level | -> search top-k -> search top-p -> draw
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false
from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.sampling.edit import Edit, edit_logits
from phonograph.kernels.triton.sampling.scan import (
    LOWEST,
    count_token,
    finish,
    gumbel,
    is_last,
    parameters_of,
    row_and_slot,
)

_NO_TOKEN = tl.constexpr(-(1 << 62))
"""Integer below every token's."""


@triton.jit
def _order(logit, ids, ID_BITS: tl.constexpr, key_shift):
    """Return distinct integers that order tokens by logit, and equal logits by falling id."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> key_shift
    return (key.to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - ids)


@triton.jit
def _logit_of(order, ID_BITS: tl.constexpr, key_shift):
    key = (order >> ID_BITS).to(tl.int32) << key_shift
    key |= (key >> 31) & ((1 << key_shift) - 1)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# A row's logits, its candidates' integers, the parameters of `_mass` and of the draw, the low bits of a float32 that
# the logits do not have, and the row's `Edit`.
_Row = namedtuple("_Row", "row_ptr list_ptr row_max factor log_min_p draw_key key_shift edit")
# Tokens of a block, bits of a token id, vocabulary, most drafts of a sequence, and True if rows may have edits.
_Shape = namedtuple("_Shape", "BLOCK ID_BITS V MOST_DRAFTS EDITS")


@triton.jit
def _edited(logit, ids, mask, edit, shape):
    """Return logits of a row, edited if it has edits."""
    if shape.EDITS and edit.kind > 0:
        logit = edit_logits(logit, ids, mask, edit, shape.V, shape.MOST_DRAFTS)
    return logit


@triton.jit
def _entries(start, count, row, shape, LISTED: tl.constexpr):
    """Return a block of `_order`'s integers, of the candidates or of the whole row, and the logits.

    Integers after the end are below all others.
    """
    index = start + tl.arange(0, shape.BLOCK)
    if LISTED:
        order = tl.load(row.list_ptr + index, mask=index < count, other=_NO_TOKEN)
        logit = tl.where(index < count, _logit_of(order, shape.ID_BITS, row.key_shift), float("-inf"))
    else:
        logit = tl.load(row.row_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
        logit = _edited(logit, index, index < count, row.edit, shape)
        order = tl.where(index < count, _order(logit, index, shape.ID_BITS, row.key_shift), _NO_TOKEN)
    return order, logit


@triton.jit
def _mass(logit, row_max, factor, log_min_p):
    """Return the probability of tokens, times a constant; 0 for tokens that min-p removes."""
    scaled = (logit - row_max) * factor
    return tl.where(scaled >= log_min_p, tl.exp(scaled), 0.0)


@triton.jit
def _fold(values, BLOCK: tl.constexpr):
    """Sum over groups of eight neighbours, which mostly belong to one thread."""
    return tl.sum(tl.reshape(values, (BLOCK // 8, 8)), 1)


@triton.jit
def _sum_from(level, count, row, shape, LISTED: tl.constexpr):
    """Return the mass of all tokens at or above `level`, float64."""
    total = tl.zeros((shape.BLOCK // 8,), tl.float32)
    for start in range(0, count, shape.BLOCK):
        order, logit = _entries(start, count, row, shape, LISTED)
        weight = _mass(logit, row.row_max, row.factor, row.log_min_p)
        total += _fold(tl.where(order >= level, weight, 0.0), shape.BLOCK)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _search(target, low, high, count, row, shape, LISTED: tl.constexpr, BY_MASS: tl.constexpr):
    """Return the highest level in [low, high) with at least `target` tokens, or mass, at or above it; else low.

    Each pass sums above three levels between the bounds, which leaves a quarter.
    """
    BLOCK: tl.constexpr = shape.BLOCK
    while high - low > 1:
        width = (high - low + 3) // 4
        sum_1 = tl.zeros((BLOCK // 8,), tl.float32)
        sum_2 = sum_1
        sum_3 = sum_1
        for start in range(0, count, BLOCK):
            order, logit = _entries(start, count, row, shape, LISTED)
            if BY_MASS:
                weight = _mass(logit, row.row_max, row.factor, row.log_min_p)
            else:
                weight = tl.full((BLOCK,), 1.0, tl.float32)
            sum_1 += _fold(tl.where(order >= low + width, weight, 0.0), BLOCK)
            sum_2 += _fold(tl.where(order >= low + 2 * width, weight, 0.0), BLOCK)
            sum_3 += _fold(tl.where(order >= low + 3 * width, weight, 0.0), BLOCK)
        steps = (tl.sum(sum_1.to(tl.float64), 0) >= target).to(tl.int64)
        steps += (tl.sum(sum_2.to(tl.float64), 0) >= target).to(tl.int64)
        steps += (tl.sum(sum_3.to(tl.float64), 0) >= target).to(tl.int64)
        low = low + steps * width
        high = tl.minimum(high, low + width)
    return low


@triton.jit
def _filter_and_draw(low, whole, count, row, top_k, top_p, shape, LISTED: tl.constexpr):
    """Draw a token from the tokens that the filters keep, all at or above `low`; `whole` is the row's mass."""
    BLOCK: tl.constexpr = shape.BLOCK
    LAST_ID: tl.constexpr = (1 << shape.ID_BITS) - 1
    high = _order(row.row_max, 0, shape.ID_BITS, row.key_shift) + 1
    if top_k > 0:
        low = _search(top_k.to(tl.float64), low, high, count, row, shape, LISTED, False)
        whole = _sum_from(low, count, row, shape, LISTED)
    if top_p < 1.0:
        # Above 0, so that the best token (of mass 1) is kept for any top_p.
        target = tl.maximum(top_p.to(tl.float64) * whole, 1e-30)
        low = _search(target, low, high, count, row, shape, LISTED, True)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_order = tl.full((BLOCK,), _NO_TOKEN, tl.int64)
    for start in range(0, count, BLOCK):
        order, logit = _entries(start, count, row, shape, LISTED)
        scaled = (logit - row.row_max) * row.factor
        kept = (order >= low) & (scaled >= row.log_min_p)
        if tl.max(kept.to(tl.int32), 0) > 0:
            token = LAST_ID - (order & LAST_ID)
            score = tl.where(kept, scaled + gumbel(row.draw_key, token), float("-inf"))
            better = score > best
            best_order = tl.where(better, order, best_order)
            best = tl.where(better, score, best)
    chosen = tl.max(tl.where(best == tl.max(best, 0), best_order, _NO_TOKEN), 0)
    return (LAST_ID - (chosen & LAST_ID)).to(tl.int32)


@triton.jit(do_not_specialize=["listed", "blocks"])
def filter_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    draw_keys_ptr,
    part_sums_ptr,
    row_max_ptr,
    row_low_ptr,
    counters_ptr,
    candidates_ptr,
    tokens_ptr,
    last_token_ptr,
    num_computed_ptr,
    seq_lens_ptr,
    rows_ptr,
    words_ptr,
    biases_ptr,
    factors_ptr,
    edits_ptr,
    row_slots_ptr,
    logits_rows_ptr,
    input_ids_ptr,
    listed,
    blocks,
    V: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    SHAPE: tl.constexpr = _Shape(BLOCK, ID_BITS, V, MOST_DRAFTS, edits_ptr is not None)
    PLAIN: tl.constexpr = _Shape(BLOCK, ID_BITS, V, MOST_DRAFTS, False)
    entry = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row, slot = row_and_slot(entry, rows_ptr, slots_ptr, listed)
    temperature, top_k, top_p, min_p, draw_key, filtered = parameters_of(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draw_keys_ptr
    )  # fmt: skip
    key_shift, kind = KEY_SHIFT, 0
    if edits_ptr is not None:
        kind = tl.load(edits_ptr + row)
        key_shift = tl.where(kind > 0, 0, KEY_SHIFT)  # edited logits have all bits
    edit = Edit(row, slot, kind, words_ptr, biases_ptr, factors_ptr, row_slots_ptr, logits_rows_ptr, input_ids_ptr)
    if PDL:
        tl_cuda.gdc_wait()
    if (slot < 0) | (filtered == 0):
        return
    row_max = tl.load(row_max_ptr + entry)
    row_low = tl.load(row_low_ptr + entry)
    if (tl.abs(row_max) < float("inf")) == 0:
        return

    # Levels lie below the maximum, at growing distances. For top-k the unit is the spread of the maxima of the row's
    # parts, and tokens are counted. For top-p it is the temperature, and probabilities are summed.
    by_count = top_k > 0
    unit = tl.where(by_count, 0.5 * (row_max - row_low), temperature)
    factor = 1.0 / temperature
    log_min_p = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    sums = (tl.zeros((BLOCK // 8,), tl.float32),) * LEVELS
    first = part * blocks * BLOCK
    end = tl.minimum(first + blocks * BLOCK, V)
    for start in range(first, end, BLOCK):
        ids = start + lane
        logit = tl.load(row_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        logit = _edited(logit, ids, ids < end, edit, SHAPE)
        weight = tl.where(by_count, (logit > float("-inf")).to(tl.float32), _mass(logit, row_max, factor, log_min_p))
        new_sums = ()
        for j in tl.static_range(LEVELS - 1):
            level = row_max - unit * (0.5 * (j + 1) + max(j - 7, 0))
            new_sums += (sums[j] + _fold(tl.where(logit >= level, weight, 0.0), BLOCK),)
        sums = new_sums + (sums[LEVELS - 1] + _fold(weight, BLOCK),)
    sums_ptr = part_sums_ptr + (entry * parts + part) * LEVELS
    for j in tl.static_range(LEVELS):
        tl.store(sums_ptr + j, tl.sum(sums[j], 0))

    if is_last(counters_ptr + 2 * entry + 1, parts):
        number = tl.arange(0, LEVELS)
        index = tl.arange(0, MAX_PARTS)
        row_sums = tl.load(
            part_sums_ptr + (entry * parts + index)[:, None] * LEVELS + number[None, :],
            mask=(index < parts)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        totals = tl.sum(row_sums.to(tl.float64), 0)
        whole = tl.sum(tl.where(number == LEVELS - 1, totals, 0.0), 0)
        # A little more than needed, because the sums of the search are rounded differently.
        wanted = tl.where(by_count, top_k.to(tl.float64), top_p.to(tl.float64) * whole * 1.0001)
        reached = (totals >= wanted) & (number < LEVELS - 1) & (by_count | (top_p < 1.0))
        chosen = tl.min(tl.where(reached, number, LEVELS), 0)
        bound = row_max - unit * (0.5 * (chosen + 1) + tl.maximum(chosen - 7, 0))
        everything = tl.where(by_count & (whole <= CANDIDATES), LOWEST, float("-inf"))
        bound = tl.where(chosen < LEVELS, bound - 1e-6 * (tl.abs(row_max) + tl.abs(bound)), everything)
        bound = tl.maximum(bound, row_max + 1.001 * temperature * log_min_p)

        list_ptr = candidates_ptr + entry.to(tl.int64) * CANDIDATES
        count = 0
        if bound > float("-inf"):
            logit = tl.load(row_ptr + lane, mask=lane < V, other=float("-inf")).to(tl.float32)
            for start in range(0, V, BLOCK):
                ids = start + lane
                next_logit = tl.load(
                    row_ptr + ids + BLOCK, mask=ids < V - BLOCK, other=float("-inf")
                ).to(tl.float32)  # fmt: skip
                logit = _edited(logit, ids, ids < V, edit, SHAPE)
                found = (logit >= bound).to(tl.int32)
                num_found = tl.sum(found, 0)
                if num_found > 0:
                    target = count + tl.cumsum(found, 0) - 1
                    order = _order(logit, ids, ID_BITS, key_shift)
                    tl.store(list_ptr + target, order, mask=(found > 0) & (target < CANDIDATES))
                    count += num_found
                logit = next_logit
            tl.debug_barrier()
        else:
            count = V + CANDIDATES
        low = _order(tl.maximum(bound, LOWEST), (1 << ID_BITS) - 1, ID_BITS, key_shift)
        operands = _Row(row_ptr, list_ptr, row_max, factor, log_min_p, draw_key, key_shift, edit)
        if count <= CANDIDATES:
            token = _filter_and_draw(low, whole, count, operands, top_k, top_p, SHAPE, True)
        elif kind > 0:
            token = _filter_and_draw(low, whole, V, operands, top_k, top_p, SHAPE, False)
        else:
            # The loops over the row have no branch then, so that their loads are not serialized.
            token = _filter_and_draw(low, whole, V, operands, top_k, top_p, PLAIN, False)
        token = tl.where(token < V, token, -1)
        finish(row, slot, token, tokens_ptr, last_token_ptr, num_computed_ptr, seq_lens_ptr)
        if edits_ptr is not None:
            count_token(token, edit, V, MOST_DRAFTS)
