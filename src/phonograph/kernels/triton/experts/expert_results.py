"""Results of experts: written by pair, and added by token in a fixed order.

Each pair has its row of the result, and one program adds the rows of a token: nothing depends on timing. Rows of
padding have no pair; `add_results` skips what lies there.

    results     | pair 0 | pair 1 | ... | pair P - 1 |      times weight
    add         | row 0          | row 1 | ...              one sum a row, then a norm

Shapes: T tokens, k experts of a token, P = T * k pairs, E hidden size.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.triton.elementwise.layers import normal, weighted
from phonograph.kernels.triton.gemm.gemm_epilogue import activated
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


@triton.jit
def write_results(
    sums,
    up_sums,
    bias_ptr,
    weights_ptr,
    out_ptr,
    out_stride,
    bias_row,
    item,
    first,
    N: tl.constexpr,
    MODE: tl.constexpr,
):
    """Write the results of an item's pairs from the sums of products.

    Args:
        sums: [n, m] in float32, of n outputs and the rows m of an item.
        up_sums: the same of the ups, with a gated activation.
        bias_ptr: biases of all experts, or None.
        weights_ptr: weights of pairs.
        out_ptr: receives rows by place in the lists with an activation, otherwise by pair.
        out_stride: between two rows.
        bias_row: of the first output, int64.
        item: first place, number of pairs, and the pairs [m].
        first: first of the outputs.
        N: outputs of an expert.
        MODE: activation.
    """
    start, count, pair = item
    n = tl.arange(0, sums.shape[0])
    m = tl.arange(0, sums.shape[1])
    valid_n = first + n < N
    valid_m = m < count
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + bias_row + n, valid_n, other=0.0).to(tl.float32)[:, None]
        if MODE >= 2 and MODE < 5:
            up_sums += tl.load(bias_ptr + bias_row + N + n, valid_n, other=0.0).to(tl.float32)[:, None]
    if MODE >= 2:
        result = activated(sums, up_sums, MODE)
        out_row = start + m
    else:
        result = sums * tl.load(weights_ptr + pair, valid_m, other=0.0)[None, :]
        out_row = pair
    out_ptrs = out_ptr + out_row.to(tl.int64)[None, :] * out_stride + (first + n)[:, None]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), valid_n[:, None] & valid_m[None, :])


def add_results(
    results_PE: torch.Tensor,
    hidden_TE: torch.Tensor,
    top_k: int,
    *,
    added: bool = True,
    factor: float = 1.0,
    num_rows: torch.Tensor | None = None,
    shared: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
) -> None:
    """Add the results of each row's experts, in the order of their scores.

    Args:
        results_PE: results by pair.
        hidden_TE: receives the sums.
        top_k: results of a row.
        added: add to `hidden`; otherwise replace it.
        factor: of what is added.
        num_rows: int32 [1], number of rows that are not padding; None for all. The sums of padding are 0.
        shared: results [T, E] of a shared expert, and their weights [T] in float32, None for 1.
        norm: weights, of the type of `hidden` or float32, epsilon, and memory [T, E] that receives the norm of
            `hidden`.
    """
    num_tokens, width = hidden_TE.shape
    shared_TE, shared_T = (None, None) if shared is None else shared
    weight_E, eps, normed_TE = (None, 0.0, None) if norm is None else norm
    block = triton.next_power_of_2(width)
    _add_kernel[(num_tokens,)](
        results_PE,
        hidden_TE,
        num_rows,
        shared_TE,
        shared_T,
        weight_E,
        normed_TE,
        eps,
        results_PE.stride(0),
        hidden_TE.stride(0),
        WIDTH=width,
        BLOCK=block,
        TOP_K=top_k,
        ADDED=added,
        FACTOR=factor,
        **pdl_options(),
        num_warps=min(16, max(1, block // 256)),
    )


@triton.jit
def sum_pairs(results_ptr, stride, num_rows_ptr, row, column, exists, TOP_K: tl.constexpr):
    """Return the sum of the results of a row's pairs in float32, in their order, and which numbers exist.

    None exist in a row of padding, whose sum is 0.
    """
    if num_rows_ptr is not None:
        exists = exists & (row < tl.load(num_rows_ptr))
    total = tl.zeros(column.shape, tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(results_ptr + (row * TOP_K + j) * stride + column, exists, other=0.0).to(tl.float32)
    return total, exists


@triton.jit
def _add_kernel(
    results_ptr,
    hidden_ptr,
    num_rows_ptr,
    shared_ptr,
    shared_weights_ptr,
    norm_ptr,
    normed_ptr,
    eps,
    results_stride,
    hidden_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    ADDED: tl.constexpr,
    FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    norm = None
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, exists, other=0.0)  # a constant, so before the wait
    pdl_begin(PDL)
    total, valid = sum_pairs(results_ptr, results_stride, num_rows_ptr, row, column, exists, TOP_K)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * WIDTH + column, valid, other=0.0).to(tl.float32)
        if shared_weights_ptr is not None:
            shared *= tl.load(shared_weights_ptr + row)
            shared = tl.where(valid, shared, 0.0)
        total += shared
    total *= FACTOR
    hidden_ptrs = hidden_ptr + row * hidden_stride + column
    if ADDED:
        total += tl.load(hidden_ptrs, exists, other=0.0).to(tl.float32)
    rounded = total.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptrs, rounded, exists)
    if norm_ptr is not None:
        wide = tl.where(exists, rounded.to(tl.float32), 0.0)
        tl.store(normed_ptr + row * WIDTH + column, weighted(normal(wide, eps, WIDTH), norm, rounded.dtype), exists)
