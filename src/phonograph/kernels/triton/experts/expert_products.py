"""Products of experts: rows gathered by the lists of a routing, for few tokens and many.

The experts of a layer are one matrix, of which expert e has the rows from e * outputs on. A tile is some outputs of one
item (`expert_lists`), and one program's work. The number of programs is a bound that depends on shapes only, so most of
a decode step end at once. As in `gemm_tiled`, the weights are the long side of the tensor cores' tile (out^T = W x^T),
and weights in groups become numbers of the rows' type.

    gate_up  | item 0: outputs 0.. | item 0: outputs 64.. | ... | item 1: outputs 0.. | ...   activation, by place
    down     | the same                                                                       times weight, by pair

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
from phonograph.kernels.triton.experts.expert_few_rows import expert_few_rows_kernel
from phonograph.kernels.triton.experts.expert_lists import ExpertLists, max_items
from phonograph.kernels.triton.experts.expert_plan import ExpertConfig, ExpertTile, FewRowsTile
from phonograph.kernels.triton.experts.expert_results import write_results
from phonograph.kernels.triton.experts.expert_tile import expert_tile, whole_sums
from phonograph.kernels.triton.gemm.gemm_tiled import TileShape
from phonograph.kernels.triton.gemm.grouped_operands import MAGIC
from phonograph.kernels.triton.gemm.product import RELU2, SILU, STORE, Matrix
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


def fitted(config: ExpertConfig, gate_up: Matrix, down: Matrix) -> ExpertConfig:
    """Return the configuration with steps that have columns of one group of weights, or whole words of FP4."""
    return config._replace(gate_up=_fitted(config.gate_up, gate_up), down=_fitted(config.down, down))


def _fitted(tile: ExpertTile | FewRowsTile, matrix: Matrix) -> ExpertTile | FewRowsTile:
    if not isinstance(matrix, Grouped) or isinstance(tile, FewRowsTile):
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
    """Write activation(gate) * up of each pair, or activation(up) without gates, in the order of the items.

    Args:
        x_TE: rows.
        matrix: weights of all experts, [X * 2I, E]: of each the gates, then the ups; or the ups alone, [X * I, E].
        lists: of the routing.
        routing: rule of the choice.
        config: launch.
        inner_PI: receives the results; rows after the last pair stay as they are.
        bias: of each row of `matrix`.
        mode: activation, as in `Product`.
    """
    _launch(x_TE, matrix, lists, routing, config, config.gate_up, inner_PI, bias, mode)


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
    _launch(inner_PI, matrix, lists, routing, config, config.down, results_PE, bias, STORE)


def _launch(
    x: torch.Tensor,
    matrix: Matrix,
    lists: ExpertLists,
    routing: Routing,
    config: ExpertConfig,
    tile: ExpertTile | FewRowsTile,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    mode: int,
) -> None:
    weight = matrix if isinstance(matrix, Grouped) else None
    words = matrix.packed_OW.view(torch.int32) if isinstance(matrix, Grouped) else matrix
    num_pairs, num_outputs = out.shape
    num_inputs = x.shape[1]
    rows = routing.num_matrices * num_outputs * (1 + (SILU <= mode < RELU2))
    assert words.shape[0] == rows and words.stride(1) == x.stride(1) == out.stride(1) == 1
    if weight is None:
        assert words.shape[1] == num_inputs
    elif weight.is_fp4():
        assert weight.interleaved and words.stride(0) == num_inputs // 8 and num_outputs % 8 == num_inputs % 64 == 0
    else:
        assert weight.order_I is None and weight.has_equal_strides()
    programs = triton.cdiv(num_outputs, tile.block_n) * max_items(num_pairs // routing.num_pairs, routing, config.block)
    work = lists.weights_Tk, lists.pairs_P, lists.items_I3, lists.num_items
    shape = {"N": num_outputs, "K": num_inputs, "TOP_K": routing.num_pairs, "ROWS": config.block, "MODE": mode}
    shape |= pdl_options()
    if isinstance(tile, FewRowsTile):
        assert weight is not None and weight.is_fp4()
        expert_few_rows_kernel[(programs,)](
            x,
            words,
            weight.scales_OG,
            bias,
            out,
            *work,
            x.stride(0),
            *weight.scales_OG.stride(),
            out.stride(0),
            **shape,
            BLOCK_N=tile.block_n,
            UNITS=tile.units,
            AHEAD=tile.ahead,
            num_warps=tile.num_warps,
        )
        return
    if weight is not None:
        assert not tile.block_k % 128 if weight.is_fp4() else not weight.group % tile.block_k
    _expert_kernel[(programs,)](
        x,
        words,
        *((weight.scales_OG, weight.zeros_OG, weight.offsets_OG) if weight is not None else (None, None, None)),
        bias,
        out,
        *work,
        MAGIC[x.dtype] if weight is not None else 0,
        x.stride(0),
        words.stride(0),
        *(weight.scales_OG.stride() if weight is not None else (0, 0)),
        out.stride(0),
        **shape,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        TAIL=config.tail,
        BITS=weight.bits if weight is not None else 0,
        INTERLEAVED=weight is not None and weight.interleaved,
        GROUP=weight.group if weight is not None else 0,
        INT8=weight is not None and weight.is_int8(),
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
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    pdl_begin(PDL)
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # Exponents are in int32.
    FP4: tl.constexpr = BITS == 4 and scales_ptr.dtype.element_ty == tl.int32
    groups = (scales_ptr, zeros_ptr, offsets_ptr, output_stride, group_stride, magic)
    SHAPE: tl.constexpr = TileShape(K, BLOCK_K, BITS, GROUP, INTERLEAVED, INT8)
    tile = tl.program_id(0)
    item = items_ptr + tile // column_tiles * 3
    expert = tl.load(item).to(tl.int64)
    start = tl.load(item + 1)
    count = tl.load(item + 2)
    # Later than the item, which may be none: both come from memory at once.
    if tile >= tl.load(num_items_ptr) * column_tiles:
        return
    first = tile % column_tiles * BLOCK_N
    place = (expert, start, count, first)
    tensors = (x_ptr, weight_ptr, bias_ptr, out_ptr, weights_ptr, pairs_ptr)
    strides = (x_stride, weight_stride, out_stride)
    # Gates and ups of FP4 are one product where each of them would have less than 16 rows a warp.
    JOINED: tl.constexpr = FP4 and MODE >= 2 and MODE < 5 and 16 * num_warps > BLOCK_N
    if TAIL > 0:
        if count > TAIL:
            _write_item(tensors, strides, groups, place, N, TOP_K, ROWS, BLOCK_N, MODE, FP4, JOINED, SHAPE)
        else:
            _write_item(tensors, strides, groups, place, N, TOP_K, TAIL, BLOCK_N, MODE, FP4, JOINED, SHAPE)
    else:
        _write_item(tensors, strides, groups, place, N, TOP_K, ROWS, BLOCK_N, MODE, FP4, JOINED, SHAPE)


@triton.jit
def _write_item(
    tensors,
    strides,
    groups,
    place,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MODE: tl.constexpr,
    FP4: tl.constexpr,
    JOINED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Write the results of a tile of an item that has ROWS pairs at most.

    Args:
        tensors: rows, weights, biases, results, weights of pairs, and pairs.
        strides: strides of the rows, weights and results.
        groups: argument of `weight_tile`.
        place: expert, first place in the pairs, number of pairs, and first output of the tile.
        N: outputs of an expert.
        TOP_K: experts of a token.
        ROWS: rows of the product.
        BLOCK_N: outputs of the tile.
        MODE: activation.
        FP4: the weights are FP4.
        JOINED: one product computes gates and ups.
        SHAPE: `TileShape` of the weights.
    """
    x_ptr, weight_ptr, bias_ptr, out_ptr, weights_ptr, pairs_ptr = tensors
    x_stride, weight_stride, out_stride = strides
    expert, start, count, first = place
    GATED: tl.constexpr = MODE >= 2 and MODE < 5
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    K: tl.constexpr = SHAPE.K
    BLOCK_K: tl.constexpr = SHAPE.BLOCK_K
    OUTPUTS: tl.constexpr = 2 * BLOCK_N if JOINED else BLOCK_N
    n = tl.arange(0, OUTPUTS)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    # Without masks of rows a step has a fifth fewer instructions. Places after the item's last load the last row again,
    # which costs few bytes only where most items are full.
    CLAMPED: tl.constexpr = ROWS >= 128
    valid_m = m < count
    at = start + tl.minimum(m, count - 1)
    pair = tl.load(pairs_ptr + at)
    x_row = pair // TOP_K if MODE >= 2 else at
    rows_left = N - first
    weight_row = expert * (2 * N if GATED else N) + first
    if JOINED:
        # The ups of eight outputs follow their gates, so that one thread has both sums of an output.
        tl.static_assert(N % BLOCK_N == 0)
        n = n // 16 * 8 + n % 8 + n // 8 % 2 * N
        rows_left += N
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if CLAMPED and K % BLOCK_K == 0:
            x = tl.load(x_ptrs + start_k).trans()
        else:
            x_mask = tl.full((ROWS, 1), True, tl.int1) if CLAMPED else valid_m[:, None]
            if K % BLOCK_K != 0:
                x_mask = x_mask & (start_k + k < K)[None, :]
            x = tl.load(x_ptrs + start_k, x_mask, other=0.0).trans()
        column = start_k + (weight_row * 0).to(tl.int32)  # the interpreter's loops have numbers of Python
        weight = expert_tile(
            weight_ptr, weight_stride, groups, weight_row, column, rows_left, n, k, SHAPE, KIND, FP4
        )  # fmt: skip
        sums = tl.dot(weight, x, sums, input_precision="ieee")
        if GATED and not JOINED:
            up = expert_tile(
                weight_ptr, weight_stride, groups, weight_row + N, column, rows_left, n, k, SHAPE, KIND, FP4
            )  # fmt: skip
            up_sums = tl.dot(up, x, up_sums, input_precision="ieee")
    sums = whole_sums(sums, KIND, FP4)
    if JOINED:
        gate_and_up = tl.permute(tl.reshape(sums, (BLOCK_N // 8, 2, 8, ROWS)), (0, 2, 3, 1))
        gates, ups = tl.split(gate_and_up)
        sums, up_sums = tl.reshape(gates, (BLOCK_N, ROWS)), tl.reshape(ups, (BLOCK_N, ROWS))
    else:
        up_sums = whole_sums(up_sums, KIND, FP4)
    write_results(
        sums, up_sums, bias_ptr, weights_ptr, out_ptr, out_stride, weight_row, (start, count, pair), first, N, MODE
    )
