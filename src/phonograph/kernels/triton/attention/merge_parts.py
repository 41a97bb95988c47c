"""Attention of several ranks to parts of the keys, on a GPU: the twin of `kernels/torch/attention/merge_parts.py`.

Packing and merging are a launch each. A program has a token and some of its heads.

    outputs of a rank      | heads of rank 0 | heads of rank 1 |    [T, N * H, D], log-sum-exps [N * H, T]
    packed, for rank n     | D numbers of a head, log-sum-exp |     [N, T, H, D + 1]: rank n gets part n
    merge on rank n        | of rank 0, of rank 1, of the step |    weights exp(lse - total)
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMBERS = 1024
"""Most numbers of a part in a program."""


def _heads(num_heads: int, width: int) -> int:
    return max(1, min(triton.next_power_of_2(num_heads), _NUMBERS // width))


def pack_parts(found_TXD: torch.Tensor, lse_XT: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return results for the heads of each rank; see the torch twin.

    Args:
        found_TXD: contiguous, as is `lse_XT`.
        lse_XT: see the twin.
        num_ranks: N.
    """
    num_tokens, num_heads, head_size = found_TXD.shape
    packed_NTHF = lse_XT.new_empty(num_ranks, num_tokens, num_heads // num_ranks, head_size + 1)
    width = triton.next_power_of_2(head_size)
    heads = _heads(num_heads, width)
    _pack_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        found_TXD, lse_XT, packed_NTHF, num_tokens, X=num_heads, H=num_heads // num_ranks, D=head_size, HEADS=heads,
        WIDTH=width, num_warps=4,
    )  # fmt: skip
    return packed_NTHF


def merge_parts(
    parts_NTHF: torch.Tensor,
    own_THD: torch.Tensor,
    own_HT: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
) -> None:
    """Merge results over the keys of each rank and of the step; see the torch twin.

    Args:
        parts_NTHF: contiguous, as are all but the last two, whose tokens and heads may be apart.
        own_THD: see the twin.
        own_HT: see the twin.
        out_THD: numbers of a head lie together.
        lse_HT: see the twin.
    """
    num_ranks, num_tokens, num_heads, width = parts_NTHF.shape
    block = triton.next_power_of_2(width - 1)
    heads = _heads(num_heads, block)
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        parts_NTHF, own_THD, own_HT, out_THD, lse_HT, num_tokens, out_THD.stride(0), out_THD.stride(1),
        0 if lse_HT is None else lse_HT.stride(0), N=num_ranks, H=num_heads, D=width - 1, HEADS=heads, WIDTH=block,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_kernel(
    found_ptr, lse_ptr, packed_ptr, num_tokens, X: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (head < X)[:, None] & (dim < D)[None, :]
    found = tl.load(found_ptr + (token * X + head)[:, None] * D + dim[None, :], mask, other=0.0)
    lse = tl.load(lse_ptr + head.to(tl.int64) * num_tokens + token, head < X, other=0.0)
    packed = packed_ptr + (((head // H).to(tl.int64) * num_tokens + token) * H + head % H) * (D + 1)
    tl.store(packed[:, None] + dim[None, :], found.to(tl.float32), mask)
    tl.store(packed + D, lse, head < X)


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_kernel(
    parts_ptr, own_ptr, own_lse_ptr, out_ptr, lse_ptr, num_tokens, out_stride_token, out_stride_head, lse_stride,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < H
    mask = is_head[:, None] & (dim < D)[None, :]
    most = tl.load(own_lse_ptr + head.to(tl.int64) * num_tokens + token, is_head, other=float("-inf"))
    # Without keys the output is any number: it is not read.
    mixed = tl.load(
        own_ptr + (token * H + head)[:, None] * D + dim[None, :], mask & (most > float("-inf"))[:, None], other=0.0
    ).to(tl.float32)
    total = tl.where(most > float("-inf"), 1.0, 0.0)
    for rank in tl.static_range(N):
        part = parts_ptr + ((rank * num_tokens + token) * H + head) * (D + 1)
        lse = tl.load(part + D, is_head, other=float("-inf"))
        has_keys = lse > float("-inf")
        found = tl.load(part[:, None] + dim[None, :], mask & has_keys[:, None], other=0.0)
        more = tl.maximum(most, lse)
        old = tl.where(most > float("-inf"), tl.exp(most - more), 0.0)
        new = tl.where(has_keys, tl.exp(lse - more), 0.0)
        mixed = mixed * old[:, None] + found * new[:, None]
        total = total * old + new
        most = more
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + token * out_stride_token + (head * out_stride_head)[:, None] + dim[None, :]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + head.to(tl.int64) * lse_stride + token, most + tl.log(total), is_head)
