"""Scan of Mamba 2 for many tokens of a sequence, by products of matrices over chunks of tokens.

An item is a sequence of these or a segment of one (`mamba_segments.py`), a head and a block of the head's inputs. A
program has one item after another, and holds their rows of the state [V, K] in registers. A chunk ends at the
checkpoint, if there is one. Its tokens read the state before the chunk, and each other as causal attention does, with
decays in place of a softmax (Dao and Gu 2024, arXiv:2405.21060). Formulas and shapes are in the torch twin
(`kernels/torch/state/mamba2.py`). Operands of products are in the type of the inputs, sums and the state in float32.
Results have the tokens of a chunk as columns, as the state has its inputs as rows, so that products take state and
inputs from registers.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.state.delta_rows import sequence_of, softplus
from phonograph.kernels.triton.state.mamba_segments import segments_by_row


@triton.jit(do_not_specialize=["num_reqs"])
def mamba_chunk_kernel(
    conv_ptr, times_ptr, decay_ptr, skip_ptr, time_bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr,
    state_ptr, out_ptr, between_ptr, num_reqs, times_stride, checkpoints_stride, H: tl.constexpr, V: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, SEGMENT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Mix the tokens of sequences with more than MOST.

    between_ptr: states after segments that others follow.
    KEYS: power of two of at least 16, at least K.
    VALUES: rows of the state of an item, a power of two of at least 16.
    PROGRAMS, ROWS: see `segments_by_row`.
    """
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    ends, followed, is_cut = segments_by_row(starts_ptr, num_reqs, H * BLOCKS, MOST, SEGMENT, PROGRAMS, ROWS)
    for item in tl.range(tl.program_id(0), tl.max(ends, 0) * (H * BLOCKS), tl.num_programs(0), num_stages=1):
        segment, head = item // (H * BLOCKS), item // BLOCKS % H
        is_earlier = ends <= segment
        row = tl.sum(is_earlier.to(tl.int32), 0)
        segment -= tl.max(tl.where(is_earlier, ends, 0), 0)
        place = tl.max(tl.where(is_earlier, followed, 0), 0) + segment - 1
        start, count, source, slot, saved, before = sequence_of(
            row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
        )
        skipped = segment * SEGMENT
        is_last = (skipped + SEGMENT >= count) | (is_cut == 0)
        start, before = start + skipped, before - skipped
        count = tl.where(is_last, count - skipped, SEGMENT)
        C: tl.constexpr = H * V + 2 * G * K
        key, value, line = tl.arange(0, KEYS), item % BLOCKS * VALUES + tl.arange(0, VALUES), tl.arange(0, CHUNK)
        has_key, has_value = key < K, value < V
        mask = has_value[:, None] & has_key[None, :]
        number = (head * V + value)[:, None] * K + key[None, :]
        states = tl.where(segment > 0, between_ptr, state_ptr)
        source = tl.where(segment > 0, place, source)
        state = tl.load(states + source.to(tl.int64) * (H * V * K) + number, mask & (source >= 0), other=0.0)
        rate, skip = -tl.exp(tl.load(decay_ptr + head)), tl.load(skip_ptr + head)
        time_bias = tl.load(time_bias_ptr + head)
        is_later = line[:, None] <= line[None, :]
        # Tokens up to a checkpoint within them, or all of them, and chunks of these.
        until = tl.where((before > 0) & (before < count), before, count)
        num_first = tl.cdiv(until, CHUNK)
        for chunk in tl.range(num_first + tl.cdiv(count - until, CHUNK), num_stages=STAGES):
            is_first = chunk < num_first
            first = tl.where(is_first, 0, until - num_first * CHUNK) + chunk * CHUNK
            end = tl.minimum(first + CHUNK, tl.where(is_first, until, count))
            is_token = first + line < end
            token = (start + first).to(tl.int64)
            inputs = conv_ptr + token * C
            keys = inputs + H * V + head // (H // G) * K + (line[:, None] * C + key[None, :])
            key_mask = is_token[:, None] & has_key[None, :]
            value_mask = is_token[:, None] & has_value[None, :]
            x = tl.load(inputs + head * V + (line[:, None] * C + value[None, :]), value_mask, other=0.0)
            b = tl.load(keys, key_mask, other=0.0)
            c = tl.load(keys + G * K, key_mask, other=0.0)
            times = times_ptr + token * times_stride + head + line * times_stride
            time = softplus(tl.load(times, is_token, other=0.0).to(tl.float32) + time_bias)
            # A row after the last token changes no state.
            time = tl.where(is_token, time, 0.0)
            total = tl.cumsum(rate * time, 0)
            # The last line's own number: a sum in another order has other errors, which the exponential enlarges.
            whole = tl.sum(tl.where(line == CHUNK - 1, total, 0.0), 0)
            factors = tl.exp(tl.where(is_later, total[None, :] - total[:, None], -float("inf"))) * time[:, None]
            scores = (tl.dot(b, tl.trans(c), input_precision="ieee") * factors).to(x.dtype)
            mixed = tl.dot(state.to(x.dtype), tl.trans(c), input_precision="ieee") * tl.exp(total)[None, :]
            x_t = tl.trans(x)
            mixed = tl.dot(x_t, scores, mixed, input_precision="ieee")
            wide = x_t.to(tl.float32)
            mixed += skip * wide
            added = (wide * (tl.exp(whole - total) * time)[None, :]).to(x.dtype)
            state = tl.dot(added, b, state * tl.exp(whole), input_precision="ieee")
            out = out_ptr + (token * H + head) * V + (line[:, None] * (H * V) + value[None, :])
            tl.store(out, tl.trans(mixed.to(out_ptr.dtype.element_ty)), value_mask)
            saves = (end == before) & (saved >= 0)
            tl.store(state_ptr + saved.to(tl.int64) * (H * V * K) + number, state, mask & saves)
        tl.store(state_ptr + slot.to(tl.int64) * (H * V * K) + number, state, mask & is_last & (slot >= 0))
