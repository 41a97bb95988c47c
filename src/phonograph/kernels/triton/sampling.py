"""Chooses the next tokens inside the graph, as the host's sampler would, so that a step ends without the host.

Two launches, whatever the rows ask for; each program finds out on the device whether there is anything to do for it.

`_scan_kernel` reads every row once, in parts. It serves greedy rows (the first largest logit) and rows with a
temperature alone (the largest sum of scaled logit and Gumbel noise). The program that finishes a row last merges it.

`_filter_kernel` does top-k, top-p and min-p, and is over at once for all other rows. Nothing is sorted. Every token
has a distinct integer that orders the row by falling logit, then by token id; what a filter keeps is all above some
integer, and this is found by search, exactly. So that the search need not read the row again and again, a first pass
over the row in parts sums how much lies above a few levels below the maximum; the program that finishes last copies
what is above the right level, a small superset of what is kept, and goes on with that alone. Where no level helps (a
nearly flat distribution) it searches the row itself, which is slower.

Noise and meaning of the parameters are those of `phonograph.kernels.sampling`: tokens are the same up to the rounding
of sums of float32. Shapes: N rows of logits, V vocabulary, R slots.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.pdl import pdl_usable

_SCAN_BLOCK = 1024
_SCAN_WARPS = 4
_SCAN_PROGRAMS = 2048
_FILTER_BLOCK = 2048
_FILTER_WARPS = 8
_FILTER_PROGRAMS = 512
_MAX_PARTS = 256
_CANDIDATES = 4096
_LEVELS = 16
"""Sums that a part of a row has in the first pass: 15 levels, and the whole."""

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOWEST = tl.constexpr(-3.4e38)


class SampleScratch(NamedTuple):
    """Made by `make_sample_scratch`. The counters are 0 between launches; the contents of the others mean nothing."""

    part_scores: torch.Tensor
    part_tokens: torch.Tensor
    part_maxima: torch.Tensor
    part_sums: torch.Tensor
    row_max: torch.Tensor
    row_low: torch.Tensor
    counters: torch.Tensor
    candidates: torch.Tensor


def make_sample_scratch(max_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
    """Room for `sample` with up to `max_rows` rows; not for two calls at a time."""
    scan_parts = max(rows * _parts(rows, vocab_size, _SCAN_BLOCK, _SCAN_PROGRAMS)[0] for rows in range(1, max_rows + 1))
    sum_parts = max(
        rows * _parts(rows, vocab_size, _FILTER_BLOCK, _FILTER_PROGRAMS)[0] for rows in range(1, max_rows + 1)
    )

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SampleScratch(
        part_scores=empty(scan_parts),
        part_tokens=empty(scan_parts, dtype=torch.int32),
        part_maxima=empty(scan_parts),
        part_sums=empty(sum_parts, _LEVELS),
        row_max=empty(max_rows),
        row_low=empty(max_rows),
        counters=torch.zeros(2 * max_rows, dtype=torch.int32, device=device),
        candidates=empty(max_rows, _CANDIDATES, dtype=torch.int64),
    )


def _parts(num_rows: int, vocab_size: int, block: int, programs: int) -> tuple[int, int]:
    """In how many parts a row is read, and the blocks of each."""
    blocks = -(-vocab_size // block)
    parts = min(blocks, _MAX_PARTS, -(-programs // num_rows))
    blocks_per_part = -(-blocks // parts)
    return -(-blocks // blocks_per_part), blocks_per_part


def sample(
    logits_NV: torch.Tensor,
    slots_N: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    draw_keys_N: torch.Tensor,
    scratch: SampleScratch,
    tokens_N: torch.Tensor,
    last_token_R: torch.Tensor,
) -> None:
    """Chooses a token for each row that has a slot, into `tokens_N` and, for the next step, into its slot's last token.

    Args:
        logits_NV: bfloat16, float16 or float32; rows contiguous
        slots_N: int32; below 0: nothing is chosen, the token is -2
        temperature_N: float32; 0 is greedy, other values as bounded by the sampler
        top_k_N: int32; 0 keeps all
        top_p_N, min_p_N: float32; 1 and 0 keep all
        draw_keys_N: int64, from `phonograph.kernels.sampling.draw_keys`
        tokens_N: int32, written; -1 where a row has NaN or +inf, or nothing but -inf
        last_token_R: int32, by slot; receives the token, or 0 where there is none
    """
    num_rows, vocab_size = logits_NV.shape
    assert logits_NV.stride(1) == 1
    pdl = pdl_usable()
    parts, blocks = _parts(num_rows, vocab_size, _SCAN_BLOCK, _SCAN_PROGRAMS)
    _scan_kernel[(num_rows, parts)](
        logits_NV,
        logits_NV.stride(0),
        slots_N,
        temperature_N,
        top_k_N,
        top_p_N,
        min_p_N,
        draw_keys_N,
        scratch.part_scores,
        scratch.part_tokens,
        scratch.part_maxima,
        scratch.row_max,
        scratch.row_low,
        scratch.counters,
        tokens_N,
        last_token_R,
        blocks,
        V=vocab_size,
        BLOCK=_SCAN_BLOCK,
        MAX_PARTS=_MAX_PARTS,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=_SCAN_WARPS,
    )
    parts, blocks = _parts(num_rows, vocab_size, _FILTER_BLOCK, _FILTER_PROGRAMS)
    _filter_kernel[(num_rows, parts)](
        logits_NV,
        logits_NV.stride(0),
        slots_N,
        temperature_N,
        top_k_N,
        top_p_N,
        min_p_N,
        draw_keys_N,
        scratch.part_sums,
        scratch.row_max,
        scratch.row_low,
        scratch.counters,
        scratch.candidates,
        tokens_N,
        last_token_R,
        blocks,
        V=vocab_size,
        ID_BITS=max(1, (vocab_size - 1).bit_length()),
        KEY_SHIFT={torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits_NV.dtype],
        BLOCK=_FILTER_BLOCK,
        MAX_PARTS=_MAX_PARTS,
        LEVELS=_LEVELS,
        CANDIDATES=_CANDIDATES,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=_FILTER_WARPS,
    )


@triton.jit
def _gumbel(draw_key, token):
    """Noise of `phonograph.kernels.sampling.gumbel_noise`, the same integers bit by bit.

    log1p is taken from the logarithm of the rounded sum, corrected by its rounding (Kahan), as on tiny u all depends.
    """
    x = draw_key.to(tl.uint64) + (token.to(tl.uint64) + 1) * _GAMMA
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    bits = ((x & 0x7FFFFFFFFFFFFFFF) | 1).to(tl.int64)
    u = tl.minimum(bits.to(tl.float32) * 1.0842021724855044e-19, 0.99999994039535522)
    rest = 1.0 - u
    lost = 1.0 - rest
    rate = tl.where(lost > 0.0, -tl.log(rest) * (u / tl.where(lost > 0.0, lost, 1.0)), u)
    return -tl.log(rate)


@triton.jit
def _is_last(counter, parts):
    """True in the program of a row that comes here last, which then sees what the others stored. Clears the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _finish(row, slot, token, tokens_ptr, last_token_ptr):
    tl.store(tokens_ptr + row, token)
    tl.store(last_token_ptr + slot, tl.maximum(token, 0))


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    draw_keys_ptr,
    part_scores_ptr,
    part_tokens_ptr,
    part_maxima_ptr,
    row_max_ptr,
    row_low_ptr,
    counters_ptr,
    tokens_ptr,
    last_token_ptr,
    blocks,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # In this order, so that the filter may read its parameters before it waits: they are older than this kernel.
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    draw_key = tl.load(draw_keys_ptr + row)
    if slot < 0:
        if part == 0:
            tl.store(tokens_ptr + row, -2)
        return
    filtered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    noisy = (temperature > 0.0) & (filtered == 0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride

    # Each lane has its maximum and its best token. Maxima keep a NaN, which the comparisons of scores pass over.
    lane = tl.arange(0, BLOCK)
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK,), tl.int32)
    first = part * blocks * BLOCK
    end = tl.minimum(first + blocks * BLOCK, V)
    if noisy:
        # Scores count from the lane's maximum so far: tiny temperatures would overflow otherwise.
        factor = 1.0 / temperature
        base = tl.full((BLOCK,), _LOWEST, tl.float32)
        for start in range(first, end, BLOCK):
            ids = start + lane
            logit = tl.load(row_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
            maximum = tl.maximum(maximum, logit, propagate_nan=tl.PropagateNan.ALL)
            new_base = tl.maximum(base, logit)
            score += (base - new_base) * factor
            base = new_base
            new_score = (logit - base) * factor + _gumbel(draw_key, ids)
            token = tl.where(new_score > score, ids, token)
            score = tl.maximum(score, new_score)
        part_base = tl.max(base, 0)
        score += (base - part_base) * factor
    else:
        # One block ahead, to have enough of them on the way.
        loaded = tl.load(row_ptr + first + lane, mask=first + lane < end, other=float("-inf"))
        for start in range(first, end, BLOCK):
            ids = start + lane
            logit = loaded.to(tl.float32)
            loaded = tl.load(row_ptr + ids + BLOCK, mask=ids < end - BLOCK, other=float("-inf"))
            maximum = tl.maximum(maximum, logit, propagate_nan=tl.PropagateNan.ALL)
            token = tl.where(logit > score, ids, token)
            score = tl.maximum(score, logit)
    part_score = tl.max(score, 0)
    part_token = tl.min(tl.where(score == part_score, token, V), 0)
    is_nan = tl.max((maximum != maximum).to(tl.int32), 0) > 0
    part_maximum = tl.where(is_nan, float("nan"), tl.max(tl.where(maximum == maximum, maximum, float("-inf")), 0))
    place = row * parts + part
    tl.store(part_scores_ptr + place, part_score)
    tl.store(part_tokens_ptr + place, part_token)
    tl.store(part_maxima_ptr + place, part_maximum)

    if _is_last(counters_ptr + 2 * row, parts):
        index = tl.arange(0, MAX_PARTS)
        mask = index < parts
        places = row * parts + index
        maxima = tl.load(part_maxima_ptr + places, mask=mask, other=float("-inf"), cache_modifier=".cg")
        scores = tl.load(part_scores_ptr + places, mask=mask, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(part_tokens_ptr + places, mask=mask, other=V, cache_modifier=".cg")
        has_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
        row_max = tl.where(has_nan, float("nan"), tl.max(tl.where(maxima == maxima, maxima, float("-inf")), 0))
        valid = tl.abs(row_max) < float("inf")
        tl.store(row_max_ptr + row, row_max)
        tl.store(row_low_ptr + row, tl.min(tl.where(mask, maxima, float("inf")), 0))
        if noisy:
            scores += (tl.maximum(maxima, _LOWEST) - row_max) / temperature
        best = tl.max(scores, 0)
        chosen = tl.min(tl.where(scores == best, tokens, V), 0)
        if (filtered == 0) | (valid == 0):
            _finish(row, slot, tl.where(valid, chosen, -1), tokens_ptr, last_token_ptr)


@triton.jit
def _order(logit, ids, ID_BITS: tl.constexpr, KEY_SHIFT: tl.constexpr):
    """Distinct integers that order tokens: larger logits above smaller ones, of equal logits the lower id above."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT
    return (key.to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - ids)


@triton.jit
def _logit_of(order, ID_BITS: tl.constexpr, KEY_SHIFT: tl.constexpr):
    key = (order >> ID_BITS).to(tl.int32) << KEY_SHIFT
    key |= (key >> 31) & ((1 << KEY_SHIFT) - 1)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _entries(
    start,
    count,
    row_ptr,
    list_ptr,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LISTED: tl.constexpr,
):
    """One block of integers of `_order`, of the candidates or of the whole row, below all others behind the end; and
    the logits."""
    index = start + tl.arange(0, BLOCK)
    if LISTED:
        order = tl.load(list_ptr + index, mask=index < count, other=-(1 << 62))
        logit = tl.where(index < count, _logit_of(order, ID_BITS, KEY_SHIFT), float("-inf"))
    else:
        logit = tl.load(row_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
        order = tl.where(index < count, _order(logit, index, ID_BITS, KEY_SHIFT), -(1 << 62))
    return order, logit


@triton.jit
def _mass(logit, row_max, factor, log_min_p):
    scaled = (logit - row_max) * factor
    return tl.where(scaled >= log_min_p, tl.exp(scaled), 0.0)


@triton.jit
def _fold(values, BLOCK: tl.constexpr):
    """Sums over groups of neighbours, most of which one thread has."""
    return tl.sum(tl.reshape(values, (BLOCK // 8, 8)), 1)


@triton.jit
def _sum_from(
    level,
    count,
    row_ptr,
    list_ptr,
    row_max,
    factor,
    log_min_p,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Probability (times a constant) of all that is not below `level`, float64."""
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, count, BLOCK):
        order, logit = _entries(start, count, row_ptr, list_ptr, BLOCK, ID_BITS, KEY_SHIFT, LISTED)
        total += _fold(tl.where(order >= level, _mass(logit, row_max, factor, log_min_p), 0.0), BLOCK)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _search(
    target,
    low,
    high,
    count,
    row_ptr,
    list_ptr,
    row_max,
    factor,
    log_min_p,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LISTED: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """The highest level in [low, high) such that what is not below it counts, or weighs, at least `target`; else low.

    Each pass sums above three levels between the bounds, which leaves a quarter.
    """
    while high - low > 1:
        width = (high - low + 3) // 4
        sum_1 = tl.zeros((BLOCK // 8,), tl.float32)
        sum_2 = sum_1
        sum_3 = sum_1
        for start in range(0, count, BLOCK):
            order, logit = _entries(start, count, row_ptr, list_ptr, BLOCK, ID_BITS, KEY_SHIFT, LISTED)
            weight = _mass(logit, row_max, factor, log_min_p) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
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
def _filter_and_draw(
    low,
    whole,
    count,
    row_ptr,
    list_ptr,
    row_max,
    temperature,
    top_k,
    top_p,
    log_min_p,
    draw_key,
    BLOCK: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The token drawn from what the filters keep; all of it is at or above `low`. `whole`: sum of the row's masses."""
    factor = 1.0 / temperature
    high = _order(row_max, 0, ID_BITS, KEY_SHIFT) + 1
    if top_k > 0:
        low = _search(
            top_k.to(tl.float64), low, high, count, row_ptr, list_ptr, row_max, factor, log_min_p,
            BLOCK, ID_BITS, KEY_SHIFT, LISTED, False,
        )  # fmt: skip
        whole = _sum_from(
            low, count, row_ptr, list_ptr, row_max, factor, log_min_p, BLOCK, ID_BITS, KEY_SHIFT, LISTED
        )  # fmt: skip
    if top_p < 1.0:
        low = _search(
            top_p.to(tl.float64) * whole, low, high, count, row_ptr, list_ptr, row_max, factor, log_min_p,
            BLOCK, ID_BITS, KEY_SHIFT, LISTED, True,
        )  # fmt: skip

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_order = tl.full((BLOCK,), -(1 << 62), tl.int64)
    for start in range(0, count, BLOCK):
        order, logit = _entries(start, count, row_ptr, list_ptr, BLOCK, ID_BITS, KEY_SHIFT, LISTED)
        scaled = (logit - row_max) * factor
        kept = (order >= low) & (scaled >= log_min_p)
        if tl.max(kept.to(tl.int32), 0) > 0:
            token = (1 << ID_BITS) - 1 - (order & ((1 << ID_BITS) - 1))
            score = tl.where(kept, scaled + _gumbel(draw_key, token), float("-inf"))
            better = score > best
            best_order = tl.where(better, order, best_order)
            best = tl.where(better, score, best)
    chosen = tl.max(tl.where(best == tl.max(best, 0), best_order, -(1 << 62)), 0)
    return ((1 << ID_BITS) - 1 - (chosen & ((1 << ID_BITS) - 1))).to(tl.int32)


@triton.jit(do_not_specialize=["blocks"])
def _filter_kernel(
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
    blocks,
    V: tl.constexpr,
    ID_BITS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    draw_key = tl.load(draw_keys_ptr + row)
    filtered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    if PDL:
        tl_cuda.gdc_wait()
    if (slot < 0) | (filtered == 0):
        return
    row_max = tl.load(row_max_ptr + row)
    row_low = tl.load(row_low_ptr + row)
    if (tl.abs(row_max) < float("inf")) == 0:
        return

    # Levels lie below the maximum, at distances that grow. For top-k the unit is how far the maxima of the row's parts
    # are spread, and tokens are counted; for top-p it is the temperature, and probabilities are summed.
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
        weight = tl.where(by_count, 1.0, _mass(logit, row_max, factor, log_min_p))
        new_sums = ()
        for j in tl.static_range(LEVELS - 1):
            level = row_max - unit * (0.5 * (j + 1) + max(j - 7, 0))
            new_sums += (sums[j] + _fold(tl.where(logit >= level, weight, 0.0), BLOCK),)
        sums = new_sums + (sums[LEVELS - 1] + _fold(weight, BLOCK),)
    sums_ptr = part_sums_ptr + (row * parts + part) * LEVELS
    for j in tl.static_range(LEVELS):
        tl.store(sums_ptr + j, tl.sum(sums[j], 0))

    if _is_last(counters_ptr + 2 * row + 1, parts):
        number = tl.arange(0, LEVELS)
        index = tl.arange(0, MAX_PARTS)
        row_sums = tl.load(
            part_sums_ptr + (row * parts + index)[:, None] * LEVELS + number[None, :],
            mask=(index < parts)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        totals = tl.sum(row_sums.to(tl.float64), 0)
        whole = tl.sum(tl.where(number == LEVELS - 1, totals, 0.0), 0)
        # A little more than needed: the sums here and those of the search are rounded differently.
        wanted = tl.where(by_count, top_k.to(tl.float64), top_p.to(tl.float64) * whole * 1.0001)
        reached = (totals >= wanted) & (number < LEVELS - 1) & (by_count | (top_p < 1.0))
        chosen = tl.min(tl.where(reached, number, LEVELS), 0)
        bound = row_max - unit * (0.5 * (chosen + 1) + tl.maximum(chosen - 7, 0))
        bound = tl.where(chosen < LEVELS, bound - 1e-6 * (tl.abs(row_max) + tl.abs(bound)), float("-inf"))
        bound = tl.maximum(bound, row_max + 1.001 * temperature * log_min_p)

        list_ptr = candidates_ptr + row.to(tl.int64) * CANDIDATES
        count = 0
        if bound > float("-inf"):
            logit = tl.load(row_ptr + lane, mask=lane < V, other=float("-inf")).to(tl.float32)
            for start in range(0, V, BLOCK):
                ids = start + lane
                next_logit = tl.load(
                    row_ptr + ids + BLOCK, mask=ids < V - BLOCK, other=float("-inf")
                ).to(tl.float32)  # fmt: skip
                found = (logit >= bound).to(tl.int32)
                num_found = tl.sum(found, 0)
                if num_found > 0:
                    places = count + tl.cumsum(found, 0) - 1
                    order = _order(logit, ids, ID_BITS, KEY_SHIFT)
                    tl.store(list_ptr + places, order, mask=(found > 0) & (places < CANDIDATES))
                    count += num_found
                logit = next_logit
            tl.debug_barrier()
        else:
            count = V + CANDIDATES
        low = _order(tl.maximum(bound, _LOWEST), (1 << ID_BITS) - 1, ID_BITS, KEY_SHIFT)
        if count <= CANDIDATES:
            token = _filter_and_draw(
                low, whole, count, row_ptr, list_ptr, row_max, temperature, top_k, top_p, log_min_p, draw_key,
                BLOCK, ID_BITS, KEY_SHIFT, True,
            )  # fmt: skip
        else:
            token = _filter_and_draw(
                low, whole, V, row_ptr, list_ptr, row_max, temperature, top_k, top_p, log_min_p, draw_key,
                BLOCK, ID_BITS, KEY_SHIFT, False,
            )  # fmt: skip
        _finish(row, slot, token, tokens_ptr, last_token_ptr)
