"""The end of a layer that has experts and a feed-forward of all tokens, each with a norm (Gemma 4).

    stream = (stream + factor * norm(norm(sum of experts) + norm(feed-forward))) * scalar,  then the next part's norm

A program has a row, whose four norms need no other. It rounds where launches of their own would.

Shapes: T tokens, k experts of a token, P = T * k pairs, E hidden size.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.elementwise.layers import normal, weighted
from phonograph.kernels.triton.experts.expert_results import sum_pairs
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


def join_results(
    results_PE: torch.Tensor,
    other_TE: torch.Tensor,
    hidden_TE: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    *,
    factor: float = 1.0,
    scalar: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Add the results of experts and of a feed-forward to the stream.

    Args:
        results_PE: results of each row's pairs.
        other_TE: results of the feed-forward.
        hidden_TE: the stream.
        norms: weights of the norms of the experts' sum, of the other results, and of both, of the type of the stream
            or float32.
        eps: of all norms.
        factor: of what is added.
        scalar: [1], factor of the stream after that; None for 1.
        num_rows: int32 [1], number of rows that are not padding; None for all. Padding has no results.
        norm: weights, and memory [T, E] that receives the norm of the stream; it may overlay `results_PE` if a row has
            one pair.
    """
    num_tokens, width = hidden_TE.shape
    block = triton.next_power_of_2(width)
    _join_kernel[(num_tokens,)](
        results_PE, other_TE, hidden_TE, *norms, scalar, num_rows, *(norm or (None, None)), eps,
        TOP_K=len(results_PE) // num_tokens, FACTOR=factor, WIDTH=width, BLOCK=block, **pdl_options(),
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    return weighted(normal(x, eps, WIDTH), weight, x.dtype)


@triton.jit
def _join_kernel(
    results_ptr,
    other_ptr,
    hidden_ptr,
    sum_norm_ptr,
    other_norm_ptr,
    both_norm_ptr,
    scalar_ptr,
    num_rows_ptr,
    norm_ptr,
    normed_ptr,
    eps,
    TOP_K: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    KIND: tl.constexpr = hidden_ptr.dtype.element_ty
    # Constants, so before the wait.
    sum_norm = tl.load(sum_norm_ptr + column, exists, other=0.0)
    other_norm = tl.load(other_norm_ptr + column, exists, other=0.0)
    both_norm = tl.load(both_norm_ptr + column, exists, other=0.0)
    norm, scalar = None, None
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, exists, other=0.0)
    if scalar_ptr is not None:
        scalar = tl.load(scalar_ptr)
    pdl_begin(PDL)
    total, valid = sum_pairs(results_ptr, WIDTH, num_rows_ptr, row, column, exists, TOP_K)
    total = _normed(total.to(KIND), sum_norm, eps, WIDTH)
    other = _normed(tl.load(other_ptr + row * WIDTH + column, valid, other=0.0), other_norm, eps, WIDTH)
    both = (total.to(tl.float32) + other.to(tl.float32)).to(KIND)
    added = _normed(both, both_norm, eps, WIDTH).to(tl.float32)
    if FACTOR != 1.0:
        added *= FACTOR
    hidden_ptrs = hidden_ptr + row * WIDTH + column
    hidden = (tl.load(hidden_ptrs, exists, other=0.0).to(tl.float32) + added).to(KIND)
    if scalar_ptr is not None:
        hidden = hidden * scalar
    tl.store(hidden_ptrs, hidden, exists)
    if norm_ptr is not None:
        tl.store(normed_ptr + row * WIDTH + column, _normed(hidden, norm, eps, WIDTH), exists)
