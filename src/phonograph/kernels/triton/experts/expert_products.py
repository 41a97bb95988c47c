"""Products of experts: rows gathered by the lists of a routing, for few tokens and many.

The experts of a layer are one matrix, of which expert e has the rows from e * outputs on. A tile is some outputs of one
item (`expert_lists`). Programs take tiles in turn, until the items end; their number is a bound that depends on shapes
only, so most programs of a decode step end at once. As in `gemm_tiled`, the weights are the long side of the tensor
cores' tile (out^T = W x^T), and weights in groups become numbers of the rows' type.

    gate_up  | item 0: outputs 0.. | item 0: outputs 64.. | ... | item 1: outputs 0.. | ...   activation, by place
    down     | the same                                                                       times weight, by pair
    add      | row 0 | row 1 | ...                                                            one sum a row, then a norm

Each pair has its row of the result, and one program adds the rows of a token in a fixed order: nothing depends on
timing. Rows of padding have no pair; `add_results` skips what lies there.

Shapes: T tokens, X experts, k experts of a token, P = T * k pairs, E hidden size, I intermediate size; others are those
of `expert_lists`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.elementwise.layers import weighted
from phonograph.kernels.triton.experts.expert_lists import ExpertLists, max_items
from phonograph.kernels.triton.experts.expert_plan import ExpertConfig, ExpertTile
from phonograph.kernels.triton.experts.expert_tile import expert_tile, whole_sums
from phonograph.kernels.triton.gemm.gemm_epilogue import activated
from phonograph.kernels.triton.gemm.gemm_tiled import TileShape
from phonograph.kernels.triton.gemm.grouped_operands import MAGIC
from phonograph.kernels.triton.gemm.product import SILU, STORE, Matrix
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


def fitted(config: ExpertConfig, gate_up: Matrix, down: Matrix) -> ExpertConfig:
    """Return the configuration with steps that have columns of one group of weights, or whole words of FP4."""
    return config._replace(gate_up=_fitted(config.gate_up, gate_up), down=_fitted(config.down, down))


def _fitted(tile: ExpertTile, matrix: Matrix) -> ExpertTile:
    if not isinstance(matrix, Grouped):
        return tile
    if matrix.is_fp4():
        return tile._replace(block_k=max(128, tile.block_k))
    block_k = tile.block_k
    while matrix.group % block_k:
        block_k //= 2
    return tile._replace(block_k=block_k)


def gate_up_products(
    x_TE: torch.Tensor,
    matrix: Matrix,
    lists: ExpertLists,
    routing: Routing,
    config: ExpertConfig,
    inner_PI: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mode: int = SILU,
) -> None:
    """Write activation(gate) * up of each pair, in the order of the items.

    Args:
        x_TE: rows.
        matrix: weights of all experts, [X * 2I, E]: of each the gates, then the ups.
        lists: of the routing.
        routing: rule of the choice.
        config: launch.
        inner_PI: receives the results; rows after the last pair stay as they are.
        bias: [X * 2I].
        mode: activation, as in `Product`.
    """
    _launch(x_TE, matrix, lists, routing, config.block, config.gate_up, inner_PI, bias, mode)


def down_products(
    inner_PI: torch.Tensor,
    matrix: Matrix,
    lists: ExpertLists,
    routing: Routing,
    config: ExpertConfig,
    results_PE: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """Write the weighted result of each pair, in the order of the pairs.

    Args:
        inner_PI: of `gate_up_products`.
        matrix: weights of all experts, [X * E, I].
        lists: of the routing.
        routing: rule of the choice.
        config: launch.
        results_PE: receives the results; rows of padding stay as they are.
        bias: [X * E].
    """
    _launch(inner_PI, matrix, lists, routing, config.block, config.down, results_PE, bias, STORE)


def _launch(
    x: torch.Tensor,
    matrix: Matrix,
    lists: ExpertLists,
    routing: Routing,
    block: int,
    tile: ExpertTile,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    mode: int,
) -> None:
    weight = matrix if isinstance(matrix, Grouped) else None
    words = matrix.packed_OW.view(torch.int32) if isinstance(matrix, Grouped) else matrix
    num_pairs, num_outputs = out.shape
    num_inputs = x.shape[1]
    rows = routing.num_experts * num_outputs * (1 + (mode >= SILU))
    assert words.shape[0] == rows and words.stride(1) == x.stride(1) == out.stride(1) == 1
    if weight is None:
        assert words.shape[1] == num_inputs
    elif weight.is_fp4():
        assert weight.interleaved and words.stride(0) == num_inputs // 8 and not tile.block_k % 128
    else:
        assert weight.order_I is None and weight.has_equal_strides() and not weight.group % tile.block_k
    column_tiles = triton.cdiv(num_outputs, tile.block_n)
    programs = column_tiles * max_items(num_pairs // routing.top_k, routing, block)
    programs = min(programs, tile.programs) if tile.programs else programs
    _expert_kernel[(programs,)](
        x,
        words,
        *((weight.scales_OG, weight.zeros_OG, weight.offsets_OG) if weight is not None else (None, None, None)),
        bias,
        out,
        lists.weights_Tk,
        lists.pairs_P,
        lists.items_I3,
        lists.num_items,
        MAGIC[x.dtype] if weight is not None else 0,
        x.stride(0),
        words.stride(0),
        *(weight.scales_OG.stride() if weight is not None else (0, 0)),
        out.stride(0),
        N=num_outputs,
        K=num_inputs,
        TOP_K=routing.top_k,
        ROWS=block,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        MODE=mode,
        BITS=weight.bits if weight is not None else 0,
        INTERLEAVED=weight is not None and weight.interleaved,
        GROUP=weight.group if weight is not None else 0,
        INT8=weight is not None and weight.is_int8(),
        **pdl_options(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["magic"])
def _expert_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    weights_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    magic,
    x_stride,
    weight_stride,
    output_stride,
    group_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = MODE >= 2
    pdl_begin(PDL)
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n = tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    groups = (scales_ptr, zeros_ptr, offsets_ptr, output_stride, group_stride, magic)
    SHAPE: tl.constexpr = TileShape(K, BLOCK_K, BITS, GROUP, INTERLEAVED, INT8)
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    # Exponents are in int32.
    FP4: tl.constexpr = BITS == 4 and scales_ptr.dtype.element_ty == tl.int32
    num_tiles = tl.load(num_items_ptr) * column_tiles
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        item = items_ptr + tile // column_tiles * 3
        expert = tl.load(item).to(tl.int64)
        start = tl.load(item + 1)
        count = tl.load(item + 2)
        valid_m = m < count
        pair = tl.load(pairs_ptr + start + m, valid_m, other=0)
        x_row = pair // TOP_K if GATED else start + m
        first = tile % column_tiles * BLOCK_N
        rows_left = N - first
        valid_n = n < rows_left
        weight_row = expert * (2 * N if GATED else N) + first
        x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for start_k in range(0, K, BLOCK_K):
            x_mask = valid_m[:, None]
            if K % BLOCK_K != 0:
                x_mask = x_mask & (start_k + k < K)[None, :]
            x = tl.load(x_ptrs + start_k, x_mask, other=0.0).trans()
            column = start_k + (weight_row * 0).to(tl.int32)  # the interpreter's loops have numbers of Python
            weight = expert_tile(
                weight_ptr, weight_stride, groups, weight_row, column, rows_left, n, k, SHAPE, KIND, FP4
            )  # fmt: skip
            sums = tl.dot(weight, x, sums, input_precision="ieee")
            if GATED:
                up = expert_tile(
                    weight_ptr, weight_stride, groups, weight_row + N, column, rows_left, n, k, SHAPE, KIND, FP4
                )  # fmt: skip
                up_sums = tl.dot(up, x, up_sums, input_precision="ieee")
        sums = whole_sums(sums, KIND, FP4)
        up_sums = whole_sums(up_sums, KIND, FP4)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + weight_row + n, valid_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_sums += tl.load(bias_ptr + weight_row + N + n, valid_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result = activated(sums, up_sums, MODE)
            out_row = start + m
        else:
            result = sums * tl.load(weights_ptr + pair, valid_m, other=0.0)[None, :]
            out_row = pair
        out_ptrs = out_ptr + out_row.to(tl.int64)[None, :] * out_stride + (first + n)[:, None]
        tl.store(out_ptrs, result.to(KIND), valid_n[:, None] & valid_m[None, :])


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
    valid = exists
    if num_rows_ptr is not None:
        valid = exists & (row < tl.load(num_rows_ptr))
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(results_ptr + (row * TOP_K + j) * results_stride + column, valid, other=0.0).to(tl.float32)
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
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        tl.store(normed_ptr + row * WIDTH + column, weighted(wide * inverse, norm, rounded.dtype), exists)
