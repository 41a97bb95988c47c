"""Parts that product kernels share: deferred norms, sums over the warps of a program, and the end of a product.

Shapes: m rows and n outputs of a program; M rows, N outputs, K inputs of a product.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from phonograph.kernels.torch.layers import SWIGLU_LIMIT, SWIGLU_SLOPE

LIMIT, SLOPE = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_SLOPE)


@triton.jit
def _add_halves(x):
    """Sum [n, w] over w, a power of two.

    If the values of a sum are in different warps, Triton's own sum passes them through shared memory a few at a time,
    and leaves a copy of the result in each warp. A split needs its pair in one thread, so here all values of a sum come
    to one thread in a single exchange, and the sums are spread over all threads.
    """
    if x.shape[1] > 1:
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        total = _add_halves(left + right)
    else:
        total = tl.reshape(x, (x.shape[0],))
    return total


@triton.jit
def add_warps(sums, BATCH: tl.constexpr, WARPS: tl.constexpr):
    """Sum [batch, a, b] over the batch, first within a warp. Return [a * b]."""
    if BATCH > WARPS:
        sums = tl.sum(tl.reshape(sums, (BATCH // WARPS, WARPS, sums.shape[1], sums.shape[2])), 0)
    return _add_halves(tl.permute(tl.reshape(sums, (WARPS, sums.shape[1] * sums.shape[2])), (1, 0)))


@triton.jit
def read_squares(squares_ptr, m, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Load the sums of squares of TILES tiles for the rows m, [tiles, m]; tiles are rounded up to a power of two."""
    tile = tl.arange(0, triton.next_power_of_2(TILES))[:, None]
    return tl.load(squares_ptr + tile * ROWS + m[None, :], tile < TILES, other=0.0)


@triton.jit
def norm_factor(squares, eps, K: tl.constexpr, WARPS: tl.constexpr):
    """Return the factors of rows [rows, 1] from their sums of squares [tiles, rows]: one over the root mean square."""
    if squares.shape[0] >= WARPS:
        squares = tl.sum(tl.reshape(squares, (WARPS, squares.shape[0] // WARPS, squares.shape[1])), 1)
    return tl.rsqrt(_add_halves(tl.permute(squares, (1, 0))) / K + eps)[:, None]


@triton.jit
def constant(pointer, n, valid_n, AXIS: tl.constexpr = 0):
    """Load constants of outputs in float32, [1, n], or [n, 1] with AXIS 1."""
    return tl.expand_dims(tl.load(pointer + n, valid_n, other=0.0).to(tl.float32), AXIS)


@triton.jit
def finished(result, up, factor, bias, up_bias, residual, MODE: tl.constexpr):
    """Return the results of a product from its sums, in float32.

    Args:
        result: sums; for a gated activation the gates'.
        up: sums of the ups, for a gated activation.
        factor: factors of the rows, of a norm, or None.
        bias: constants of the outputs, or None.
        up_bias: the same for the ups.
        residual: values of `out` that are added.
        MODE: of `Product`.
    """
    if factor is not None:
        result *= factor
        if MODE >= 2:
            up *= factor
    if bias is not None:
        result += bias
        if MODE >= 2:
            up += up_bias
    if MODE == 1:
        result += residual.to(tl.float32)
    elif MODE >= 2:
        result = activated(result, up, MODE)
    return result


@triton.jit
def activated(gate, up, MODE: tl.constexpr):
    """Return activation(gate) * up in float32, by the mode of `Product`."""
    if MODE == 2:
        result = gate * tl.sigmoid(gate) * up
    elif MODE == 5:
        # Without gates.
        result = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif MODE == 3:
        # The approximation by tanh, as `elementwise.layers.gelu_slope`.
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = gate * tl.sigmoid(SLOPE * gate) * (up + 1)
    return result


@triton.jit
def store_normed(rounded, norm, normed_ptr, normed_stride, new_squares_ptr, m, n, mask, AXIS: tl.constexpr):
    """Begin the next norm: store the results times its weights, and sums of the squares of each row.

    Args:
        rounded: the results as stored, [m, n] or [n, m].
        norm: weights of the norm, which broadcast to the results.
        normed_ptr: matrix of the normed rows.
        normed_stride: its stride.
        new_squares_ptr: sums of squares of the program's outputs, one for each row.
        m: rows, in the shape of a slice of the results without the outputs' axis.
        n: outputs, likewise.
        mask: results that exist.
        AXIS: axis of the outputs.
    """
    value = tl.where(mask, rounded.to(tl.float32), 0.0)
    tl.store(new_squares_ptr + m, tl.sum(value * value, AXIS))
    normed_ptrs = normed_ptr + tl.expand_dims(m.to(tl.int64) * normed_stride, AXIS) + tl.expand_dims(n, 1 - AXIS)
    tl.store(normed_ptrs, (value * norm).to(normed_ptr.dtype.element_ty), mask)
