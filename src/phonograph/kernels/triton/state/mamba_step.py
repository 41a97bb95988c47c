"""Scan of Mamba 2 for few tokens of a sequence, one after another.

An item is a sequence of these, a head and a block of the head's inputs. A program has one item after another, and holds
their rows of the state [V, K] in registers. It reads the state once and writes it once (and a checkpoint, if there
is one). Formulas and shapes are in the torch twin (`kernels/torch/state/mamba2.py`).
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.launch.pdl import pdl_begin
from phonograph.kernels.triton.state.delta_rows import places_by_length, sequence_of_item, softplus


@triton.jit(do_not_specialize=["num_reqs"])
def mamba_step_kernel(
    conv_ptr, times_ptr, decay_ptr, skip_ptr, time_bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr,
    state_ptr, out_ptr, num_reqs, times_stride, checkpoints_stride, H: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mix the tokens of sequences with up to MOST.

    KEYS: power of two, at least K.
    VALUES: rows of the state of an item, a power of two.
    ROWS: see `places_by_length`.
    """
    pdl_begin(PDL)
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    place, num_rows = places_by_length(starts_ptr, num_reqs, 1, MOST, ROWS)
    for item in tl.range(tl.program_id(0), num_rows * (H * BLOCKS), tl.num_programs(0), num_stages=1):
        head, start, count, source, slot, saved, before = sequence_of_item(
            item, place, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride, H, BLOCKS
        )
        key, value = tl.arange(0, KEYS), item % BLOCKS * VALUES + tl.arange(0, VALUES)
        has_key, has_value = key < K, value < V
        mask = has_value[:, None] & has_key[None, :]
        number = (head * V + value)[:, None] * K + key[None, :]
        state = tl.load(state_ptr + source.to(tl.int64) * (H * V * K) + number, mask & (source >= 0), other=0.0)
        rate, skip = -tl.exp(tl.load(decay_ptr + head)), tl.load(skip_ptr + head)
        time_bias = tl.load(time_bias_ptr + head)
        for index in range(count):
            token = (start + index).to(tl.int64)
            inputs = conv_ptr + token * (H * V + 2 * G * K)
            keys = inputs + H * V + head // (H // G) * K + key
            x = tl.load(inputs + head * V + value, has_value, other=0.0).to(tl.float32)
            b = tl.load(keys, has_key, other=0.0).to(tl.float32)
            c = tl.load(keys + G * K, has_key, other=0.0).to(tl.float32)
            time = softplus(tl.load(times_ptr + token * times_stride + head).to(tl.float32) + time_bias)
            state = state * tl.exp(rate * time) + (time * x)[:, None] * b[None, :]
            mixed = tl.sum(state * c[None, :], 1) + skip * x
            tl.store(out_ptr + (token * H + head) * V + value, mixed.to(out_ptr.dtype.element_ty), has_value)
            if index + 1 == before:
                tl.store(state_ptr + saved.to(tl.int64) * (H * V * K) + number, state, mask & (saved >= 0))
        tl.store(state_ptr + slot.to(tl.int64) * (H * V * K) + number, state, mask & (slot >= 0))
