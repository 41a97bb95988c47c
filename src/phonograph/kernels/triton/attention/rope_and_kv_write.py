"""Norms of heads, rotary embedding and KV write of the fused projection, in one kernel.

Shapes: T tokens, H query heads, K KV heads, D head size, F = (H + 2K) * D, B blocks, S block size, P positions.

Rotary embedding is that of Su et al. (2021) on pairs (d, d + R/2) of the first R numbers of a head, which are all for
most models and none for some layers; or on the first R/2 pairs (d, d + D/2). Queries are rotated in place; keys are
rotated on their way into the cache, and values are copied there, normed for some models. The kernel serves all
backends, because all share one cache layout. Few tokens are spread over many programs, many tokens over fewer and
larger ones.

    a token's heads   | q0 q1 q2 q3 q4 q5 q6 q7 | k0 k1 | v0 v1 |
    programs          |  0  |  1  |  2  |  3    |   4   |   5   |    2 or 8 heads each, all queries, keys or values
"""

# pyright: basic, reportCallIssue=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.elementwise.layers import weighted
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_FEW_TOKENS = 16
LARGEST_FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rope_and_write_kv(
    qkv_TF: torch.Tensor,
    positions_T: torch.Tensor,
    rotary_PX: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    qk_norm: torch.Tensor | None,
    eps: float,
    value_norms: bool = False,
    keys_are_values: bool = False,
    gated: bool = False,
    pairs_in_halves: bool = False,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    clear_TF: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Normalize and rotate query heads in place; write keys, normalized and rotated too, and values to their slots.

    Args:
        qkv_TF: query heads, key heads, value heads; without value heads if keys are values
        positions_T: int64
        rotary_PX: float32; cosines, then sines, of each position's R/2 angles; then a scale of the position's queries
            if the width is odd; None for no rotation
        kv_cache: [2, B, S, K, D] at any strides; an FP8 cache gets value / scale, saturated
        slot_mapping_T: int64, may be shorter than T; tokens with -1, and tokens after its end, write nothing, but
            their queries are rotated
        num_query_heads: H
        num_kv_heads: K
        qk_norm: [H + K, D] weights of the heads' norms, query heads first, or None for no norm; float32 weights are
            multiplied before the result is rounded
        eps: of the norms
        value_norms: each head of values is normed, without weights
        keys_are_values: values are the keys before their norm and rotation
        gated: each query head is followed by its gates. Rotated queries are written after the values, so that rows
            have room for H * D numbers more
        pairs_in_halves: the pairs are (d, d + D/2), and not (d, d + R/2)
        k_scale: float32 [K], or None for 1
        v_scale: float32 [K], or None for 1
        clear_TF: [T, H * D], contiguous; gets zeros in the rows of tokens that write nothing, for attention that does
            not write these rows
        batch_invariant: one kernel for all numbers of tokens, because its shape decides the order of a norm's sum
    """
    num_tokens, head_size = qkv_TF.shape[0], kv_cache.shape[4]
    width = 0 if rotary_PX is None else rotary_PX.shape[1]
    assert width <= head_size + 1
    heads = _heads_of_a_program(num_query_heads, num_kv_heads, few=num_tokens <= _FEW_TOKENS and not batch_invariant)
    half = triton.next_power_of_2(head_size // 2)
    _rope_kernel[(num_tokens, (num_query_heads + 2 * num_kv_heads) // heads)](
        qkv_TF,
        positions_T,
        rotary_PX,
        qk_norm,
        kv_cache,
        slot_mapping_T,
        k_scale,
        v_scale,
        clear_TF,
        slot_mapping_T.shape[0],
        eps,
        qkv_TF.stride(0),
        *kv_cache.stride()[:4],
        H=num_query_heads,
        K=num_kv_heads,
        D=head_size,
        PAIRS=width // 2,
        SCALED=width % 2 == 1,
        IN_HALVES=pairs_in_halves,
        VALUE_NORMS=value_norms,
        KEYS_ARE_VALUES=keys_are_values,
        GATED=gated,
        HALF=half,
        S=kv_cache.shape[2],
        HEADS=heads,
        LARGEST=LARGEST_FP8.get(kv_cache.dtype, 0.0),
        **pdl_options(),
        num_warps=max(1, heads * half // 128),
    )


def write_kv(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Write keys and values to their slots as `rope_and_write_kv` does, without norm or rotation.

    Strided views are fine if heads are contiguous.
    """
    _, num_kv_heads, head_size = key_TKD.shape
    assert key_TKD.stride(2) == 1 and value_TKD.stride(2) == 1
    num_tokens = key_TKD.shape[0]
    heads = _heads_of_a_program(0, num_kv_heads, few=num_tokens <= _FEW_TOKENS)
    block = triton.next_power_of_2(head_size)
    _write_kernel[(num_tokens, 2 * num_kv_heads // heads)](
        key_TKD,
        value_TKD,
        kv_cache,
        slot_mapping_T,
        k_scale,
        v_scale,
        slot_mapping_T.shape[0],
        key_TKD.stride(0),
        key_TKD.stride(1),
        value_TKD.stride(0),
        value_TKD.stride(1),
        *kv_cache.stride()[:4],
        K=num_kv_heads,
        D=head_size,
        BLOCK=block,
        S=kv_cache.shape[2],
        HEADS=heads,
        LARGEST=LARGEST_FP8.get(kv_cache.dtype, 0.0),
        **pdl_options(),
        num_warps=max(1, heads * block // 256),
    )


def _heads_of_a_program(num_query_heads: int, num_kv_heads: int, *, few: bool) -> int:
    """Return a power of two that divides both numbers, so that a program's heads are all queries, keys or values."""
    common = math.gcd(num_query_heads, num_kv_heads)
    return min(2 if few else 8, common & -common)


@triton.jit(do_not_specialize=["num_slots"])
def _rope_kernel(
    qkv_ptr,
    positions_ptr,
    rotary_ptr,
    norm_ptr,
    cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    clear_ptr,
    num_slots,
    eps,
    qkv_stride_t,
    cache_stride_2,
    cache_stride_b,
    cache_stride_s,
    cache_stride_k,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    IN_HALVES: tl.constexpr,
    VALUE_NORMS: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    GATED: tl.constexpr,
    HALF: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    head = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    if PAIRS == 0 or PAIRS == D // 2 or IN_HALVES:
        d = pair
        other = D // 2
    else:
        # Numbers that are not rotated are pairs too: (d, d + D/2 - R/2), from R on.
        d = tl.where(pair < PAIRS, pair, pair + PAIRS)
        other = tl.where(pair < PAIRS, PAIRS, D // 2 - PAIRS)[None, :]
    # One mask serves all: columns after a half exist only if D / 2 is not a power of two.
    mask = (pair < D // 2)[None, :] & (head < H + 2 * K)[:, None]
    source_head = head
    if KEYS_ARE_VALUES:  # noqa: SIM102 (one is known when compiled, the other is not)
        if first_head >= H + K:
            source_head = head - K
    if GATED:
        source_head = tl.where(head < H, 2 * head, head + H)
    head_pointer = qkv_ptr + token * qkv_stride_t + source_head[:, None] * D + d[None, :]
    if norm_ptr is not None:  # constants, so before the wait
        norm_pointer = norm_ptr + head[:, None] * D + d[None, :]
        norm_mask = mask & (first_head < H + K)
        first_weight = tl.load(norm_pointer, norm_mask, other=0.0)
        second_weight = tl.load(norm_pointer + other, norm_mask, other=0.0)
    pdl_begin(PDL)
    # Loaded first, because the address of the angles depends on it.
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token, token < num_slots, other=-1)
    first = tl.load(head_pointer, mask, other=0.0)
    second = tl.load(head_pointer + other, mask, other=0.0)
    dtype = first.dtype

    if first_head < H + K:
        row_pointer = rotary_ptr
        if rotary_ptr is not None:
            row_pointer = rotary_ptr + position * (2 * PAIRS + (1 if SCALED else 0))
            # Every head loads the angles again. Threads would exchange a single row through shared memory.
            angle_pointer = tl.broadcast_to((row_pointer + pair)[None, :], (HEADS, HALF))
            angle_mask = mask
            if PAIRS != D // 2:
                angle_mask = mask & (pair < PAIRS)[None, :]
            cos = tl.load(angle_pointer, angle_mask, other=1.0)
            sin = tl.load(angle_pointer + PAIRS, angle_mask, other=0.0)
        x = first.to(tl.float32)
        y = second.to(tl.float32)
        if norm_ptr is not None:
            inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
            x = weighted(x * inverse, first_weight, dtype).to(tl.float32)
            y = weighted(y * inverse, second_weight, dtype).to(tl.float32)
        rotated_x = x
        rotated_y = y
        if rotary_ptr is not None:
            rotated_x = x * cos - y * sin
            rotated_y = y * cos + x * sin
        if first_head < H:
            if SCALED:
                scale = tl.load(row_pointer + 2 * PAIRS)
                rotated_x *= scale
                rotated_y *= scale
            query_pointer = head_pointer
            if GATED:
                query_pointer = qkv_ptr + token * qkv_stride_t + (2 * H + 2 * K + head)[:, None] * D + d[None, :]
            tl.store(query_pointer, rotated_x.to(dtype), mask)
            tl.store(query_pointer + other, rotated_y.to(dtype), mask)
            if clear_ptr is not None:
                clear_pointer = clear_ptr + token * H * D + head[:, None] * D + d[None, :]
                nothing = tl.zeros([HEADS, HALF], clear_ptr.dtype.element_ty)
                tl.store(clear_pointer, nothing, mask & (slot < 0))
                tl.store(clear_pointer + other, nothing, mask & (slot < 0))
        elif slot >= 0:
            key_head = head - H
            pointer = slot_pointer(cache_ptr, slot, S, cache_stride_b, cache_stride_s)
            pointer += key_head[:, None] * cache_stride_k + d[None, :]
            store_scaled(pointer, rotated_x, k_scale_ptr, key_head, mask, LARGEST)
            store_scaled(pointer + other, rotated_y, k_scale_ptr, key_head, mask, LARGEST)
    elif slot >= 0:
        value_head = head - H - K
        pointer = slot_pointer(cache_ptr + cache_stride_2, slot, S, cache_stride_b, cache_stride_s)
        pointer += value_head[:, None] * cache_stride_k + d[None, :]
        if VALUE_NORMS:
            wide_first = first.to(tl.float32)
            wide_second = second.to(tl.float32)
            inverse = tl.rsqrt((tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)) / D + eps)
            first = (wide_first * inverse[:, None]).to(dtype)
            second = (wide_second * inverse[:, None]).to(dtype)
        store_scaled(pointer, first, v_scale_ptr, value_head, mask, LARGEST)
        store_scaled(pointer + other, second, v_scale_ptr, value_head, mask, LARGEST)


@triton.jit(do_not_specialize=["num_slots"])
def _write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_slots,
    key_stride_t,
    key_stride_k,
    value_stride_t,
    value_stride_k,
    cache_stride_2,
    cache_stride_b,
    cache_stride_s,
    cache_stride_k,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    head = first_head % K + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)
    mask = (d < D)[None, :] & (head < K)[:, None]
    slot = tl.load(slots_ptr + token, token < num_slots, other=-1)
    if slot >= 0:
        pointer = slot_pointer(cache_ptr, slot, S, cache_stride_b, cache_stride_s) + head[:, None] * cache_stride_k
        pointer += d[None, :]
        if first_head < K:
            key_pointer = key_ptr + token * key_stride_t + head[:, None] * key_stride_k + d[None, :]
            store_scaled(pointer, tl.load(key_pointer, mask, other=0.0), k_scale_ptr, head, mask, LARGEST)
        else:
            value_pointer = value_ptr + token * value_stride_t + head[:, None] * value_stride_k + d[None, :]
            value = tl.load(value_pointer, mask, other=0.0)
            store_scaled(pointer + cache_stride_2, value, v_scale_ptr, head, mask, LARGEST)


@triton.jit
def slot_pointer(cache_ptr, slot, S: tl.constexpr, stride_b, stride_s):
    """Return the address of the slot's first head. `slot` is int64, and so is the offset."""
    block = slot // S
    return cache_ptr + block * stride_b + (slot - block * S) * stride_s


@triton.jit
def store_scaled(pointer, x, scale_ptr, head, mask, LARGEST: tl.constexpr):
    """Store x / scale of its head (None for 1), saturated to LARGEST (0: no limit), in the cache's dtype."""
    if scale_ptr is not None:
        x = x.to(tl.float32) / tl.load(scale_ptr + head)[:, None]
    if LARGEST > 0.0:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST)
    tl.store(pointer, x.to(pointer.dtype.scalar.element_ty), mask)
