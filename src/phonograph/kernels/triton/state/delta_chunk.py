"""Relations between the tokens of a chunk, for all chunks of long sequences at the same time.

An item is a chunk of up to 64 tokens and a head of values. A program has one item after another. A chunk ends at its
sequence's checkpoint, if there is one. The corrections of tokens depend on each other through a triangular system (Yang
et al. 2024, arXiv:2412.06464), which is inverted here; `delta_scan.py` reads the inverse. The operands are queries and
keys before their norms, which factors in float32 apply. Formulas are in `kernels/torch/state/delta_rule.py`, shapes in
the torch twin and in `gated_delta.py`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.state.delta_rows import decay_and_rate, sequence_of


@triton.jit
def tokens_until(count, before):
    """Return the tokens of a sequence up to a checkpoint within the step; 0 without one."""
    return tl.where((before > 0) & (before <= count), before, 0)


@triton.jit
def _ends_of_chunks(
    starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride, num_reqs, MOST: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the number of chunks up to each sequence, its own included. Those with up to MOST tokens have none."""
    row = tl.arange(0, ROWS)
    _, count, _, _, _, before = sequence_of(
        tl.minimum(row, num_reqs - 1), starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    until = tokens_until(count, before)
    chunks = tl.cdiv(until, CHUNK) + tl.cdiv(count - until, CHUNK)
    return tl.cumsum(tl.where((row < num_reqs) & (count > MOST), chunks, 0), 0)


@triton.jit
def _chunk_of(chunk, ends, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride, CHUNK: tl.constexpr):
    """Return the first token of a chunk and its number of tokens."""
    row = tl.sum((ends <= chunk).to(tl.int32), 0)
    chunk -= tl.max(tl.where(ends <= chunk, ends, 0), 0)
    start, count, _, _, _, before = sequence_of(
        row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    until = tokens_until(count, before)
    num_first = tl.cdiv(until, CHUNK)
    first = chunk * CHUNK
    end = until
    if chunk >= num_first:
        first += until - num_first * CHUNK
        end = count
    return (start + first).to(tl.int64), tl.minimum(end - first, CHUNK)


@triton.jit(do_not_specialize=["num_reqs"])
def delta_chunk_kernel(
    conv_ptr, gates_ptr, decay_ptr, time_bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, pairs_ptr,
    factors_ptr, num_reqs, gates_stride, checkpoints_stride, C: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BY_HEAD: tl.constexpr, TILED: tl.constexpr, KEYS: tl.constexpr,
    MOST: tl.constexpr, NORM_EPS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the relations between the tokens of each chunk of sequences with more than MOST.

    KEYS: power of two of at least 16, at least K.
    PARTS: numbers in the type of the activations whose sum is a number of the inverse.
    ROWS: see `places_by_length`.
    """
    rows = starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    ends = _ends_of_chunks(*rows, num_reqs, MOST, CHUNK, ROWS)
    for item in tl.range(tl.program_id(0), tl.max(ends, 0) * H, tl.num_programs(0), num_stages=1):
        head = item % H
        first, size = _chunk_of(item // H, ends, *rows, CHUNK)
        key, line = tl.arange(0, KEYS), tl.arange(0, CHUNK)
        is_token = line < size
        key_head = head % G if TILED else head // (H // G)
        keys = conv_ptr + first * C + G * K + key_head * K + (line[:, None] * C + key[None, :])
        mask = is_token[:, None] & (key < K)[None, :]
        k = tl.load(keys, mask, other=0.0)
        q = tl.load(keys - G * K, mask, other=0.0)
        wide = k.to(tl.float32)
        k_norm = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
        wide = q.to(tl.float32)
        q_norm = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS) * (K**-0.5)
        gates = gates_ptr + first * gates_stride + line * gates_stride
        decay, rate = decay_and_rate(
            gates, tl.load(decay_ptr + head), tl.load(time_bias_ptr + head), head, is_token, G, H, BY_HEAD
        )
        total = tl.cumsum(decay, 0)
        # The last line's own number: a sum in another order has other errors, which the exponential enlarges.
        whole = tl.sum(tl.where(line == CHUNK - 1, total, 0.0), 0)
        factors = factors_ptr + (first * H + head) * 4 + line * (H * 4)
        since = tl.exp(total)
        tl.store(factors, k_norm * since, is_token)
        tl.store(factors + 1, q_norm * since, is_token)
        tl.store(factors + 2, k_norm * tl.exp(whole - total), is_token)
        tl.store(factors + 3, tl.exp(whole) + tl.zeros((CHUNK,), tl.float32), is_token)

        pairs = pairs_ptr + (first * H + head) * ((PARTS + 1) * CHUNK)
        pairs += line[:, None] * (H * (PARTS + 1) * CHUNK) + line[None, :]
        between = total[:, None] - total[None, :]
        between = tl.exp(tl.where(line[:, None] >= line[None, :], between, -float("inf"))) * k_norm[None, :]
        k_t = tl.trans(k)
        scores = tl.dot(q, k_t, input_precision="tf32x3") * between * q_norm[:, None]
        tl.store(pairs + PARTS * CHUNK, scores.to(pairs_ptr.dtype.element_ty), is_token[:, None])
        system = tl.dot(k, k_t, input_precision="tf32x3") * between * (rate * k_norm)[:, None]
        system = tl.where(line[:, None] > line[None, :], system, 0.0)
        inverse = _inverse(system, CHUNK) * rate[None, :]
        for part in tl.static_range(PARTS):
            rounded = inverse.to(pairs_ptr.dtype.element_ty)
            tl.store(pairs + part * CHUNK, rounded, is_token[:, None])
            inverse -= rounded.to(tl.float32)


@triton.jit
def _inverse(system, SIZE: tl.constexpr):
    """Return the inverse of the sum of 1 and a strictly lower triangular matrix [SIZE, SIZE].

    Blocks on the diagonal are inverted at the same time: blocks of 8 by the finite series of their powers, those of 16
    from these. Longer series have large terms of alternating signs where keys are alike.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    block, line = tl.arange(0, BLOCKS), tl.arange(0, 16)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    near = tl.sum(tl.where(on_diagonal, tl.reshape(system, (BLOCKS, 16, BLOCKS, 16)), 0.0), 2)
    in_eighth = (line[:, None] // 8 == line[None, :] // 8)[None]
    power = tl.where(in_eighth, near, 0.0)
    inverse = (line[:, None] == line[None, :]).to(tl.float32)[None] - power
    for _ in tl.static_range(2):
        power = _product(power, power)
        inverse += _product(inverse, power)
    inverse -= _product(_product(inverse, tl.where(in_eighth, 0.0, near)), inverse)

    inverse = tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), (SIZE, SIZE))
    index = tl.arange(0, SIZE)
    # The fourth power of this one is zero.
    far = _product(inverse, tl.where(index[:, None] // 16 == index[None, :] // 16, 0.0, system))
    inverse += _product(_product(far, far), inverse)
    return inverse - _product(far, inverse)


@triton.jit
def _product(a, b):
    """Return the product of float32 matrices of small numbers, each of them as the sum of two float16 numbers."""
    first, second = a.to(tl.float16), b.to(tl.float16)
    product = tl.dot((a - first.to(tl.float32)).to(tl.float16), second)
    product = tl.dot(first, (b - second.to(tl.float32)).to(tl.float16), product)
    return tl.dot(first, second, product)
