"""Gated delta rule for few tokens of a sequence, one after another, with the norms, the gates and the state's update.

A program has a sequence and a head of values, and holds the head's state [K, V] in registers. It reads the state once
and writes it once (and a checkpoint, if there is one), however many tokens there are. Formulas are in
`kernels/torch/state/delta_rule.py`, shapes in the torch twin.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.state.delta_rows import decay_and_rate, gate_column, sequence_of, store_state


@triton.jit
def delta_step_kernel(
    conv_ptr, projected_ptr, gates_ptr, decay_ptr, time_bias_ptr, norm_ptr, starts_ptr, lens_ptr, slots_ptr,
    checkpoints_ptr, state_ptr, out_ptr, eps, projected_stride, gates_stride, checkpoints_stride, C: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr, TILED: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, MOST: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Mix up to MOST tokens of a sequence; programs of longer ones and of empty rows do nothing.

    KEYS, VALUES: powers of two, at least K and V.
    """
    head = tl.program_id(1)
    start, count, source, slot, saved, before = sequence_of(
        tl.program_id(0), starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    if (count == 0) | (count > MOST):
        return
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    has_key, has_value = key < K, value < V
    mask = has_key[:, None] & has_value[None, :]
    place = state_ptr + (source.to(tl.int64) * H + head) * K * V + key[:, None] * V + value[None, :]
    state = tl.load(place, mask & (source >= 0), other=0.0)
    norm = tl.load(norm_ptr + value, has_value, other=0.0)
    key_head = head % G if TILED else head // (H // G)
    for index in range(count):
        token = (start + index).to(tl.int64)
        row = conv_ptr + token * C
        q = tl.load(row + key_head * K + key, has_key, other=0.0).to(tl.float32)
        k = tl.load(row + G * K + key_head * K + key, has_key, other=0.0).to(tl.float32)
        v = tl.load(row + 2 * G * K + head * V + value, has_value, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q) + NORM_EPS) * (K**-0.5)
        k *= tl.rsqrt(tl.sum(k * k) + NORM_EPS)
        decay, rate = decay_and_rate(
            gates_ptr + token * gates_stride, decay_ptr, time_bias_ptr, head, True, G, H, BY_HEAD
        )
        state *= tl.exp(decay)
        correction = (v - tl.sum(state * k[:, None], 0)) * rate
        state += k[:, None] * correction[None, :]
        mixed = tl.sum(state * q[:, None], 0)
        mixed *= tl.rsqrt(tl.sum(mixed * mixed) / V + eps) * norm
        first_gate = projected_ptr + token * projected_stride + gate_column(head, G, H, K, V, BY_HEAD)
        gate = tl.load(first_gate + value, has_value, other=0.0).to(tl.float32)
        mixed *= gate * tl.sigmoid(gate)
        tl.store(out_ptr + (token * H + head) * V + value, mixed.to(out_ptr.dtype.element_ty), has_value)
        if index + 1 == before:
            store_state(state_ptr, saved, head, state, mask, H, K, V)
    store_state(state_ptr, slot, head, state, mask, H, K, V)
