"""Products of the experts of one row, of weights in FP4: as in `row_products`, but by tensor cores.

A code costs fewer instructions as an operand of the tensor cores than as a number in float32, so that words become
operands in registers as in `expert_few_rows`. Their right operand has eight columns, of which one row needs one: gates
and ups repeat the row, and `down` has a column for each expert, whose weights are rows of the same operand. Of these
sums it takes those in which row and column are of one expert.

    gate_up    | expert 0: 8 gates and their ups, ... | expert 1 ... | ...       activation, by pair
    down       | 8 outputs of all experts | ...                                  weighted sum, added to the stream

Shapes: E hidden size, X experts, k experts of a token, K this number rounded up to a power of two, I intermediate size;
r blocks of eight rows of weights. A unit has 128 inputs.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.experts.expert_few_rows import first_weights, multiply, row_places, tile_places
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import FewRowsTile
from phonograph.kernels.triton.experts.expert_results import write_results
from phonograph.kernels.triton.experts.expert_tile import whole_sums
from phonograph.kernels.triton.gemm.gemm_epilogue import add_warps
from phonograph.kernels.triton.gemm.product import SILU
from phonograph.kernels.triton.launch.pdl import pdl_let_next_start, pdl_options, pdl_wait, pdl_wait_first

MOST_EXPERTS = 8
"""Most experts of a row: columns of an operand."""


def gate_up_row_fp4(
    x_1E: torch.Tensor,
    matrix: Grouped,
    lists: ExpertLists,
    tile: FewRowsTile,
    inner_kI: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    mode: int = SILU,
) -> None:
    """Do what `gate_up_row` does; the arguments are the same."""
    top_k, inner = inner_kI.shape
    assert matrix.is_fp4() and matrix.interleaved and x_1E.stride(1) == 1 and inner_kI.is_contiguous()
    assert inner % 8 == x_1E.shape[1] % 64 == 0
    _gate_up_fp4_row_kernel[(triton.cdiv(inner, tile.block_n), top_k)](
        x_1E,
        matrix.packed_OW,
        matrix.scales_OG,
        bias,
        inner_kI,
        lists.experts_Tk,
        *matrix.scales_OG.stride(),
        N=inner,
        K=x_1E.shape[1],
        BLOCK_N=tile.block_n,
        UNITS=tile.units,
        AHEAD=tile.ahead,
        MODE=mode,
        **pdl_options(),
        num_warps=tile.num_warps,
    )


def add_down_row_fp4(
    inner_kI: torch.Tensor,
    matrix: Grouped,
    lists: ExpertLists,
    tile: FewRowsTile,
    hidden_1E: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    factor: float = 1.0,
) -> None:
    """Do what `add_down_row` does; the arguments are the same."""
    (top_k, inner), width = inner_kI.shape, hidden_1E.shape[1]
    assert matrix.is_fp4() and matrix.interleaved and hidden_1E.stride(1) == 1 and inner_kI.is_contiguous()
    assert top_k <= MOST_EXPERTS and width % 8 == inner % 64 == 0 and tile.block_n == 8
    _down_fp4_row_kernel[(width // 8,)](
        inner_kI,
        matrix.packed_OW,
        matrix.scales_OG,
        bias,
        hidden_1E,
        lists.experts_Tk,
        lists.weights_Tk,
        *matrix.scales_OG.stride(),
        N=width,
        K=inner,
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(max(top_k, 2)),
        UNITS=tile.units,
        AHEAD=tile.ahead,
        FACTOR=factor,
        **pdl_options(),
        num_warps=tile.num_warps,
    )


@triton.jit
def _gate_up_fp4_row_kernel(
    x_ptr,
    weight_ptr,
    exponents_ptr,
    bias_ptr,
    out_ptr,
    experts_ptr,
    output_stride,
    unit_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    # The next kernel starts when the experts are known: it loads their weights.
    pdl_wait_first(PDL)
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    first = tl.program_id(0) * BLOCK_N
    strides = output_stride, unit_stride
    places = tile_places(weight_ptr, exponents_ptr, first, expert * (2 * N), strides, N, K, BLOCK_N, 2 * BLOCK_N)
    weights = first_weights(places, K, UNITS, AHEAD)
    sums = multiply(x_ptr + tl.arange(0, 8)[:, None] * 0, places, weights, K, UNITS, AHEAD, KIND)
    total = whole_sums(add_warps(sums, UNITS, num_warps), KIND, True)
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_N, 8)), (1, 2, 0)))
    # All columns are equal; the item has one pair.
    write_results(gate, up, bias_ptr, None, out_ptr, N, expert * (2 * N) + first, (pair, 1, pair), first, N, MODE)


@triton.jit
def _down_fp4_row_kernel(
    x_ptr,
    weight_ptr,
    exponents_ptr,
    bias_ptr,
    hidden_ptr,
    experts_ptr,
    weights_ptr,
    output_stride,
    unit_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    FACTOR: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    pdl_let_next_start(PDL)
    # As in `row_products`: the routing has ended, and its results bypass the L1 cache.
    pair = tl.minimum(tl.arange(0, EXPERTS), TOP_K - 1)
    expert = tl.load(experts_ptr + pair, cache_modifier=".cg").to(tl.int64)
    n = tl.program_id(0) * 8 + tl.arange(0, 8)
    rows = tl.maximum(expert, 0)[None, :] * N + n[:, None]
    is_row = (expert >= 0)[None, :] & (n < N)[:, None]
    places = row_places(weight_ptr, exponents_ptr, rows, is_row, (output_stride, unit_stride), K)
    weights = first_weights(places, K, UNITS, AHEAD)
    pdl_wait(PDL)
    x_ptrs = x_ptr + tl.minimum(tl.arange(0, 8)[:, None], TOP_K - 1) * K
    sums = multiply(x_ptrs, places, weights, K, UNITS, AHEAD, KIND)
    if tl.max(expert, 0) < 0:
        return
    total = tl.reshape(whole_sums(add_warps(sums, UNITS, num_warps), KIND, True), (EXPERTS, 8, 8))
    place = tl.arange(0, EXPERTS)
    weight = tl.load(weights_ptr + place, place < TOP_K, other=0.0)
    own = place[:, None, None] == tl.arange(0, 8)[None, None, :]
    total = tl.sum(tl.where(own, total, 0.0), 2)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + tl.maximum(expert, 0)[:, None] * N + n[None, :]).to(tl.float32)
    total = tl.sum(total * weight[:, None], 0) * FACTOR
    hidden = tl.load(hidden_ptr + n)
    tl.store(hidden_ptr + n, (total + hidden.to(tl.float32)).to(hidden.dtype))
