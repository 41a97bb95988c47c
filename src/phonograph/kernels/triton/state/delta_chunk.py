"""Gated delta rule for many tokens of a sequence, by products of matrices over chunks of tokens.

A program has a sequence and a head of values, and holds the head's state [K, V] in registers. Chunks have 64 tokens;
one ends at the checkpoint, if there is one. Corrections of a chunk's tokens depend on each other through a triangular
system (Yang et al. 2024, arXiv:2412.06464), whose inverse is made row by row. Formulas are in
`kernels/torch/state/delta_rule.py`, shapes in the torch twin.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.state.delta_rows import (
    decay_and_rate,
    places_by_length,
    sequence_of,
    store_state,
)


@triton.jit(do_not_specialize=["num_reqs"])
def delta_chunk_kernel(
    conv_ptr, gates_ptr, decay_ptr, time_bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, state_ptr, out_ptr,
    num_reqs, gates_stride, checkpoints_stride, C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BY_HEAD: tl.constexpr, TILED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    MOST: tl.constexpr, NORM_EPS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mix the tokens of sequences with more than MOST; a program has one by its place among them, if there is one.

    KEYS, VALUES: powers of two of at least 16, at least K and V.
    PRECISION: of the products of float32 matrices.
    ROWS: see `places_by_length`.
    """
    head = tl.program_id(1)
    place, num_rows = places_by_length(starts_ptr, num_reqs, MOST + 1, 2**31 - 1, ROWS)
    if tl.program_id(0) >= num_rows:
        return
    row = tl.sum(tl.where(place == tl.program_id(0), tl.arange(0, ROWS), 0), 0)
    start, count, source, slot, saved, before = sequence_of(
        row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    key, value, line = tl.arange(0, KEYS), tl.arange(0, VALUES), tl.arange(0, CHUNK)
    has_value = value < V
    mask = (key < K)[:, None] & has_value[None, :]
    place = state_ptr + (source.to(tl.int64) * H + head) * K * V + key[:, None] * V + value[None, :]
    state = tl.load(place, mask & (source >= 0), other=0.0)
    key_head = head % G if TILED else head // (H // G)
    diagonal = (line[:, None] == line[None, :]).to(tl.float32)
    first = tl.zeros((), tl.int32)
    while first < count:
        end = tl.minimum(first + CHUNK, count)
        end = tl.where((first < before) & (before < end), before, end)
        index = first + line
        is_token = index < end
        token = (start + index).to(tl.int64)
        inputs = conv_ptr + token[:, None] * C
        key_mask = is_token[:, None] & (key < K)[None, :]
        value_mask = is_token[:, None] & has_value[None, :]
        q = tl.load(inputs + key_head * K + key[None, :], key_mask, other=0.0).to(tl.float32)
        k = tl.load(inputs + G * K + key_head * K + key[None, :], key_mask, other=0.0).to(tl.float32)
        v = tl.load(inputs + 2 * G * K + head * V + value[None, :], value_mask, other=0.0).to(tl.float32)
        q *= (tl.rsqrt(tl.sum(q * q, 1) + NORM_EPS) * (K**-0.5))[:, None]
        k *= tl.rsqrt(tl.sum(k * k, 1) + NORM_EPS)[:, None]
        decay, rate = decay_and_rate(
            gates_ptr + token * gates_stride, decay_ptr, time_bias_ptr, head, is_token, G, H, BY_HEAD
        )
        total = tl.cumsum(decay, 0)
        # The last line's own number: a sum in another order has other errors, which the exponential enlarges.
        whole = tl.sum(tl.where(line == CHUNK - 1, total, 0.0), 0)
        is_later = line[:, None] >= line[None, :]
        between = tl.exp(tl.where(is_later, total[:, None] - total[None, :], 0.0))
        since = tl.exp(total)[:, None]
        k_t = tl.trans(k)
        system = tl.dot(k, k_t, input_precision=PRECISION) * between * rate[:, None]
        system = tl.where(line[:, None] > line[None, :], system, 0.0)
        inverse = diagonal
        for step in range(1, CHUNK):
            own = tl.sum(tl.where(line[:, None] == step, system, 0.0), 0)
            solved = tl.sum(own[:, None] * inverse, 0)
            inverse -= tl.where(line[:, None] == step, solved[None, :], 0.0)
        known = tl.dot(k * since, state, input_precision=PRECISION)
        correction = tl.dot(inverse, (v - known) * rate[:, None], input_precision=PRECISION)
        scores = tl.where(is_later, tl.dot(q, k_t, input_precision=PRECISION) * between, 0.0)
        mixed = tl.dot(q * since, state, input_precision=PRECISION)
        mixed += tl.dot(scores, correction, input_precision=PRECISION)
        until = tl.exp(whole - total)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(k * until), correction, input_precision=PRECISION)
        out = out_ptr + (token[:, None] * H + head) * V + value[None, :]
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), value_mask)
        if end == before:
            store_state(state_ptr, saved, head, state, mask, H, K, V)
        first = end
    store_state(state_ptr, slot, head, state, mask, H, K, V)
