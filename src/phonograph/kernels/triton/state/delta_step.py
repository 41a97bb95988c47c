"""Gated delta rule for few tokens of a sequence, one after another; of steps with few rows also the convolution.

An item is a sequence of these, a head of values and a block of the head's values: each column of the state is updated
and read by itself. A program has one item after another, and holds the columns [K, VALUES] in registers. It reads them
once and writes them once (and a checkpoint, if there is one), however many tokens there are. Formulas are in
`kernels/torch/state/delta_rule.py`, shapes in the torch twin.

Where each sequence has one token and rows are few, a launch costs more than its work. `delta_decode_kernel` has a
program for each item, and convolves the channels that the item needs, those of a key in each head of its values. It
reads the state, the weights and the last inputs before it waits for the product of the inputs. The last inputs are
written by the next launch (`delta_norm.py`), when no program reads them any more.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_let_next_start, pdl_wait
from phonograph.kernels.triton.state.delta_rows import (
    column_of,
    decay_and_rate,
    places_by_length,
    sequence_of,
    sequence_of_item,
)


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
        state, number, mask = _load_state(state_ptr, source, head, key, value, H, K, V)
        key_head = head % G if TILED else head // (H // G)
        for index in range(count):
            token = (start + index).to(tl.int64)
            inputs = conv_ptr + token * C
            q = tl.load(inputs + key_head * K + key, has_key, other=0.0).to(tl.float32)
            k = tl.load(inputs + G * K + key_head * K + key, has_key, other=0.0).to(tl.float32)
            v = tl.load(inputs + 2 * G * K + head * V + value, has_value, other=0.0).to(tl.float32)
            speed, bias = tl.load(decay_ptr + head), tl.load(time_bias_ptr + head)
            decay, rate = decay_and_rate(gates_ptr + token * gates_stride, speed, bias, head, True, G, H, BY_HEAD)
            state, mixed = _mix_token(state, q, k, v, decay, rate, K, NORM_EPS)
            tl.store(out_ptr + (token * H + head) * V + value, mixed.to(out_ptr.dtype.element_ty), has_value)
            if index + 1 == before:
                _store_state(state_ptr, saved, number, state, mask, H * K * V)
        _store_state(state_ptr, slot, number, state, mask, H * K * V)


@triton.jit
def delta_decode_kernel(
    projected_ptr, gates_ptr, taps_ptr, decay_ptr, time_bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr,
    history_ptr, state_ptr, out_ptr, gates_stride, checkpoints_stride, STRIDE: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BY_HEAD: tl.constexpr, TILED: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORM_EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve and mix the tokens of sequences with one.

    STRIDE: see `causal_conv.py`.
    KEYS: power of two, at least K.
    VALUES: columns of the state of an item, a power of two.
    """
    pdl_let_next_start(PDL)
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    C: tl.constexpr = 2 * G * K + H * V
    item = tl.program_id(0)
    row, head = item // (H * BLOCKS), item // BLOCKS % H
    start, count, source, slot, saved, before = sequence_of(
        row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    key, value = tl.arange(0, KEYS), item % BLOCKS * VALUES + tl.arange(0, VALUES)
    has_key, has_value = key < K, value < V
    state, number, mask = _load_state(state_ptr, source, head, key, value, H, K, V)
    key_head = head % G if TILED else head // (H // G)
    q_channel, v_channel = key_head * K + key, 2 * G * K + head * V + value
    k_channel = G * K + q_channel
    q_sum, q_tap = _old_inputs(history_ptr, taps_ptr, source, q_channel, has_key, C, W)
    k_sum, k_tap = _old_inputs(history_ptr, taps_ptr, source, k_channel, has_key, C, W)
    v_sum, v_tap = _old_inputs(history_ptr, taps_ptr, source, v_channel, has_value, C, W)
    speed, bias = tl.load(decay_ptr + head), tl.load(time_bias_ptr + head)
    pdl_wait(PDL)
    # A row without a token: its sequence is none, so that nothing was read.
    if count == 0:
        return
    token = start.to(tl.int64)
    inputs = projected_ptr + token * STRIDE
    # All loads come before sums, whose barriers they would not pass.
    v = tl.load(inputs + column_of(v_channel, G, H, K, V, BY_HEAD), has_value, other=0.0)
    q = tl.load(inputs + column_of(q_channel, G, H, K, V, BY_HEAD), has_key, other=0.0)
    k = tl.load(inputs + column_of(k_channel, G, H, K, V, BY_HEAD), has_key, other=0.0)
    decay, rate = decay_and_rate(gates_ptr + token * gates_stride, speed, bias, head, True, G, H, BY_HEAD)
    q, k, v = _convolved(q, q_sum, q_tap), _convolved(k, k_sum, k_tap), _convolved(v, v_sum, v_tap)
    state, mixed = _mix_token(state, q, k, v, decay, rate, K, NORM_EPS)
    tl.store(out_ptr + (token * H + head) * V + value, mixed.to(out_ptr.dtype.element_ty), has_value)
    _store_state(state_ptr, saved, number, state, mask & (before == 1), H * K * V)
    _store_state(state_ptr, slot, number, state, mask, H * K * V)


@triton.jit
def _load_state(state_ptr, source, head, key, value, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Return columns of a head's state at a place of the pool (0 without one), their numbers in it, and their mask."""
    mask = (key < K)[:, None] & (value < V)[None, :]
    number = (head * K + key)[:, None] * V + value[None, :]
    state = tl.load(state_ptr + source.to(tl.int64) * (H * K * V) + number, mask & (source >= 0), other=0.0)
    return state, number, mask


@triton.jit
def _store_state(state_ptr, place, number, state, mask, SIZE: tl.constexpr):
    """Write columns of a state to a place of the pool; a place below 0 is none."""
    tl.store(state_ptr + place.to(tl.int64) * SIZE + number, state, mask & (place >= 0))


@triton.jit
def _mix_token(state, q, k, v, decay, rate, K: tl.constexpr, NORM_EPS: tl.constexpr):
    """Return the state after a token, and the token's outputs."""
    q *= tl.rsqrt(tl.sum(q * q) + NORM_EPS) * (K**-0.5)
    k *= tl.rsqrt(tl.sum(k * k) + NORM_EPS)
    state *= tl.exp(decay)
    correction = (v - tl.sum(state * k[:, None], 0)) * rate
    state += k[:, None] * correction[None, :]
    return state, tl.sum(state * q[:, None], 0)


@triton.jit
def _old_inputs(history_ptr, taps_ptr, source, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Return the sum of a convolution's taps over the last inputs, and the tap of the token itself."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(W - 1):
        old = history_ptr + (source.to(tl.int64) * (W - 1) + tap) * C + channel
        x = tl.load(old, mask & (source >= 0), other=0.0)
        total += x.to(tl.float32) * tl.load(taps_ptr + channel * W + tap, mask, other=0.0)
    return total, tl.load(taps_ptr + channel * W + (W - 1), mask, other=0.0)


@triton.jit
def _convolved(x, total, tap):
    """Return silu of the convolution of a token, rounded to the type of its input."""
    total += x.to(tl.float32) * tap
    total *= tl.sigmoid(total)
    return total.to(x.dtype).to(tl.float32)
