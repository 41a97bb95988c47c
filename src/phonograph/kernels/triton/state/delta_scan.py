"""Scan of the gated delta rule over the chunks of long sequences, one chunk after another.

An item is a sequence, a head of values and a block of its values. A program has one item after another, and holds the
block of the state, transposed [VALUES, K], in registers. Results of products have the tokens of a chunk as columns, so
that the next product takes them from the same registers. `delta_chunk.py` has computed the relations between the tokens
of a chunk before; see there for the chunks too. Operands of products are in the type of the activations, sums and the
state in float32.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.triton.state.delta_chunk import tokens_until
from phonograph.kernels.triton.state.delta_rows import places_by_length, sequence_of_item


@triton.jit(do_not_specialize=["num_reqs"])
def delta_scan_kernel(
    conv_ptr, pairs_ptr, factors_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, state_ptr, out_ptr, num_reqs,
    checkpoints_stride, C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, TILED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the outputs of sequences with more than MOST tokens, before their norm, and the states.

    KEYS: power of two of at least 16, at least K.
    VALUES: values of an item, a power of two of at least 16.
    PARTS: see `delta_chunk_kernel`.
    STAGES: of the copies of a chunk's inputs.
    ROWS: see `places_by_length`.
    """
    BLOCKS: tl.constexpr = (V + VALUES - 1) // VALUES
    place, num_rows = places_by_length(starts_ptr, num_reqs, MOST + 1, 2**31 - 1, ROWS)
    for item in tl.range(tl.program_id(0), num_rows * (H * BLOCKS), tl.num_programs(0), num_stages=1):
        head, start, count, source, slot, saved, before = sequence_of_item(
            item, place, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride, H, BLOCKS
        )
        key, value, line = tl.arange(0, KEYS), item % BLOCKS * VALUES + tl.arange(0, VALUES), tl.arange(0, CHUNK)
        has_key, has_value = key < K, value < V
        mask = has_value[:, None] & has_key[None, :]
        number = head * K * V + key[None, :] * V + value[:, None]
        state = tl.load(state_ptr + source.to(tl.int64) * (H * K * V) + number, mask & (source >= 0), other=0.0)
        key_head = head % G if TILED else head // (H // G)
        until = tokens_until(count, before)
        # Tokens up to a checkpoint, then those after it.
        for half in tl.range(2, num_stages=1):
            begin = tl.where(half == 0, 0, until)
            end = tl.where(half == 0, until, count)
            values = conv_ptr + start.to(tl.int64) * C + 2 * G * K + head * V + (line[:, None] * C + value[None, :])
            is_value = (line < end - begin)[:, None] & has_value[None, :]
            v = tl.load(values + begin.to(tl.int64) * C, is_value, other=0.0)
            for chunk in tl.range(tl.cdiv(end - begin, CHUNK), num_stages=STAGES):
                first = begin + chunk * CHUNK
                is_token = first + line < end
                token = (start + first).to(tl.int64)
                inputs = conv_ptr + token * C + key_head * K + (line[:, None] * C + key[None, :])
                key_mask = is_token[:, None] & has_key[None, :]
                pairs = pairs_ptr + (token * H + head) * ((PARTS + 1) * CHUNK)
                pairs += line[:, None] * (H * (PARTS + 1) * CHUNK) + line[None, :]
                factors = factors_ptr + (token * H + head) * 4
                whole = tl.load(factors + 3 + tl.zeros((1, 1), tl.int32))
                factors += line[:, None] * (H * 4) + tl.arange(0, 4)[None, :]
                table = tl.load(factors, is_token[:, None], other=0.0)
                even, odd = tl.split(tl.reshape(table, (CHUNK, 2, 2)))
                known, kept = tl.split(even)
                asked, _ = tl.split(odd)

                # Triton makes no asynchronous copies of numbers in 16 bits but for operands of products. Values of the
                # next chunk are therefore loaded to registers.
                following = first + CHUNK
                is_value = (line < end - following)[:, None] & has_value[None, :]
                next_v = tl.load(values + following.to(tl.int64) * C, is_value, other=0.0)
                before_t = state.to(conv_ptr.dtype.element_ty)
                k = tl.load(inputs + G * K, key_mask, other=0.0)
                change_t = tl.dot(before_t, tl.trans(k), input_precision="tf32x3")
                change_t = (tl.trans(v).to(tl.float32) - change_t * known[None, :]).to(k.dtype)
                inverse = tl.load(pairs, is_token[:, None], other=0.0)
                correction_t = tl.dot(change_t, tl.trans(inverse), input_precision="tf32x3")
                if PARTS == 2:
                    inverse = tl.load(pairs + CHUNK, is_token[:, None], other=0.0)
                    correction_t = tl.dot(change_t, tl.trans(inverse), correction_t)
                # From here on only 16 bits of a correction need registers.
                added_t = (correction_t * kept[None, :]).to(k.dtype)
                correction_t = correction_t.to(k.dtype)
                q = tl.load(inputs, key_mask, other=0.0)
                mixed_t = tl.dot(before_t, tl.trans(q), input_precision="tf32x3") * asked[None, :]
                scores = tl.load(pairs + PARTS * CHUNK, is_token[:, None], other=0.0)
                mixed_t = tl.dot(correction_t, tl.trans(scores), mixed_t, input_precision="tf32x3")
                state = tl.dot(added_t, k, state * whole, input_precision="tf32x3")
                out = out_ptr + (token * H + head) * V + (line[:, None] * (H * V) + value[None, :])
                # The mask of the copies would take registers from there to here.
                is_stored = (line < end - first)[:, None] & has_value[None, :]
                tl.store(out, tl.trans(mixed_t.to(out_ptr.dtype.element_ty)), is_stored)
                v = next_v
            target = tl.where(half == 0, saved, slot)
            stores = (target >= 0) & ((half == 1) | (until > 0))
            tl.store(state_ptr + target.to(tl.int64) * (H * K * V) + number, state, mask & stores)
