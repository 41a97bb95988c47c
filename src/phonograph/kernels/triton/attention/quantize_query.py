"""Rounding of queries to FP8, for kernels that take queries of the dtype of their keys.

Shapes: T tokens, H query heads, K KV heads, D head size.

A program takes a power of two of heads of one token, and divides each by the scale of its KV head:

    programs   | token 0: heads 0-7 | token 0: heads 8-15 | ... | token 1: heads 0-7 | ...
"""

# pyright: basic, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.attention.rope_and_kv_write import LARGEST_FP8, store_scaled
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options

_MOST_HEADS = 8


def quantize_queries(query_THD: torch.Tensor, scale_K: torch.Tensor | None, out_THD: torch.Tensor) -> None:
    """Compute out = query / scale of its KV head (None for 1), saturated to the range of out's FP8 dtype.

    Args:
        query_THD: heads and head size contiguous, tokens at any stride
        scale_K: float32
        out_THD: contiguous
    """
    num_tokens, num_heads, head_size = query_THD.shape
    assert query_THD.stride(2) == 1 and query_THD.stride(1) == head_size and out_THD.is_contiguous()
    # A power of two that divides the number of heads, so that a program has no head beyond the last.
    heads = min(_MOST_HEADS, num_heads & -num_heads)
    block = triton.next_power_of_2(head_size)
    _quantize_kernel[(num_tokens, num_heads // heads)](
        query_THD,
        scale_K,
        out_THD,
        query_THD.stride(0),
        H=num_heads,
        GROUP=num_heads // scale_K.shape[0] if scale_K is not None else 1,
        D=head_size,
        BLOCK=block,
        HEADS=heads,
        LARGEST=LARGEST_FP8[out_THD.dtype],
        **pdl_options(),
        num_warps=max(1, heads * block // 256),
    )


@triton.jit
def _quantize_kernel(
    query_ptr,
    scale_ptr,
    out_ptr,
    stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)
    within = head[:, None] * D + d[None, :]
    mask = tl.broadcast_to((d < D)[None, :], (HEADS, BLOCK))
    query = tl.load(query_ptr + token * stride + within, mask, other=0.0)
    store_scaled(out_ptr + token * H * D + within, query, scale_ptr, head // GROUP, mask, LARGEST)
