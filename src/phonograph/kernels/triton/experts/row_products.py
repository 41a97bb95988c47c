"""Products of the experts of one row, of weights in 16 or 32 bits; those of FP4 are in `row_products_fp4`.

As in `gemv`, each thread multiplies columns of a weight row, without tensor cores, and programs are many, so that all
of them read memory at once. Results are added in a fixed order.

    gate_up    | expert 0: outputs 0.. | ... | expert 1: outputs 0.. | ...       activation, by pair
    down       | outputs 0..: expert 0, expert 1, ... | outputs 4..: ...         weighted sum, added to the stream

Shapes: E hidden size, X experts, k experts of a token, I intermediate size.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import FewRowsTile, RowTile
from phonograph.kernels.triton.experts.row_products_fp4 import MOST_EXPERTS, add_down_row_fp4, gate_up_row_fp4
from phonograph.kernels.triton.gemm.gemm_epilogue import activated
from phonograph.kernels.triton.gemm.gemv import products
from phonograph.kernels.triton.gemm.product import SILU
from phonograph.kernels.triton.launch.l1_carveout import prefer_l1
from phonograph.kernels.triton.launch.pdl import pdl_let_next_start, pdl_options, pdl_wait, pdl_wait_first


def takes_row(matrix: torch.Tensor | Grouped, num_pairs: int) -> bool:
    """Return True if the experts of one row can be multiplied here, where they have gates.

    Args:
        matrix: weights of all experts.
        num_pairs: experts of a row.
    """
    return not isinstance(matrix, Grouped) or (matrix.is_fp4() and matrix.interleaved and num_pairs <= MOST_EXPERTS)


def gate_up_row(
    x_1E: torch.Tensor,
    matrix: torch.Tensor | Grouped,
    lists: ExpertLists,
    tile: RowTile | FewRowsTile,
    inner_kI: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mode: int = SILU,
) -> None:
    """Write activation(gate) * up of each expert of the row.

    Args:
        x_1E: the row.
        matrix: weights of all experts, [X * 2I, E]: of each the gates, then the ups; `takes_row` says which.
        lists: of the routing.
        tile: of the product.
        inner_kI: receives the results.
        bias: [X * 2I].
        mode: activation, as in `Product`.
    """
    if isinstance(tile, FewRowsTile):
        assert isinstance(matrix, Grouped)
        gate_up_row_fp4(x_1E, matrix, lists, tile, inner_kI, bias, mode=mode)
        return
    top_k, inner = inner_kI.shape
    assert isinstance(matrix, torch.Tensor)
    assert x_1E.stride(1) == matrix.stride(1) == 1 and inner_kI.is_contiguous()
    _gate_up_row_kernel[(triton.cdiv(inner, tile.block_n), top_k)](
        x_1E,
        matrix,
        bias,
        inner_kI,
        lists.experts_Tk,
        matrix.stride(0),
        N=inner,
        K=matrix.shape[1],
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        AHEAD=tile.ahead,
        MODE=mode,
        **pdl_options(),
        num_warps=tile.num_warps,
    )


def add_down_row(
    inner_kI: torch.Tensor,
    matrix: torch.Tensor | Grouped,
    lists: ExpertLists,
    tile: RowTile | FewRowsTile,
    hidden_1E: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    factor: float = 1.0,
) -> None:
    """Add the weighted results of the row's experts to the stream, in the order of their scores.

    Args:
        inner_kI: of `gate_up_row`.
        matrix: weights of all experts, [X * E, I].
        lists: of the routing.
        tile: of the product.
        hidden_1E: the row of the stream.
        bias: [X * E].
        factor: of what is added.
    """
    if isinstance(tile, FewRowsTile):
        assert isinstance(matrix, Grouped)
        add_down_row_fp4(inner_kI, matrix, lists, tile, hidden_1E, bias, factor=factor)
        return
    top_k, inner = inner_kI.shape
    width = hidden_1E.shape[1]
    assert isinstance(matrix, torch.Tensor)
    assert hidden_1E.stride(1) == matrix.stride(1) == 1 and inner_kI.is_contiguous()
    _down_row_kernel[(triton.cdiv(width, tile.block_n),)](
        inner_kI,
        matrix,
        bias,
        hidden_1E,
        lists.experts_Tk,
        lists.weights_Tk,
        matrix.stride(0),
        N=width,
        K=inner,
        TOP_K=top_k,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        AHEAD=tile.ahead,
        FACTOR=factor,
        **pdl_options(),
        num_warps=tile.num_warps,
    )


@triton.jit
def _gate_up_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    experts_ptr,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # The next kernel starts when the experts are known: it loads their weights.
    pdl_wait_first(PDL)
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_output = (n < N)[:, None]
    gate_ptrs = weight_ptr + (expert * (2 * N) + n)[:, None] * weight_stride + k[None, :]
    up_ptrs = gate_ptrs + N * weight_stride.to(tl.int64)
    gates = ()
    ups = ()
    for step in tl.static_range(AHEAD):
        mask = is_output & (step * BLOCK_K + k < K)[None, :]
        gates += (tl.load(gate_ptrs + step * BLOCK_K, mask, other=0.0),)
        ups += (tl.load(up_ptrs + step * BLOCK_K, mask, other=0.0),)
    gate_sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for step in tl.static_range(STEPS):
        column = step * BLOCK_K + k
        x = tl.load(x_ptr + column, column < K, other=0.0).to(tl.float32)
        gate_sums += products(gates[0], x)
        up_sums += products(ups[0], x)
        gates = gates[1:]
        ups = ups[1:]
        if step + AHEAD < STEPS:
            mask = is_output & (AHEAD * BLOCK_K + column < K)[None, :]
            gates += (tl.load(gate_ptrs + (step + AHEAD) * BLOCK_K, mask, other=0.0),)
            ups += (tl.load(up_ptrs + (step + AHEAD) * BLOCK_K, mask, other=0.0),)
    gate = tl.sum(gate_sums, 1)
    up = tl.sum(up_sums, 1)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + expert * (2 * N) + n, n < N, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + expert * (2 * N) + N + n, n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + pair * N + n, activated(gate, up, MODE).to(out_ptr.dtype.element_ty), n < N)


@triton.jit
def _down_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    hidden_ptr,
    experts_ptr,
    weights_ptr,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = PARTS * TOP_K
    pdl_let_next_start(PDL)
    # The routing has ended, because `gate_up_row` waits for it before it lets this kernel start. Its results bypass the
    # L1 cache, which may still have those of the layer before.
    first_expert = tl.load(experts_ptr, cache_modifier=".cg")
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_ptrs = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    tiles = ()
    for step in tl.static_range(AHEAD if AHEAD < STEPS else STEPS):
        tiles += (_down_tile(row_ptrs, experts_ptr, weight_stride, n, k, step, PARTS, N, K, BLOCK_K),)
    pdl_wait(PDL)
    if first_expert < 0:
        return
    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for step in tl.static_range(STEPS):
        column = step % PARTS * BLOCK_K + k
        x = tl.load(x_ptr + step // PARTS * K + column, column < K, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + step // PARTS)
        sums += products(tiles[0], x) * weight
        tiles = tiles[1:]
        if step + AHEAD < STEPS:
            tiles += (_down_tile(row_ptrs, experts_ptr, weight_stride, n, k, step + AHEAD, PARTS, N, K, BLOCK_K),)
        if bias_ptr is not None and step % PARTS == 0:
            bias_row = tl.load(experts_ptr + step // PARTS).to(tl.int64) * N
            total += weight * tl.load(bias_ptr + bias_row + n, n < N, other=0.0).to(tl.float32)
    total = (total + tl.sum(sums, 1)) * FACTOR
    hidden = tl.load(hidden_ptr + n, n < N, other=0.0)
    tl.store(hidden_ptr + n, (total + hidden.to(tl.float32)).to(hidden.dtype), n < N)


@triton.jit
def _down_tile(
    row_ptrs, experts_ptr, weight_stride, n, k, step, PARTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load the weights [n, k] of a step: a part of the inputs of one expert."""
    expert = tl.load(experts_ptr + step // PARTS, cache_modifier=".cg").to(tl.int64)
    column = step % PARTS * BLOCK_K
    mask = (n < N)[:, None] & (column + k < K)[None, :] & (expert >= 0)
    return tl.load(row_ptrs + expert * N * weight_stride + column, mask, other=0.0)


prefer_l1(_gate_up_row_kernel, carveout=3)
prefer_l1(_down_row_kernel, carveout=3)
