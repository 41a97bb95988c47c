"""From the fused projection to attention's inputs in one kernel: norms of heads, rotary embedding, KV write.

Queries are rotated in place; keys are rotated on their way into the cache, values are only copied there. It serves all
backends, since all share one cache layout.

Shapes: T tokens, H query heads, K KV heads, D head size, F = (H + 2K) * D, B blocks, S block size, P positions.
"""

# pyright: basic, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.pdl import pdl_begin, pdl_usable

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rope_and_write_kv(
    qkv_TF: torch.Tensor,
    positions_T: torch.Tensor,
    rotary_PD: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    qk_norm: torch.Tensor | None,
    eps: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Norms (where given) and rotates query heads in place; writes keys, likewise, and values to their slots.

    positions_T int64; rotary_PD float32: cosines, then sines, of each position's D/2 angles (pairs d, d + D/2).
    kv_cache [2, B, S, K, D] by its strides; an FP8 cache gets value / scale, saturated.
    slot_mapping_T int64, may be shorter than T; -1, and tokens behind it, write nothing, but their queries are rotated.
    qk_norm [H + K, D]: weights of the heads' norms, query heads first, with `eps`.
    k_scale, v_scale float32 [K], or None for 1.
    """
    head_size = rotary_PD.shape[1]
    key_offset = num_query_heads * head_size
    value_offset = key_offset + num_kv_heads * head_size
    _launch(
        qkv_TF,
        qkv_TF[:, key_offset:],
        qkv_TF[:, value_offset:],
        positions_T,
        rotary_PD,
        kv_cache,
        slot_mapping_T,
        num_query_heads,
        num_kv_heads,
        head_size,
        (qkv_TF.stride(0), head_size, qkv_TF.stride(0), head_size),
        qk_norm,
        eps,
        k_scale,
        v_scale,
    )


def write_kv(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """The KV write alone, of keys and values as they are; strided views are fine if heads are contiguous."""
    _, num_kv_heads, head_size = key_TKD.shape
    assert key_TKD.stride(2) == 1 and value_TKD.stride(2) == 1
    strides = (key_TKD.stride(0), key_TKD.stride(1), value_TKD.stride(0), value_TKD.stride(1))
    _launch(
        None, key_TKD, value_TKD, None, None, kv_cache, slot_mapping_T, 0, num_kv_heads, head_size, strides, None, 0.0,
        k_scale, v_scale,
    )  # fmt: skip


def _launch(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None,
    rotary: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    strides: tuple[int, int, int, int],
    qk_norm: torch.Tensor | None,
    eps: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    num_tokens, num_heads = key.shape[0], num_query_heads + 2 * num_kv_heads
    # Few tokens are spread over many programs, many tokens over fewer and larger ones.
    heads = 2 if num_tokens <= 16 else 8
    pdl = pdl_usable()
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        query,
        key,
        value,
        positions,
        rotary,
        qk_norm,
        kv_cache,
        slot_mapping,
        k_scale,
        v_scale,
        slot_mapping.shape[0],
        eps,
        *strides,
        *kv_cache.stride()[:4],
        H=num_query_heads,
        K=num_kv_heads,
        D=head_size,
        HALF=triton.next_power_of_2(head_size // 2),
        S=kv_cache.shape[2],
        HEADS=heads,
        LARGEST=_LARGEST.get(kv_cache.dtype, 0.0),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1 if heads == 2 else 4,
    )


@triton.jit(do_not_specialize=["num_slots"])
def _rope_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    rotary_ptr,
    norm_ptr,
    cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_slots,
    eps,
    key_stride_t,
    key_stride_k,
    value_stride_t,
    value_stride_k,
    cache_stride_2,
    cache_stride_b,
    cache_stride_s,
    cache_stride_k,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    in_half = d < D // 2
    is_query = head < H
    is_key = (head >= H) & (head < H + K)
    is_value = (head >= H + K) & (head < H + 2 * K)
    pdl_begin(PDL)

    key_head = head - H
    value_head = head - H - K
    offset = tl.where(is_value, value_head * value_stride_k, key_head * key_stride_k)
    source = tl.where(is_value, value_ptr + token * value_stride_t + offset, key_ptr + token * key_stride_t + offset)
    if query_ptr is not None:
        source = tl.where(is_query, query_ptr + token * key_stride_t + head * D, source)
    mask = (is_query | is_key | is_value)[:, None] & in_half[None, :]
    first_raw = tl.load(source[:, None] + d[None, :], mask, other=0.0)
    second_raw = tl.load(source[:, None] + d[None, :] + D // 2, mask, other=0.0)
    first = first_raw.to(tl.float32)
    second = second_raw.to(tl.float32)

    if rotary_ptr is not None:
        rotated = is_query | is_key
        if norm_ptr is not None:
            norm_mask = rotated[:, None] & in_half[None, :]
            norm_at = norm_ptr + head[:, None] * D + d[None, :]
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            inverse = tl.rsqrt(squares / D + eps)[:, None]
            dtype = first_raw.dtype
            normal_1 = (first * inverse).to(dtype) * tl.load(norm_at, norm_mask, other=0.0)
            normal_2 = (second * inverse).to(dtype) * tl.load(norm_at + D // 2, norm_mask, other=0.0)
            first = tl.where(rotated[:, None], normal_1.to(tl.float32), first)
            second = tl.where(rotated[:, None], normal_2.to(tl.float32), second)
        position = tl.load(positions_ptr + token)
        cos = tl.load(rotary_ptr + position * D + d, in_half, other=1.0)[None, :]
        sin = tl.load(rotary_ptr + position * D + D // 2 + d, in_half, other=0.0)[None, :]
        new_first = first * cos - second * sin
        new_second = second * cos + first * sin
        first = tl.where(rotated[:, None], new_first, first)
        second = tl.where(rotated[:, None], new_second, second)
        query_mask = is_query[:, None] & in_half[None, :]
        query_at = query_ptr + token * key_stride_t + head[:, None] * D + d[None, :]
        tl.store(query_at, first.to(first_raw.dtype), query_mask)
        tl.store(query_at + D // 2, second.to(first_raw.dtype), query_mask)

    slot = tl.load(slots_ptr + token, token < num_slots, other=-1)
    written = (is_key | is_value) & (slot >= 0)
    if k_scale_ptr is not None:
        scale = tl.load(k_scale_ptr + key_head, is_key, other=1.0)
        first = tl.where(is_key[:, None], first / scale[:, None], first)
        second = tl.where(is_key[:, None], second / scale[:, None], second)
    if v_scale_ptr is not None:
        scale = tl.load(v_scale_ptr + value_head, is_value, other=1.0)
        first = tl.where(is_value[:, None], first / scale[:, None], first)
        second = tl.where(is_value[:, None], second / scale[:, None], second)
    if LARGEST > 0.0:
        first = tl.clamp(first, -LARGEST, LARGEST)
        second = tl.clamp(second, -LARGEST, LARGEST)
    block = slot // S
    kv_head = tl.where(is_value, value_head, key_head)
    place = block * cache_stride_b + (slot - block * S) * cache_stride_s + kv_head.to(tl.int64) * cache_stride_k
    place += tl.where(is_value, cache_stride_2, 0)
    at = cache_ptr + place[:, None] + d[None, :]
    cache_mask = written[:, None] & in_half[None, :]
    tl.store(at, first.to(cache_ptr.dtype.element_ty), cache_mask)
    tl.store(at + D // 2, second.to(cache_ptr.dtype.element_ty), cache_mask)
