"""Experts of one row: the router with the norm before it, and products of weights in 16 or 32 bits.

One row has k different experts, so its lists need no sorting: pair j is item j. As in `gemv`, each thread multiplies
columns of a weight row, without tensor cores, and programs are many, so that all of them read memory at once.

    route      | outputs 0.. | outputs 4.. | ...  whole inputs; the program that arrives last chooses the experts
    gate_up    | expert 0: outputs 0.. | ... | expert 1: outputs 0.. | ...       activation, by pair
    down       | outputs 0..: expert 0, expert 1, ... | outputs 4..: ...         weighted sum, added to the stream

Results do not depend on timing. Shapes: E hidden size, X experts, k experts of a token, I intermediate size.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.elementwise.layers import weighted
from phonograph.kernels.triton.experts.choose_experts import choose_experts
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.gemm.choose import one_row
from phonograph.kernels.triton.gemm.gemm_epilogue import activated
from phonograph.kernels.triton.gemm.gemv import products
from phonograph.kernels.triton.gemm.product import SILU
from phonograph.kernels.triton.launch.l1_carveout import prefer_l1
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_let_next_start, pdl_options, pdl_wait


class RowTile(NamedTuple):
    """Tile of a product of one row, and its launch.

    Attributes:
        block_n: outputs.
        block_k: inputs of a step, a power of two.
        ahead: steps whose weights are in registers.
        num_warps: warps of a program.
    """

    block_n: int
    block_k: int
    ahead: int
    num_warps: int


def row_tile(num_inputs: int) -> RowTile:
    """Return the tile of products with so many inputs, as `choose` does for one row of dense weights."""
    config = one_row(num_inputs, gated=False)
    return RowTile(config.block_n, config.block_k, 1, config.num_warps)


def route_row(
    x_1E: torch.Tensor,
    router_OE: torch.Tensor,
    routing: Routing,
    lists: ExpertLists,
    tile: RowTile,
    *,
    norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
    router_bias_O: torch.Tensor | None = None,
    choice_bias_X: torch.Tensor | None = None,
    expert_scale_X: torch.Tensor | None = None,
    num_rows: torch.Tensor | None = None,
) -> None:
    """Choose the experts of one row, and list their work.

    Args:
        x_1E: input of the router.
        router_OE: weights of the router, O = X, or X + 1 if the last output is the gate of a shared expert.
        routing: rule of the choice.
        lists: receives the result.
        tile: of the router's product.
        norm: weights and epsilon of a norm before the router, and memory [1, E] that receives the normed row; None if
            `x_1E` is normed.
        router_bias_O: added to the logits.
        choice_bias_X: float32, added to the scores for the choice only.
        expert_scale_X: float32, factor of each expert's weight.
        num_rows: int32 [1], 0 if the row is padding, which has no pairs; None if it is not.
    """
    outputs, width = router_OE.shape
    assert len(x_1E) == 1 and x_1E.stride(1) == router_OE.stride(1) == 1 and outputs <= lists.partials.numel()
    norm_E, eps, normed = (None, 0.0, None) if norm is None else norm
    _route_row_kernel[(triton.cdiv(outputs, tile.block_n),)](
        x_1E,
        norm_E,
        normed,
        router_OE,
        router_bias_O,
        choice_bias_X,
        expert_scale_X,
        num_rows,
        *(lists.experts_Tk, lists.weights_Tk, lists.shared_T, lists.pairs_P, lists.items_I3, lists.num_items),
        lists.partials,
        lists.arrived,
        eps,
        router_OE.stride(0),
        X=routing.num_experts,
        K=routing.top_k,
        OUTPUTS=outputs,
        E=width,
        BLOCK_O=tile.block_n,
        BLOCK_E=tile.block_k,
        SIGMOID=routing.sigmoid,
        RENORMALISED=routing.renormalised,
        SCALE=routing.scale,
        LOGIT_FACTOR=routing.logit_factor,
        GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        GP=triton.next_power_of_2(routing.num_groups),
        SP=triton.next_power_of_2(routing.num_experts // routing.num_groups),
        **pdl_options(),
        num_warps=tile.num_warps,
    )


def gate_up_row(
    x_1E: torch.Tensor,
    matrix: torch.Tensor,
    lists: ExpertLists,
    tile: RowTile,
    inner_kI: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mode: int = SILU,
) -> None:
    """Write activation(gate) * up of each expert of the row.

    Args:
        x_1E: the row.
        matrix: weights of all experts, [X * 2I, E]: of each the gates, then the ups.
        lists: of the routing.
        tile: of the product.
        inner_kI: receives the results.
        bias: [X * 2I].
        mode: activation, as in `Product`.
    """
    top_k, inner = inner_kI.shape
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
    matrix: torch.Tensor,
    lists: ExpertLists,
    tile: RowTile,
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
    top_k, inner = inner_kI.shape
    width = hidden_1E.shape[1]
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
def _route_row_kernel(
    x_ptr,
    norm_ptr,
    normed_ptr,
    router_ptr,
    router_bias_ptr,
    choice_bias_ptr,
    expert_scale_ptr,
    num_rows_ptr,
    experts_ptr,
    weights_ptr,
    shared_ptr,
    pairs_ptr,
    items_ptr,
    num_items_ptr,
    logits_ptr,
    arrived_ptr,
    eps,
    router_stride,
    X: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISED: tl.constexpr,
    SCALE: tl.constexpr,
    LOGIT_FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_let_next_start(PDL)
    STEPS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    output = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    e = tl.arange(0, BLOCK_E)
    router_ptrs = router_ptr + output.to(tl.int64)[:, None] * router_stride + e[None, :]
    is_output = (output < OUTPUTS)[:, None]
    # Weights are constants, so they come before the wait.
    router = ()
    for step in tl.static_range(STEPS):
        router += (tl.load(router_ptrs + step * BLOCK_E, is_output & (step * BLOCK_E + e < E)[None, :], other=0.0),)
    pdl_wait(PDL)
    rows = ()
    squares = tl.zeros((BLOCK_E,), tl.float32)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + step * BLOCK_E + e, step * BLOCK_E + e < E, other=0.0)
        rows += (x,)
        squares += x.to(tl.float32) * x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(squares, 0) / E + eps)
    sums = tl.zeros((BLOCK_O, BLOCK_E // 8), tl.float32)
    for step in tl.static_range(STEPS):
        x = rows[step]
        if norm_ptr is not None:
            column = step * BLOCK_E + e
            norm = tl.load(norm_ptr + column, column < E, other=0.0)
            x = weighted(x.to(tl.float32) * inverse, norm, x_ptr.dtype.element_ty)
            tl.store(normed_ptr + column, x, (column < E) & (tl.program_id(0) == 0))
        sums += products(router[step], x.to(tl.float32))
    tl.store(logits_ptr + output, tl.sum(sums, 1), output < OUTPUTS)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived < tl.num_programs(0) - 1:
        return
    tl.store(arrived_ptr, 0)

    place = tl.arange(0, GP * SP)
    expert = place // SP * (X // GROUPS) + place % SP
    exists = (place % SP < X // GROUPS) & (place // SP < GROUPS)
    # Bypasses the L1 cache, which may hold older values.
    logits = tl.load(logits_ptr + expert, exists, other=0.0, cache_modifier=".cg")
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + expert, exists, other=0.0).to(tl.float32)
    if LOGIT_FACTOR != 1.0:
        logits *= LOGIT_FACTOR
    experts, weights, _ = choose_experts(
        logits[None, :], place, expert, exists, choice_bias_ptr, expert_scale_ptr,
        (X, K, SIGMOID, RENORMALISED, GROUPS, TOP_GROUPS, GP, SP),
    )  # fmt: skip
    count = K
    if num_rows_ptr is not None:
        count = tl.minimum(tl.load(num_rows_ptr), 1) * K
    pair = tl.arange(0, triton.next_power_of_2(K))[None, :]
    tl.store(experts_ptr + pair, tl.where(pair < count, experts, -1), pair < K)
    tl.store(weights_ptr + pair, weights * SCALE, pair < K)
    tl.store(pairs_ptr + pair, pair, pair < count)
    tl.store(items_ptr + 3 * pair, experts, pair < count)
    tl.store(items_ptr + 3 * pair + 1, pair, pair < count)
    tl.store(items_ptr + 3 * pair + 2, 1, pair < count)
    tl.store(num_items_ptr, count)
    if OUTPUTS > X:
        gate = tl.load(logits_ptr + X, cache_modifier=".cg")
        if router_bias_ptr is not None:
            gate += tl.load(router_bias_ptr + X).to(tl.float32)
        tl.store(shared_ptr, tl.sigmoid(gate))


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
    pdl_begin(PDL)
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
    pdl_begin(PDL)
    if tl.load(experts_ptr) < 0:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_ptrs = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    tiles = ()
    for step in tl.static_range(AHEAD if AHEAD < STEPS else STEPS):
        tiles += (_down_tile(row_ptrs, experts_ptr, weight_stride, n, k, step, PARTS, N, K, BLOCK_K),)
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
    row = tl.load(experts_ptr + step // PARTS).to(tl.int64) * N
    column = step % PARTS * BLOCK_K
    mask = (n < N)[:, None] & (column + k < K)[None, :]
    return tl.load(row_ptrs + row * weight_stride + column, mask, other=0.0)


prefer_l1(_gate_up_row_kernel, carveout=3)
prefer_l1(_down_row_kernel, carveout=3)
