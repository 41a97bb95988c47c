"""Parts that kernels of products through a ring share: the rows' descriptor, requests to the copy engine, and the end.

Shapes are those of `product`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def rows_descriptor(x_MK: torch.Tensor, tile: list[int], layout: Any) -> TensorDescriptor:
    """Describe rows that the copy engine loads in tiles, and those behind them as far as their memory goes.

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
def of_outputs(pointer, n, N: gl.constexpr):
    """Load values of the outputs n, constants of the model. Kernels do so early: they come from memory, not a cache."""
    return gl.load(pointer + n, mask=n < N, other=0.0)


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
def finish(
    result,
    up,
    factor,
    residual,
    bias,
    up_bias,
    norm,
    normed_ptr,
    new_squares_ptr,
    out_ptrs,
    normed_stride,
    m,
    n,
    mask,
    tile_squares,
    MODE: gl.constexpr,
):
    """Finish the sums of a product: factor, bias, residual or activation; store them, and begin the norm behind them.

    Args:
        result: sums [n, m], of gates if `up` has those of ups.
        up: see `result`.
        factor: deferred division of the rows [1, m], or None.
        residual: what is added to the result (`ADD`).
        bias: of the outputs [n], or None.
        up_bias: that of the ups.
        norm: weights of the norm behind the product [n], or None.
        normed_ptr: rows times those weights.
        new_squares_ptr: sums of squares of the results.
        out_ptrs: places of the results.
        normed_stride: of the rows of `normed`.
        m: rows.
        n: outputs.
        mask: which of the results exist.
        tile_squares: place of the first row's sum of squares.
        MODE: of the product.
    """
    if factor is not None:
        result *= factor
        if MODE == 2:
            up *= factor
    if bias is not None:
        result += bias.to(gl.float32)[:, None]
        if MODE == 2:
            up += up_bias.to(gl.float32)[:, None]
    if MODE == 1:
        result += residual.to(gl.float32)
    elif MODE == 2:
        result = result / (1 + gl.exp(-result)) * up
    rounded = result.to(out_ptrs.dtype.element_ty)
    gl.store(out_ptrs, rounded, mask=mask)
    if norm is not None:
        value = gl.where(mask, rounded.to(gl.float32), 0.0)
        gl.store(new_squares_ptr + tile_squares + m, gl.sum(value * value, 0))
        value *= norm.to(gl.float32)[:, None]
        normed_ptrs = normed_ptr + m.to(gl.int64)[None, :] * normed_stride + n[:, None]
        gl.store(normed_ptrs, value.to(normed_ptr.dtype.element_ty), mask=mask)
