"""First launch of sampling: reads each row once, and completes greedy rows and rows with only a temperature.

Shapes: V vocabulary.

Algorithm: Gumbel-max sampling (Gumbel, 1954) in one pass.
1. A greedy row takes the first largest logit, a row with a temperature the largest sum of scaled logit and noise.
2. Each lane of a program tracks its own maximum and best token; the program reduces them once, at its end.
3. The program that finishes a row last merges its parts. For rows with filters it finds only the maximum.

    row        | part 0 | part 1 | ... | part p |    one program each, in blocks of 1024 tokens
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.sampling.edit import Edit, edit_logits

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
LOWEST = tl.constexpr(-3.4e38)
NOT_SAMPLED = -2
"""Token of a row that another sampler takes."""
_NOT_SAMPLED = tl.constexpr(NOT_SAMPLED)


@triton.jit
def descend(key, index):
    """Return the key one level down, uint64, as `phonograph.kernels.torch.sampling` does; all numbers are uint64."""
    x = key + (index + 1) * _GAMMA
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def gumbel(draw_key, token):
    """Return the noise of `phonograph.kernels.torch.sampling.gumbel_noise`, from the same integers bit by bit.

    log1p is the logarithm of the rounded sum, corrected by its rounding (Kahan), because tiny u decide the draw.
    """
    bits = ((descend(draw_key.to(tl.uint64), token.to(tl.uint64)) & 0x7FFFFFFFFFFFFFFF) | 1).to(tl.int64)
    u = tl.minimum(bits.to(tl.float32) * 1.0842021724855044e-19, 0.99999994039535522)
    rest = 1.0 - u
    lost = 1.0 - rest
    rate = tl.where(lost > 0.0, -tl.log(rest) * (u / tl.where(lost > 0.0, lost, 1.0)), u)
    return -tl.log(rate)


@triton.jit
def is_last(counter, parts):
    """Return True in the last program of a row, which then sees the others' stores. Clears the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def row_and_slot(entry, rows_ptr, slots_ptr, listed):
    """Return the row of a program, and its slot, below 0 for none. Scratch memory is indexed by the entry instead.

    `listed` is a value at run time, because one kernel for both cases takes half as long to compile as two.
    """
    listed_row = tl.load(rows_ptr + entry, mask=listed != 0, other=0)
    row = tl.where(listed != 0, tl.maximum(listed_row, 0), entry)
    slot = tl.where(listed_row < 0, -1, tl.load(slots_ptr + row))
    return row, slot


@triton.jit
def parameters_of(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draw_keys_ptr):
    """Return a row's parameters, and True if it has a temperature and a filter, which `filter_kernel` serves."""
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    draw_key = tl.load(draw_keys_ptr + row)
    filtered = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, draw_key, filtered


@triton.jit
def finish(row, slot, token, tokens_ptr, last_token_ptr, num_computed_ptr, seq_lens_ptr):
    tl.store(tokens_ptr + row, token)
    tl.store(last_token_ptr + slot, tl.maximum(token, 0))
    tl.store(num_computed_ptr + slot, tl.load(seq_lens_ptr + row))


@triton.jit
def count_token(token, edit, V: tl.constexpr, MOST_DRAFTS: tl.constexpr):
    """Count the token of a row with edits; where there are drafts, `accept` counts what is kept."""
    if (edit.kind > 0) & (token >= 0) & (MOST_DRAFTS == 0):
        word = edit.words + edit.slot.to(tl.int64) * V + token
        tl.store(word, tl.load(word) + 1)


@triton.jit
def _max_or_nan(values):
    """Return the largest of the values, NaN if one is."""
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    return tl.where(has_nan, float("nan"), tl.max(tl.where(values == values, values, float("-inf")), 0))


@triton.jit(do_not_specialize=["listed", "blocks"])
def scan_kernel(
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
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # In this order, so that the filter may read its parameters before it waits: they are older than this kernel.
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    entry = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row, slot = row_and_slot(entry, rows_ptr, slots_ptr, listed)
    temperature, _, _, _, draw_key, filtered = parameters_of(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, draw_keys_ptr
    )  # fmt: skip
    kind = 0
    if edits_ptr is not None:
        kind = tl.load(edits_ptr + row)
    edit = Edit(row, slot, kind, words_ptr, biases_ptr, factors_ptr, row_slots_ptr, logits_rows_ptr, input_ids_ptr)
    if slot < 0:
        if (listed == 0) & (part == 0):
            tl.store(tokens_ptr + row, _NOT_SAMPLED)
        return
    noisy = (temperature > 0.0) & (filtered == 0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride

    # Each lane has its maximum and its best token. Maxima propagate a NaN; comparisons of scores ignore it.
    lane = tl.arange(0, BLOCK)
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK,), tl.int32)
    first = part * blocks * BLOCK
    end = tl.minimum(first + blocks * BLOCK, V)
    if noisy:
        # Scores count from the lane's running maximum, so that tiny temperatures do not overflow.
        factor = 1.0 / temperature
        base = tl.full((BLOCK,), LOWEST, tl.float32)
        for start in range(first, end, BLOCK):
            ids = start + lane
            logit = tl.load(row_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
            if edits_ptr is not None and kind > 0:
                logit = edit_logits(logit, ids, ids < end, edit, V, MOST_DRAFTS)
            maximum = tl.maximum(maximum, logit, propagate_nan=tl.PropagateNan.ALL)
            new_base = tl.maximum(base, logit)
            score += (base - new_base) * factor
            base = new_base
            new_score = (logit - base) * factor + gumbel(draw_key, ids)
            token = tl.where(new_score > score, ids, token)
            score = tl.maximum(score, new_score)
        part_base = tl.max(base, 0)
        score += (base - part_base) * factor
    else:
        # Loads run one block ahead, so that enough of them are in flight.
        loaded = tl.load(row_ptr + first + lane, mask=first + lane < end, other=float("-inf"))
        for start in range(first, end, BLOCK):
            ids = start + lane
            logit = loaded.to(tl.float32)
            loaded = tl.load(row_ptr + ids + BLOCK, mask=ids < end - BLOCK, other=float("-inf"))
            if edits_ptr is not None and kind > 0:
                logit = edit_logits(logit, ids, ids < end, edit, V, MOST_DRAFTS)
            maximum = tl.maximum(maximum, logit, propagate_nan=tl.PropagateNan.ALL)
            token = tl.where(logit > score, ids, token)
            score = tl.maximum(score, logit)
    part_score = tl.max(score, 0)
    part_token = tl.min(tl.where(score == part_score, token, V), 0)
    part_maximum = _max_or_nan(maximum)
    part_index = entry * parts + part
    tl.store(part_scores_ptr + part_index, part_score)
    tl.store(part_tokens_ptr + part_index, part_token)
    tl.store(part_maxima_ptr + part_index, part_maximum)

    if is_last(counters_ptr + 2 * entry, parts):
        index = tl.arange(0, MAX_PARTS)
        mask = index < parts
        entries = entry * parts + index
        maxima = tl.load(part_maxima_ptr + entries, mask=mask, other=float("-inf"), cache_modifier=".cg")
        scores = tl.load(part_scores_ptr + entries, mask=mask, other=float("-inf"), cache_modifier=".cg")
        tokens = tl.load(part_tokens_ptr + entries, mask=mask, other=V, cache_modifier=".cg")
        row_max = _max_or_nan(maxima)
        valid = tl.abs(row_max) < float("inf")
        tl.store(row_max_ptr + entry, row_max)
        # The minimum over parts in which a grammar allows a token.
        tl.store(row_low_ptr + entry, tl.min(tl.where(maxima > float("-inf"), maxima, float("inf")), 0))
        if noisy:
            scores += (tl.maximum(maxima, LOWEST) - row_max) / temperature
        best = tl.max(scores, 0)
        chosen = tl.min(tl.where(scores == best, tokens, V), 0)
        if (filtered == 0) | (valid == 0):
            chosen = tl.where(valid, chosen, -1)
            finish(row, slot, chosen, tokens_ptr, last_token_ptr, num_computed_ptr, seq_lens_ptr)
            if edits_ptr is not None:
                count_token(chosen, edit, V, MOST_DRAFTS)
