"""Gated delta rule for few tokens of a sequence, one after another.

An item is a sequence of these, a head of values and a block of the head's values: each column of the state is updated
and read by itself. A program has one item after another, and holds the columns [K, VALUES] in registers. It reads them
once and writes them once (and a checkpoint, if there is one), however many tokens there are. Formulas are in
`kernels/torch/state/delta_rule.py`, shapes in the torch twin.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin
from phonograph.kernels.triton.state.delta_rows import decay_and_rate, places_by_length, sequence_of_item


@triton.jit(do_not_specialize=["num_reqs"])
def delta_step_kernel(
    conv_ptr, gates_ptr, decay_ptr, time_bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, state_ptr, out_ptr,
    num_reqs, gates_stride, checkpoints_stride, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BY_HEAD: tl.constexpr, TILED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, NORM_EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mix the tokens of sequences with up to MOST.

    KEYS: power of two, at least K.
    VALUES: columns of the state of an item, a power of two.
    ROWS: see `places_by_length`.
    """
    pdl_begin(PDL)
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    C: tl.constexpr = 2 * G * K + H * V
    place, num_rows = places_by_length(starts_ptr, num_reqs, 1, MOST, ROWS)
    for item in tl.range(tl.program_id(0), num_rows * (H * BLOCKS), tl.num_programs(0), num_stages=1):
        head, start, count, source, slot, saved, before = sequence_of_item(
            item, place, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride, H, BLOCKS
        )
        key, value = tl.arange(0, KEYS), item % BLOCKS * VALUES + tl.arange(0, VALUES)
        has_key, has_value = key < K, value < V
        mask = has_key[:, None] & has_value[None, :]
        number = (head * K + key)[:, None] * V + value[None, :]
        state = tl.load(state_ptr + source.to(tl.int64) * (H * K * V) + number, mask & (source >= 0), other=0.0)
        key_head = head % G if TILED else head // (H // G)
        for index in range(count):
            token = (start + index).to(tl.int64)
            inputs = conv_ptr + token * C
            q = tl.load(inputs + key_head * K + key, has_key, other=0.0).to(tl.float32)
            k = tl.load(inputs + G * K + key_head * K + key, has_key, other=0.0).to(tl.float32)
            v = tl.load(inputs + 2 * G * K + head * V + value, has_value, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q) + NORM_EPS) * (K**-0.5)
            k *= tl.rsqrt(tl.sum(k * k) + NORM_EPS)
            decay, rate = decay_and_rate(
                gates_ptr + token * gates_stride, decay_ptr, time_bias_ptr, head, True, G, H, BY_HEAD
            )
            state *= tl.exp(decay)
            correction = (v - tl.sum(state * k[:, None], 0)) * rate
            state += k[:, None] * correction[None, :]
            mixed = tl.sum(state * q[:, None], 0)
            tl.store(out_ptr + (token * H + head) * V + value, mixed.to(out_ptr.dtype.element_ty), has_value)
            if index + 1 == before:
                tl.store(state_ptr + saved.to(tl.int64) * (H * K * V) + number, state, mask & (saved >= 0))
        tl.store(state_ptr + slot.to(tl.int64) * (H * K * V) + number, state, mask & (slot >= 0))
