"""States between the segments of long sequences, from which the scan of Mamba 2 takes all segments at the same time.

A scan has a program for each sequence and head, of which one long sequence has too few. A state is the one before,
times a decay, plus what the tokens add, so that segments of SEGMENT tokens can add theirs apart from each other (Dao
and Gu 2024, arXiv:2405.21060, section 6):

    segment      0            1            2            3
    1.        added 0      added 1      added 2                    `mamba_segment_kernel`, all at the same time
    2.    state 0 -> state 1 ----> state 2 ----> state 3           `mamba_pass_kernel`, one after another
    3.        scan         scan         scan         scan          `mamba_chunk_kernel`, all at the same time

Sequences are cut if the longest one would take much longer than all programs with equal shares (`segments_by_row`).

Scratch, float32: states [N, H, V, K] after N segments that others follow, and the logarithms of their decays [N, H].
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.state.delta_rows import places_by_length, sequence_of, softplus


@triton.jit
def segments_by_row(
    starts_ptr, num_reqs, items, MOST: tl.constexpr, SEGMENT: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr
):
    """Return by sequence the segments up to it, its own included, those that others follow, and whether any are cut.

    Sequences with up to MOST tokens have none. All others have one, unless they are cut.

    items: of each sequence or segment.
    PROGRAMS: that run at the same time.
    ROWS: see `places_by_length`.
    """
    row = tl.arange(0, ROWS)
    count = tl.load(starts_ptr + tl.minimum(row + 1, num_reqs)) - tl.load(starts_ptr + tl.minimum(row, num_reqs))
    count = tl.where(count > MOST, count, 0)
    is_long = (count > 0).to(tl.int32)
    is_cut = 2 * tl.max(count, 0) * PROGRAMS > 3 * tl.sum(count, 0) * items
    segments = tl.where(is_cut, tl.cdiv(count, SEGMENT), is_long)
    return tl.cumsum(segments, 0), tl.cumsum(segments - is_long, 0), is_cut


@triton.jit(do_not_specialize=["num_reqs"])
def mamba_segment_kernel(
    conv_ptr, times_ptr, decay_ptr, time_bias_ptr, starts_ptr, added_ptr, decays_ptr, num_reqs, times_stride,
    H: tl.constexpr, V: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, SEGMENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write what each segment that others follow adds to the state, and its decay. See `mamba_chunk_kernel`."""
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    C: tl.constexpr = H * V + 2 * G * K
    _ends, followed, _is_cut = segments_by_row(starts_ptr, num_reqs, H * BLOCKS, MOST, SEGMENT, PROGRAMS, ROWS)
    for item in tl.range(tl.program_id(0), tl.max(followed, 0) * (H * BLOCKS), tl.num_programs(0), num_stages=1):
        segment, head = item // (H * BLOCKS), item // BLOCKS % H
        row = tl.sum((followed <= segment).to(tl.int32), 0)
        first = tl.max(tl.where(followed <= segment, followed, 0), 0)
        start = (tl.load(starts_ptr + row) + (segment - first) * SEGMENT).to(tl.int64)
        key, value, line = tl.arange(0, KEYS), item % BLOCKS * VALUES + tl.arange(0, VALUES), tl.arange(0, CHUNK)
        has_key, has_value = key < K, value < V
        rate, time_bias = -tl.exp(tl.load(decay_ptr + head)), tl.load(time_bias_ptr + head)
        state = tl.zeros((VALUES, KEYS), tl.float32)
        log_decay = 0.0
        for chunk in tl.range(SEGMENT // CHUNK, num_stages=STAGES):
            token = start + chunk * CHUNK
            inputs = conv_ptr + token * C
            keys = inputs + H * V + head // (H // G) * K + (line[:, None] * C + key[None, :])
            x = tl.load(inputs + head * V + (line[:, None] * C + value[None, :]), has_value[None, :], other=0.0)
            b = tl.load(keys, has_key[None, :], other=0.0)
            times = times_ptr + token * times_stride + head + line * times_stride
            time = softplus(tl.load(times).to(tl.float32) + time_bias)
            total = tl.cumsum(rate * time, 0)
            whole = tl.sum(tl.where(line == CHUNK - 1, total, 0.0), 0)
            scaled = (x.to(tl.float32) * (tl.exp(whole - total) * time)[:, None]).to(x.dtype)
            state = tl.dot(tl.trans(scaled), b, state * tl.exp(whole), input_precision="ieee")
            log_decay += whole
        place = first.to(tl.int64) + (segment - first)
        added = added_ptr + place * (H * V * K) + ((head * V + value)[:, None] * K + key[None, :])
        tl.store(added, state, has_value[:, None] & has_key[None, :])
        tl.store(decays_ptr + place * H + head, log_decay)


@triton.jit(do_not_specialize=["num_reqs"])
def mamba_pass_kernel(
    starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, pool_ptr, states_ptr, decays_ptr, num_reqs, checkpoints_stride,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, ITEMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, SEGMENT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Replace what a segment adds by the state after it. An item is a sequence, a head and BLOCK of its numbers.

    ITEMS: of a sequence in the scan.
    """
    BLOCKS: tl.constexpr = (V * K + BLOCK - 1) // BLOCK
    _ends, followed, is_cut = segments_by_row(starts_ptr, num_reqs, ITEMS, MOST, SEGMENT, PROGRAMS, ROWS)
    place, num_rows = places_by_length(starts_ptr, num_reqs, SEGMENT + 1, 2**31 - 1, ROWS)
    num_rows = tl.where(is_cut, num_rows, 0)
    for item in tl.range(tl.program_id(0), num_rows * (H * BLOCKS), tl.num_programs(0), num_stages=1):
        index = tl.arange(0, ROWS)
        row, head = tl.sum(tl.where(place == item // (H * BLOCKS), index, 0), 0), item // BLOCKS % H
        end = tl.sum(tl.where(index == row, followed, 0), 0)
        begin = tl.sum(tl.where(index == row - 1, followed, 0), 0)
        _, _, source, _, _, _ = sequence_of(row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride)
        number = item % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        mask = number < V * K
        number += head * (V * K)
        state = tl.load(pool_ptr + source.to(tl.int64) * (H * V * K) + number, mask & (source >= 0), other=0.0)
        states, decays = states_ptr + begin.to(tl.int64) * (H * V * K) + number, decays_ptr + begin * H + head
        for _ in tl.range(end - begin, num_stages=1):
            state = state * tl.exp(tl.load(decays)) + tl.load(states, mask, other=0.0)
            tl.store(states, state, mask)
            states += H * V * K
            decays += H
