"""Chooses the next tokens inside the graph: greedy, or by temperature, min-p, top-k and top-p, each row as it asks.

It draws what the sampler on the host draws (`kernels/sampling.py`): noise is the same function of (draw key, token), so
that only rounding can part them. A row is read by many programs, whose best candidates a last kernel compares. Filters
need no sorting: they keep what lies above a threshold, which a program finds by bisecting the values, several pivots a
pass; rows without filters do not wait for that.

Shapes: N rows, V vocabulary, P pieces of a row, R slots.
"""

# pyright: basic
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.pdl import pdl_begin, pdl_usable

_PIECE = 4096
_SCAN = 8192
_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of a float32 that are always zero for values of this dtype: they need not be searched."""


class SampleScratch(NamedTuple):
    """By row: best score and its token of each piece [N, P]; maximum, threshold key and last tied token kept [N]."""

    scores: torch.Tensor
    tokens: torch.Tensor
    maximum: torch.Tensor
    threshold: torch.Tensor
    last_tied: torch.Tensor


def make_sample_scratch(max_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
    pieces = triton.cdiv(vocab_size, _PIECE)
    return SampleScratch(
        scores=torch.zeros((max_rows, pieces), dtype=torch.float32, device=device),
        tokens=torch.zeros((max_rows, pieces), dtype=torch.int32, device=device),
        maximum=torch.zeros(max_rows, dtype=torch.float32, device=device),
        threshold=torch.zeros(max_rows, dtype=torch.int32, device=device),
        last_tied=torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


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
    """Writes the token of each row into tokens_N (int32) and last_token_R[slot] (int32).

    slots_N int32: -1 for a row that samples nothing here, whose token becomes -2. A row with NaN or +inf among its
    logits, or with nothing but -inf, gets -1, and 0 as the last token of its slot.
    temperature_N float32: 0 is greedy, of equal maxima the first. top_k_N int32: 0 keeps all. top_p_N, min_p_N float32:
    1 and 0 keep all. draw_keys_N int64: from `kernels.sampling.draw_keys`.
    """
    num_rows, vocab_size = logits_NV.shape
    pieces = scratch.scores.shape[1]
    pdl = pdl_usable()
    _threshold_kernel[(num_rows,)](
        logits_NV, slots_N, temperature_N, top_k_N, top_p_N, min_p_N, scratch.maximum, scratch.threshold,
        scratch.last_tied, logits_NV.stride(0), V=vocab_size, BLOCK=min(_SCAN, triton.next_power_of_2(vocab_size)),
        SHIFT=_KEY_SHIFT[logits_NV.dtype], PDL=pdl, launch_pdl=pdl, num_warps=16,
    )  # fmt: skip
    _candidates_kernel[(num_rows, pieces)](
        logits_NV, slots_N, temperature_N, min_p_N, draw_keys_N, scratch.maximum, scratch.threshold, scratch.last_tied,
        scratch.scores, scratch.tokens, logits_NV.stride(0), V=vocab_size, PIECES=pieces, BLOCK=_PIECE,
        SHIFT=_KEY_SHIFT[logits_NV.dtype], PDL=pdl, launch_pdl=pdl, num_warps=8,
    )  # fmt: skip
    _choose_kernel[(num_rows,)](
        slots_N, scratch.scores, scratch.tokens, tokens_N, last_token_R, PIECES=pieces,
        BLOCK=triton.next_power_of_2(pieces), PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Integers in the order of float32 values, without the bits that are always zero."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _scaled(x, maximum, temperature):
    return (x - maximum) / temperature


@triton.jit
def _threshold_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maximum_ptr,
    threshold_ptr,
    last_tied_ptr,
    row_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The maximum of a row that draws, and, where it has filters, the key below which tokens are dropped."""
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    if (slot >= 0) & (temperature > 0.0):
        lane = tl.arange(0, BLOCK)
        base = logits_ptr + row * row_stride
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        bad = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            x = tl.load(base + start + lane, start + lane < V, other=-float("inf")).to(tl.float32)
            bad |= ((x != x) | (x == float("inf"))).to(tl.int32)
            best = tl.maximum(best, x)
        maximum = tl.max(best, 0)
        if (tl.max(bad, 0) > 0) | (maximum == -float("inf")):
            maximum = float("nan")
        tl.store(maximum_ptr + row, maximum)

        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        floor = tl.log(tl.load(min_p_ptr + row))  # -inf for 0
        highest = _key(maximum, SHIFT).to(tl.int64)
        lowest: tl.constexpr = -(2147483648 >> SHIFT)
        threshold = tl.full((), lowest, tl.int64)
        tied = tl.full((), V, tl.int64)
        pivot_number = tl.arange(0, 8).to(tl.int64)
        if (maximum == maximum) & (top_k > 0):
            low = tl.full((), lowest, tl.int64)
            high = highest
            while low < high:  # the largest key with at least k tokens at or above it
                step = (high - low + 7) // 8
                pivots = low + (pivot_number + 1) * step
                counts = tl.zeros((8,), tl.int64)
                for start in range(0, V, BLOCK):
                    mask = start + lane < V
                    x = tl.load(base + start + lane, mask, other=-float("inf")).to(tl.float32)
                    keys = _key(x, SHIFT).to(tl.int64)
                    kept = mask & (_scaled(x, maximum, temperature) >= floor)
                    counts += tl.sum((kept[:, None] & (keys[:, None] >= pivots[None, :])).to(tl.int64), 0)
                reached = tl.sum(((counts >= top_k) & (pivots <= high)).to(tl.int64), 0)
                new_high = tl.minimum(high, low + (reached + 1) * step - 1)
                low = low + reached * step
                high = tl.maximum(new_high, low)
            above = tl.zeros((), tl.int64)
            for start in range(0, V, BLOCK):
                mask = start + lane < V
                x = tl.load(base + start + lane, mask, other=-float("inf")).to(tl.float32)
                keys = _key(x, SHIFT).to(tl.int64)
                kept = mask & (_scaled(x, maximum, temperature) >= floor)
                above += tl.sum((kept & (keys > low)).to(tl.int64), 0)
            threshold = low
            tied = tl.maximum(top_k - above, 0)

        last_tied = tl.full((), V, tl.int64)
        if (maximum == maximum) & (tied < V):
            last_tied = _last_tied(base, lane, threshold, tied, V, BLOCK, SHIFT)
        if (maximum == maximum) & (top_p < 1.0):
            total = tl.zeros((), tl.float64)
            for start in range(0, V, BLOCK):
                index = start + lane
                x = tl.load(base + index, index < V, other=-float("inf")).to(tl.float32)
                scaled = _scaled(x, maximum, temperature)
                keys = _key(x, SHIFT).to(tl.int64)
                kept = (index < V) & (scaled >= floor)
                kept &= (keys > threshold) | ((keys == threshold) & (index <= last_tied))
                total += tl.sum(tl.where(kept, tl.exp(scaled), 0.0), 0).to(tl.float64)
            wanted = total * top_p.to(tl.float64)
            low = threshold
            high = highest
            while low < high:  # the largest key whose tokens at or above it hold p of the mass
                step = (high - low + 7) // 8
                pivots = low + (pivot_number + 1) * step
                masses = tl.zeros((8,), tl.float64)
                for start in range(0, V, BLOCK):
                    index = start + lane
                    x = tl.load(base + index, index < V, other=-float("inf")).to(tl.float32)
                    scaled = _scaled(x, maximum, temperature)
                    keys = _key(x, SHIFT).to(tl.int64)
                    kept = (index < V) & (scaled >= floor)
                    mass = tl.where(kept, tl.exp(scaled), 0.0)
                    masses += tl.sum(tl.where(keys[:, None] >= pivots[None, :], mass[:, None], 0.0), 0).to(tl.float64)
                reached = tl.sum(((masses >= wanted) & (pivots <= high)).to(tl.int64), 0)
                new_high = tl.minimum(high, low + (reached + 1) * step - 1)
                low = low + reached * step
                high = tl.maximum(new_high, low)
            mass_above = tl.zeros((), tl.float64)
            weight = tl.zeros((), tl.float32)
            for start in range(0, V, BLOCK):
                index = start + lane
                x = tl.load(base + index, index < V, other=-float("inf")).to(tl.float32)
                scaled = _scaled(x, maximum, temperature)
                keys = _key(x, SHIFT).to(tl.int64)
                kept = (index < V) & (scaled >= floor)
                mass = tl.where(kept, tl.exp(scaled), 0.0)
                mass_above += tl.sum(tl.where(keys > low, mass, 0.0), 0).to(tl.float64)
                weight = tl.maximum(weight, tl.max(tl.where(keys == low, mass, 0.0), 0))
            needed = tl.ceil((wanted - mass_above) / tl.maximum(weight, 1e-38).to(tl.float64))
            needed = tl.maximum(needed, 1.0)
            if low > threshold:
                last_tied = _last_tied(base, lane, low, tl.minimum(needed, V).to(tl.int64), V, BLOCK, SHIFT)
            else:
                last_tied = tl.minimum(
                    last_tied, _last_tied(base, lane, low, tl.minimum(needed, V).to(tl.int64), V, BLOCK, SHIFT)
                )
            threshold = low
        tl.store(threshold_ptr + row, threshold.to(tl.int32))
        tl.store(last_tied_ptr + row, last_tied.to(tl.int32))


@triton.jit
def _last_tied(base, lane, threshold, tied, V: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Index of the `tied`-th token whose key is the threshold; V if there are fewer."""
    seen = tl.zeros((), tl.int64)
    found = tl.full((), V, tl.int64)
    for start in range(0, V, BLOCK):
        index = start + lane
        x = tl.load(base + index, index < V, other=-float("inf")).to(tl.float32)
        equal = (index < V) & (_key(x, SHIFT).to(tl.int64) == threshold)
        rank = seen + tl.cumsum(equal.to(tl.int64), 0)
        found = tl.minimum(found, tl.min(tl.where(equal & (rank >= tied), index.to(tl.int64), V), 0))
        seen += tl.sum(equal.to(tl.int64), 0)
    return found


@triton.jit
def _gumbel(draw_key, token):
    """Standard Gumbel noise of a token: SplitMix64's finaliser over key and token, as `kernels.sampling.gumbel_noise`."""
    x = draw_key.to(tl.uint64) + (token.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    bits = (x & 0x7FFFFFFFFFFFFFFF) | 1
    u = tl.minimum(bits.to(tl.int64).to(tl.float32) * (2.0**-63), 1.0 - 2.0**-24)
    # -log(1 - u) keeps its precision near 0, where the winners come from, only as a series.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * (0.2 + u * (1.0 / 6 + u * (1.0 / 7)))))))
    exponential = tl.where(u < 0.05, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _candidates_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    min_p_ptr,
    draw_keys_ptr,
    maximum_ptr,
    threshold_ptr,
    last_tied_ptr,
    scores_ptr,
    tokens_ptr,
    row_stride,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of one piece of a row, and its score: a logit, or a scaled one with noise."""
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    if tl.load(slots_ptr + row) >= 0:
        temperature = tl.load(temperature_ptr + row)
        index = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + index, index < V, other=-float("inf")).to(tl.float32)
        score = x
        if temperature > 0.0:
            maximum = tl.load(maximum_ptr + row)
            threshold = tl.load(threshold_ptr + row)
            keys = _key(x, SHIFT)
            kept = (keys > threshold) | ((keys == threshold) & (index <= tl.load(last_tied_ptr + row)))
            scaled = _scaled(x, maximum, temperature)
            kept &= scaled >= tl.log(tl.load(min_p_ptr + row))
            score = tl.where(kept, scaled + _gumbel(tl.load(draw_keys_ptr + row), index), -float("inf"))
            score = tl.where(maximum != maximum, float("nan"), score)
        bad = (score != score) | (score == float("inf"))
        best = tl.max(tl.where(bad, -float("inf"), score), 0)
        token = tl.min(tl.where(score == best, index, V), 0)
        best = tl.where(tl.max(bad.to(tl.int32), 0) > 0, float("nan"), best)
        tl.store(scores_ptr + row * PIECES + piece, best)
        tl.store(tokens_ptr + row * PIECES + piece, token)


@triton.jit
def _choose_kernel(
    slots_ptr,
    scores_ptr,
    candidates_ptr,
    tokens_ptr,
    last_token_ptr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        tl.store(tokens_ptr + row, -2)
    else:
        piece = tl.arange(0, BLOCK)
        scores = tl.load(scores_ptr + row * PIECES + piece, piece < PIECES, other=-float("inf"))
        candidates = tl.load(candidates_ptr + row * PIECES + piece, piece < PIECES, other=2147483647)
        invalid = tl.max((scores != scores).to(tl.int32), 0) > 0
        best = tl.max(tl.where(scores != scores, -float("inf"), scores), 0)
        token = tl.min(tl.where(scores == best, candidates, 2147483647), 0)
        token = tl.where(invalid | (best == -float("inf")), -1, token)
        tl.store(tokens_ptr + row, token)
        tl.store(last_token_ptr + slot, tl.maximum(token, 0))
