"""Routing of one row, with the norm before it.

One row has k different experts, so its lists need no sorting: pair j is item j.

    route      | outputs 0.. | outputs 4.. | ...      whole inputs; the program that arrives last chooses the experts

Each program norms the row for itself, and the first one writes it. Results do not depend on timing. Shapes: E hidden
size, X experts, k experts of a token.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.elementwise.layers import weighted
from phonograph.kernels.triton.experts.choose_experts import (
    choice_constants,
    choose_experts,
    expert_places,
    load_logits,
)
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import RowTile
from phonograph.kernels.triton.gemm.gemv import products
from phonograph.kernels.triton.launch.pdl import pdl_let_next_start, pdl_options, pdl_wait


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
        SHARED=int(routing.shared),
        OUTPUTS=outputs,
        E=width,
        BLOCK_O=tile.block_n,
        BLOCK_E=tile.block_k,
        WARPS=tile.num_warps,
        **choice_constants(routing),
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
    SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WARPS: tl.constexpr,
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

    place, expert, exists = expert_places(X, GROUPS, GP, SP)
    count = K
    if num_rows_ptr is not None:
        count = tl.minimum(tl.load(num_rows_ptr), 1) * K
    if OUTPUTS > X:
        gate = tl.load(logits_ptr + X, cache_modifier=".cg")
        if router_bias_ptr is not None:
            gate += tl.load(router_bias_ptr + X).to(tl.float32)
    # Each warp chooses for itself.
    same = tl.arange(0, WARPS)
    logits = load_logits(logits_ptr + same * 0, same >= 0, 0, 1, X, GROUPS, GP, SP)
    experts, weights, _ = choose_experts(
        logits, place, expert, exists, router_bias_ptr, choice_bias_ptr, expert_scale_ptr,
        tl.minimum(router_stride, 1), (X, K, SIGMOID, RENORMALISED, SCALE, LOGIT_FACTOR, GROUPS, TOP_GROUPS, GP, SP),
    )  # fmt: skip
    # The first warp writes.
    pair = tl.arange(0, WARPS * experts.shape[1])
    experts, weights = tl.reshape(experts, pair.shape), tl.reshape(weights, pair.shape)
    has = pair < count
    tl.store(experts_ptr + pair, tl.where(has, experts, -1), pair < K)
    tl.store(weights_ptr + pair, weights, pair < K)
    tl.store(pairs_ptr + pair, pair, has)
    tl.store(items_ptr + 3 * pair, experts, has)
    tl.store(items_ptr + 3 * pair + 1, pair, has)
    tl.store(items_ptr + 3 * pair + 2, 1, has)
    tl.store(num_items_ptr, count + SHARED * (count // K))
    if OUTPUTS > X:
        tl.store(shared_ptr, tl.sigmoid(gate))
    if SHARED:
        tl.store(experts_ptr + K, tl.where(count > 0, X, -1))
        tl.store(weights_ptr + K, tl.sigmoid(gate) if OUTPUTS > X else 1.0)
        tl.store(pairs_ptr + K, K, count > 0)
        tl.store(items_ptr + 3 * K, X, count > 0)
        tl.store(items_ptr + 3 * K + 1, K, count > 0)
        tl.store(items_ptr + 3 * K + 2, 1, count > 0)
