"""Lists of the work of experts that were chosen before, without a router's product.

A program of a tile copies the experts of its tokens and their weights, and keeps a mask for each expert with the bits
of the tokens that have it. A second launch makes the lists of the masks, as for many tokens of `route`.

    tile 0: copy, masks | tile 1: ... |   then   | lists of tile 0 | of tile 1 ...

Shapes: T tokens, X experts, k experts of a token; see `expert_lists` for others.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.experts.expert_lists import LARGE_TILE, LEAST_BLOCK, LIST_TILES, ExpertLists
from phonograph.kernels.triton.experts.route import list_constants, list_pairs
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options


def list_experts(
    experts_Tk: torch.Tensor, weights_Tk: torch.Tensor, routing: Routing, lists: ExpertLists, *, block: int
) -> None:
    """List the work of chosen experts.

    Args:
        experts_Tk: integers, different experts of each token.
        weights_Tk: weights of their results, of any type of numbers.
        routing: numbers of experts.
        lists: receives the lists, experts and weights.
        block: most pairs of an item, at least `LEAST_BLOCK`.
    """
    num_tokens, top_k = experts_Tk.shape
    assert block >= LEAST_BLOCK and top_k == routing.top_k
    shape = list_constants(routing, LARGE_TILE, LIST_TILES * LARGE_TILE, block)
    _chosen_kernel[(triton.cdiv(num_tokens, LARGE_TILE),)](
        experts_Tk.contiguous(),
        weights_Tk.contiguous(),
        lists.experts_Tk,
        lists.weights_Tk,
        lists.masks_NX,
        num_tokens,
        **{name: shape[name] for name in ("X", "K", "TILE", "XP")},
        **pdl_options(),
        num_warps=4,
    )
    list_pairs(lists, num_tokens, shape)


@triton.jit(do_not_specialize=["T"])
def _chosen_kernel(
    chosen_ptr,
    chosen_weights_ptr,
    experts_ptr,
    weights_ptr,
    masks_ptr,
    T,
    X: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    XP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    bit = tl.full((TILE,), 1, tl.uint32) << tl.arange(0, TILE).to(tl.uint32)
    expert = tl.arange(0, XP)
    valid = row < T
    mask = tl.zeros((XP,), tl.uint32)
    for j in tl.static_range(K):
        pair = row * K + j
        own = tl.load(chosen_ptr + pair, valid, other=-1).to(tl.int32)
        weight = tl.load(chosen_weights_ptr + pair, valid, other=0.0).to(tl.float32)
        tl.store(experts_ptr + pair, own, valid)
        tl.store(weights_ptr + pair, weight, valid)
        mask += tl.sum(tl.where(own[:, None] == expert[None, :], bit[:, None], 0), 0)
    tl.store(masks_ptr + tile * X + expert, mask.to(tl.int32, bitcast=True), expert < X)
