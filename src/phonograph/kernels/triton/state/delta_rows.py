"""Places of numbers of gated delta nets (columns of projections by head), and of sequences and states of all mixers.

Shapes are those of the torch twin (`kernels/torch/state/gated_delta.py`).
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, num_reqs):
    """Return what a step knows of a sequence.

    These are its first token in the step, its tokens in it, its tokens before, the place that its state is read from
    (-1 for zeros), its slot, and the place of a checkpoint with its tokens before it, in the step.
    """
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    context = tl.load(lens_ptr + row) - count
    slot = tl.load(slots_ptr + row)
    restored = tl.load(checkpoints_ptr + row)
    saved = tl.load(checkpoints_ptr + num_reqs + row)
    before = tl.load(checkpoints_ptr + 2 * num_reqs + row) - context
    source = tl.where((slot < 0) | (context <= 0), -1, tl.where(restored < 0, slot, restored))
    return start, count, source, slot, saved, before


@triton.jit
def sequence_of_item(
    item, place, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, num_reqs, H: tl.constexpr, BLOCKS: tl.constexpr
):
    """Return the head of an item, and what a step knows of its sequence; `place` is of `places_by_length`."""
    row = tl.sum(tl.where(place == item // (H * BLOCKS), tl.arange(0, place.shape[0]), 0), 0)
    head = item // BLOCKS % H
    start, count, source, slot, saved, before = sequence_of(
        row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, num_reqs
    )
    return head, start, count, source, slot, saved, before


def places_size(num_reqs: int) -> int:
    """Return ROWS of `places_by_length`: few values, so that few kernels are compiled."""
    return max(128, 1 << (num_reqs - 1).bit_length())


@triton.jit
def places_by_length(starts_ptr, num_reqs, LEAST: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr):
    """Return the place of each sequence among those with LEAST to MOST tokens, -1 for others, and their number.

    ROWS: power of two, at least the number of sequences.
    """
    row = tl.arange(0, ROWS)
    count = tl.load(starts_ptr + tl.minimum(row + 1, num_reqs)) - tl.load(starts_ptr + tl.minimum(row, num_reqs))
    chosen = ((count >= LEAST) & (count <= MOST)).to(tl.int32)
    return tl.where(chosen == 1, tl.cumsum(chosen, 0) - 1, -1), tl.sum(chosen, 0)


@triton.jit
def column_of(channel, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr):
    """Return the column of the projection with a channel of the convolution."""
    if not BY_HEAD:
        return channel
    values: tl.constexpr = H // G * V
    is_value = channel >= 2 * G * K
    inner = tl.where(is_value, channel - 2 * G * K, channel % (G * K))
    width = tl.where(is_value, values, K)
    first = tl.where(is_value, 2 * K, tl.where(channel >= G * K, K, 0))
    return inner // width * (2 * K + 2 * values) + first + inner % width


@triton.jit
def gate_column(head, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr):
    """Return the column of the projection with the first output gate of a head of values."""
    each: tl.constexpr = H // G
    if BY_HEAD:
        return head // each * (2 * K + 2 * each * V) + 2 * K + each * V + head % each * V
    return 2 * G * K + H * V + head * V


@triton.jit
def decay_and_rate(gates_ptr, speed, time_bias, head, mask, G: tl.constexpr, H: tl.constexpr, BY_HEAD: tl.constexpr):
    """Return the logarithm of a head's decay and its learning rate, float32, at tokens whose gates are at `gates_ptr`.

    `speed` and `time_bias` are the head's weights. Results are 0 where the mask is False: the token changes no state.
    """
    each: tl.constexpr = H // G
    if BY_HEAD:
        rate_column = head // each * 2 * each + head % each
        time_column = rate_column + each
    else:
        rate_column = head
        time_column = H + head
    rate = tl.load(gates_ptr + rate_column, mask, other=0.0).to(tl.float32)
    time = tl.load(gates_ptr + time_column, mask, other=0.0).to(tl.float32) + time_bias
    decay = -tl.exp(speed) * softplus(time)
    return tl.where(mask, decay, 0.0), tl.where(mask, tl.sigmoid(rate), 0.0)


@triton.jit
def softplus(time):
    """Return log(1 + exp(time))."""
    # The exponential of a large time overflows.
    return tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
