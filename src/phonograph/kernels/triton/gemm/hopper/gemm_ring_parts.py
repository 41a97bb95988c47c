"""Parts that kernels of products through a ring share: the rows' descriptor, requests to the copy engine, and the end.

Shapes: M rows, N outputs, K inputs (`product`); m rows and n outputs of a program.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.torch.grouped import Grouped

UNIT = gl.constexpr(128)
"""Columns of a unit, the smallest group of interleaved words that the kernels of few rows take."""

GroupSizes = namedtuple("GroupSizes", "N K PAIR BLOCK_N BLOCK_K SPLITS GROUP WARPS")
"""Sizes that scales and zeros depend on, as constants: 2 in PAIR for gates and ups, columns of a group, warps."""


def takes(weight: Grouped, units: int) -> bool:
    """Return True if the group size is one unit, or a multiple of a step's `units` units, of interleaved words."""
    return weight.interleaved and (weight.group == UNIT.value or weight.group % (UNIT.value * units) == 0)


def rows_descriptor(x_MK: torch.Tensor, tile: list[int], layout: Any) -> TensorDescriptor:
    """Make a TMA descriptor of the rows, extended to the end of the allocation so that no tile is out of bounds.

    The copy engine takes 1 to 2 us more of a kernel for a tile with rows that do not exist. A row has no influence on
    the results of others, so that any memory serves, whatever it holds.
    """
    num_rows, num_inputs = x_MK.shape
    stride = x_MK.stride(0)
    elements = x_MK.untyped_storage().nbytes() // x_MK.element_size() - x_MK.storage_offset()
    in_memory = (elements - num_inputs) // stride + 1
    in_tiles = triton.cdiv(num_rows, tile[0]) * tile[0]
    return TensorDescriptor(x_MK, [min(in_memory, in_tiles), num_inputs], [stride, 1], tile, layout)


@gluon.jit
def ask_for_weights(
    ring, place, desc, full, BYTES: gl.constexpr, first, step, end, N: gl.constexpr, PAIR: gl.constexpr
):
    """Load a step's weights, if the step exists, into a place in the ring, whose barrier expects BYTES, rows included.

    A place has PAIR tiles: two, of gates and ups, if there are both.
    """
    there = step < end
    mbarrier.expect(full.index(place), BYTES, pred=there)
    for half in gl.static_range(PAIR):
        to = ring.index(PAIR * place + half)
        column = step * desc.block_type.shape[1]
        tma.async_copy_global_to_shared(desc, [first + half * N, column], full.index(place), to, pred=there)


@gluon.jit
def ask_for_rows(ring, place, desc, full, first_row, step, end):
    """Load a step's columns of rows, if the step exists."""
    column = step * desc.block_type.shape[1]
    tma.async_copy_global_to_shared(desc, [first_row, column], full.index(place), ring.index(place), pred=step < end)


@gluon.jit
def read_squares(squares_ptr, SQUARE_TILES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Load the sums of squares of rows, one of each tile of the product that made the rows."""
    TILES: gl.constexpr = triton.next_power_of_2(SQUARE_TILES)
    LANES: gl.constexpr = min(4, ROWS // 4)
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(1, SQUARES))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SQUARES))[None, :]
    return gl.load(squares_ptr + tile * ROWS + row, mask=tile < SQUARE_TILES, other=0.0)


@gluon.jit
def deferred_factor(squares, eps, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the norm's factor of each row, [1, m]."""
    factor = gl.rsqrt(gl.sum(squares, 0) / K + eps)
    return gl.convert_layout(factor, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def constant(pointer, n, N: gl.constexpr):
    """Load constants of the outputs n, in float32. Kernels do so early: they come from memory, not from a cache."""
    return gl.load(pointer + n, mask=n < N, other=0.0).to(gl.float32)


@gluon.constexpr_function
def _turns(steps, splits, block_k, group):
    """Return a program's steps, or its groups if a group is longer than a step, rounded up to a power of two."""
    most = -(-steps // splits)
    if group > UNIT.value:
        most = most * block_k // group + 2
    return triton.next_power_of_2(most)


@gluon.jit
def keep(pointer, first, first_group, output_stride, group_stride, SIZES: gl.constexpr):
    """Copy scales or zeros of a program's outputs to shared memory, and return them, [turns, groups, outputs].

    Turns are the program's steps, or its groups if those are larger than steps, rounded up to a power of two.

    Args:
        pointer: of the first output and group.
        first: first output of the program; with PAIR == 2 the ups follow, N outputs further.
        first_group: first group of the program. Groups after the last one of K repeat its values.
        output_stride: from one output to the next.
        group_stride: from one group to the next.
        SIZES: `GroupSizes`.
    """
    N: gl.constexpr = SIZES.N
    BLOCK_N: gl.constexpr = SIZES.BLOCK_N
    GROUP: gl.constexpr = SIZES.GROUP
    BOTH_N: gl.constexpr = SIZES.PAIR * BLOCK_N
    TURNS: gl.constexpr = _turns((SIZES.K + SIZES.BLOCK_K - 1) // SIZES.BLOCK_K, SIZES.SPLITS, SIZES.BLOCK_K, GROUP)
    GROUPS: gl.constexpr = TURNS * (SIZES.BLOCK_K // UNIT if GROUP == UNIT else 1)
    # Eight outputs of a group a thread.
    OF_GROUP: gl.constexpr = min(32, BOTH_N // 8)
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [32 // OF_GROUP, OF_GROUP], [SIZES.WARPS, 1], [1, 0])
    group = gl.minimum(first_group + gl.arange(0, GROUPS, layout=gl.SliceLayout(1, READ)), (SIZES.K - 1) // GROUP)
    at = gl.arange(0, BOTH_N, layout=gl.SliceLayout(0, READ))
    output = gl.minimum(first + at % BLOCK_N, N - 1) + at // BLOCK_N * N
    values = gl.load(
        pointer + group.to(gl.int64)[:, None] * group_stride + output.to(gl.int64)[None, :] * output_stride
    )
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(values.dtype, [TURNS, GROUPS // TURNS, BOTH_N], LAYOUT)
    kept._reinterpret(values.dtype, [GROUPS, BOTH_N], LAYOUT).store(values)
    return kept


@gluon.jit
def leave_part(base, part, split, SIZE: gl.constexpr, arrived_ptr, tile):
    """Store a program's part of split inputs, and return how many programs of the tile had arrived before.

    Args:
        base: places of the tile's first part.
        part: sums of this program.
        split: number of its part.
        SIZE: elements of a part.
        arrived_ptr: counters of the tiles.
        tile: number of the tile.
    """
    gl.store(base + split * SIZE, part)
    # All of the program's stores come before its one arrival.
    gl.thread_barrier()
    return gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def add_parts(base, zeros, SIZE: gl.constexpr, SPLITS: gl.constexpr, arrived_ptr, tile):
    """Return the sum of a tile's parts, all of which are there, in a fixed order; its counter is 0 again."""
    total = zeros
    for part in gl.static_range(SPLITS):
        # Bypasses the L1 cache, which may hold older values.
        total += gl.load(base + part * SIZE, cache_modifier=".cg")
    gl.store(arrived_ptr + tile, 0)
    return total


@gluon.jit
def finished(result, up, bias, up_bias, residual, MODE: gl.constexpr):
    """Return the results of a product from its sums, in float32, as `gemm_epilogue.finished` does."""
    if bias is not None:
        result += bias
        if MODE >= 2:
            up += up_bias
    if MODE == 1:
        result += residual.to(gl.float32)
    elif MODE == 2:
        result = result / (1 + gl.exp(-result)) * up
    elif MODE == 3:
        # The approximation of GELU by tanh, as `elementwise.layers.gelu_slope`.
        result = result / (1 + gl.exp(-1.5957691216057308 * (result + 0.044715 * result * result * result))) * up
    return result
