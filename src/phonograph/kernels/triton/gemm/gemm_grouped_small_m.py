"""Matrix products of a few rows with weights of 4 bits in groups, nearly as fast as memory.

Like `gemm_small_m`, a program holds its first weights in registers before it waits for its input, and operands go from
memory to the tensor cores without an exchange between threads: a sum over columns does not depend on their order, so
that each thread passes the columns that it read.

A word of eight weights becomes four pairs of the model's type by one shift and one logical operation each: the bits of
a weight are put into the mantissa of a constant, which makes the number `_BIAS + weight`. The tensor cores multiply
these numbers. A product with ones gives the sum of the rows' columns, times which the bias and the group's zero are
taken off afterwards, and the group's scale multiplies the rest. So a weight costs less than one instruction.

A product of the tensor cores covers the columns of one group, or 128 of them. The columns are dealt to the warps of a
program, whose sums are added at the end.

Shapes are those of `product`; W words, G groups.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.gemm.gemm_epilogue import add_warps, constant, finish, norm_factor
from phonograph.kernels.triton.gemm.product import Product, norm_arguments
from phonograph.kernels.triton.launch.l1_carveout import LARGE, prefer_l1
from phonograph.kernels.triton.launch.pdl import pdl_options

_MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x4C004C00}
"""Twice the number 128 or 16 of a type. An argument of the kernel, because the compiler would not combine two constants
of its own with a word in one instruction."""


class GroupedRowsConfig(NamedTuple):
    """Tiles of `rows` (8, 16 or 32) padded rows and block_n outputs (a multiple of 16) a program.

    units: products of 128 columns (64 or 32 in smaller groups) of a step, a multiple of num_warps
    ahead, rows_ahead: steps whose weights, and whose rows, are in flight at a time
    """

    rows: int
    block_n: int
    units: int
    ahead: int
    rows_ahead: int
    num_warps: int


def takes(weight: Grouped, dtype: torch.dtype) -> bool:
    """Return True if the kernel multiplies such weights by rows of `dtype`."""
    return (
        weight.bits == 4
        and weight.order_I is None
        and weight.offsets_OG is None
        and dtype in (torch.bfloat16, torch.float16)
        and (weight.group in (32, 64) or weight.group % 128 == 0)
    )


def launch(product: Product, weight: Grouped, config: GroupedRowsConfig) -> None:
    """Compute a product of at most `config.rows` rows with `weight` in place of the product's."""
    x_MK, _, bias_N, out_MN, mode, squares, _ = product
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    rows, block_n, units, ahead, rows_ahead, num_warps = config
    assert num_rows <= rows and block_n % 16 == 0 and units % num_warps == 0 and takes(weight, x_MK.dtype)
    assert x_MK.stride(1) == weight.packed_OW.stride(1) == out_MN.stride(1) == 1
    assert squares is None or squares.sums.shape[1] == rows
    assert weight.has_equal_strides()
    norm_pointers, eps, normed_stride, square_tiles = norm_arguments(product)
    kernel = _large_grouped_rows if num_outputs * num_inputs >= 2 * LARGE else _grouped_rows_kernel
    kernel[(triton.cdiv(num_outputs, block_n),)](
        x_MK,
        weight.packed_OW,
        weight.scales_OG,
        weight.zeros_OG,
        bias_N,
        out_MN,
        *norm_pointers,
        num_rows,
        eps,
        _MAGIC[x_MK.dtype],
        x_MK.stride(0),
        weight.packed_OW.stride(0),
        *weight.scales_OG.stride(),
        out_MN.stride(0),
        normed_stride,
        N=num_outputs,
        K=num_inputs,
        GROUP=weight.group,
        ROWS=rows,
        BLOCK_N=block_n,
        UNITS=units,
        AHEAD=ahead,
        ROWS_AHEAD=rows_ahead,
        SQUARE_TILES=square_tiles,
        MODE=mode,
        **pdl_options(),
        num_warps=num_warps,
    )


@triton.jit
def _read_words(row_ptrs, valid_rows, step, WORDS: tl.constexpr, UNITS: tl.constexpr, LAST: tl.constexpr):
    """Load a step's words of the rows [8, r], as [8, units, r, 4 * WORDS]: four threads read them, WORDS each."""
    unit = step * UNITS + tl.arange(0, UNITS)
    word = unit[:, None] * (4 * WORDS) + tl.arange(0, 4 * WORDS)[None, :]
    mask = valid_rows[:, None, :, None] & (unit < LAST)[None, :, None, None]
    pointers = row_ptrs[:, None, :, None] + word[None, :, None, :]
    return tl.load(pointers, mask, other=0, eviction_policy="evict_first")


@triton.jit
def _read_rows(row_ptrs, valid_rows, step, K: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr):
    """Load a step's columns of the rows [8, r], as [8, units, r, WORDS, 32].

    The last dimension has the eight columns of one word of each of four threads.
    """
    at = tl.arange(0, 32)
    unit = step * UNITS + tl.arange(0, UNITS)
    within = tl.arange(0, WORDS)[:, None] * 8 + (at // 8 * (8 * WORDS) + at % 8)[None, :]
    column = unit[:, None, None] * (32 * WORDS) + within[None, :, :]
    mask = valid_rows[:, None, :, None, None] & (column < K)[None, :, None, :, :]
    return tl.load(row_ptrs[:, None, :, None, None] + column[None, :, None, :, :], mask, other=0.0)


@triton.jit
def _of_groups(
    pointer,
    first,
    step,
    output_stride,
    group_stride,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTPUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Load the scales or zeros of a step's groups for OUTPUTS of the program's outputs, [units, outputs, 1].

    Sixteen at a time: so few are read in the layout that they are needed in, more would pass through shared memory.
    """
    if OUTPUTS > 16:
        HALF: tl.constexpr = OUTPUTS // 2
        low = _of_groups(
            pointer,
            first,
            step,
            output_stride,
            group_stride,
            N,
            GROUP,
            COLUMNS,
            LAST,
            UNITS,
            BLOCK_N,
            OUTPUT,
            HALF,
        )
        high = _of_groups(
            pointer,
            first,
            step,
            output_stride,
            group_stride,
            N,
            GROUP,
            COLUMNS,
            LAST,
            UNITS,
            BLOCK_N,
            OUTPUT + HALF,
            HALF,
        )
        values = tl.reshape(tl.permute(tl.join(low, high), (0, 3, 1, 2)), (UNITS, OUTPUTS, 1))
    else:
        output = first + OUTPUT % BLOCK_N + tl.arange(0, OUTPUTS)[None, :, None]
        unit = step * UNITS + tl.arange(0, UNITS)[:, None, None]
        row = (output + OUTPUT // BLOCK_N * N).to(tl.int64)
        group = (unit * COLUMNS // GROUP).to(tl.int64)
        pointers = pointer + row * output_stride + group * group_stride
        values = tl.load(pointers, (output < N) & (unit < LAST), other=0)
    return values


@triton.jit
def _pair(words, magic, at: tl.constexpr, KIND: tl.constexpr):
    """Return weights `at` and `at + 4` of each word in the type KIND, plus the bias, in a new last dimension."""
    if tl.bfloat16 == KIND:
        bits = (words >> (4 * at)) & 0x000F000F | magic
    elif at < 2:
        bits = (words << (6 - 4 * at)) & 0x03C003C0 | magic
    else:
        bits = (words >> (4 * at - 6)) & 0x03C003C0 | magic
    low = (bits & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
    high = ((bits >> 16) & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _weights(words, magic, WORDS: tl.constexpr, KIND: tl.constexpr):
    """Return words of `_read_words` as a left operand [units, 8 r, k], each plus the bias."""
    UNITS: tl.constexpr = words.shape[1]
    R: tl.constexpr = words.shape[2]
    even = tl.join(_pair(words, magic, 0, KIND), _pair(words, magic, 2, KIND))
    odd = tl.join(_pair(words, magic, 1, KIND), _pair(words, magic, 3, KIND))
    values = tl.reshape(tl.join(even, odd), (8, UNITS, R, 4, WORDS, 2, 2, 2))
    return tl.reshape(tl.permute(values, (1, 2, 0, 4, 6, 3, 7, 5)), (UNITS, 8 * R, 32 * WORDS))


@triton.jit
def _columns(rows, WORDS: tl.constexpr):
    """Return rows of `_read_rows` as a right operand [units, k, 8 r], in the order of `_weights`."""
    UNITS: tl.constexpr = rows.shape[1]
    R: tl.constexpr = rows.shape[2]
    values = tl.reshape(rows, (8, UNITS, R, WORDS, 4, 2, 2, 2))
    values = tl.reshape(tl.permute(values, (1, 2, 0, 3, 6, 4, 7, 5)), (UNITS, 8 * R, 32 * WORDS))
    return tl.permute(values, (0, 2, 1))


@triton.jit(do_not_specialize=["M", "magic"])
def _grouped_rows_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    squares_ptr,
    norm_ptr,
    normed_ptr,
    new_squares_ptr,
    M,
    eps,
    magic,
    x_stride,
    packed_stride,
    output_stride,
    group_stride,
    out_stride,
    normed_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS_AHEAD: tl.constexpr,
    SQUARE_TILES: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    BIAS: tl.constexpr = 128 if tl.bfloat16 == KIND else 16
    COLUMNS: tl.constexpr = min(GROUP, 128)
    WORDS: tl.constexpr = COLUMNS // 32
    LAST: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (LAST + UNITS - 1) // UNITS
    # With a gated activation the rows of the ups follow those of the gates.
    OUTPUTS: tl.constexpr = 2 * BLOCK_N if MODE == 2 else BLOCK_N
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    valid_n = n < N
    mask = (m < M)[:, None] & valid_n[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    eight = tl.arange(0, 8)[:, None]
    tile = tl.arange(0, OUTPUTS // 8)[None, :]
    row = first + eight + tile % (BLOCK_N // 8) * 8
    valid_row = row < N
    packed_ptrs = packed_ptr + (row + tile // (BLOCK_N // 8) * N).to(tl.int64) * packed_stride
    x_row = eight + 8 * tl.arange(0, ROWS // 8)[None, :]
    x_ptrs = x_ptr + x_row.to(tl.int64) * x_stride

    # Constants of the model, requested before the wait. They leave the L1 cache to the rows.
    words = ()
    scales = ()
    zeros = ()
    for step in tl.static_range(min(AHEAD, STEPS)):
        words += (_read_words(packed_ptrs, valid_row, step, WORDS, UNITS, LAST),)
        scales += (
            _of_groups(
                scales_ptr,
                first,
                step,
                output_stride,
                group_stride,
                N,
                GROUP,
                COLUMNS,
                LAST,
                UNITS,
                BLOCK_N,
                0,
                OUTPUTS,
            ),
        )
        if zeros_ptr is not None:
            zeros += (
                _of_groups(
                    zeros_ptr,
                    first,
                    step,
                    output_stride,
                    group_stride,
                    N,
                    GROUP,
                    COLUMNS,
                    LAST,
                    UNITS,
                    BLOCK_N,
                    0,
                    OUTPUTS,
                ),
            )
    bias = constant(bias_ptr, n, valid_n) if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N, n, valid_n) if bias_ptr is not None and MODE == 2 else None
    norm = constant(norm_ptr, n, valid_n) if norm_ptr is not None else None
    if PDL:
        tl_cuda.gdc_wait()

    xs = ()
    for step in tl.static_range(min(ROWS_AHEAD, STEPS)):
        xs += (_read_rows(x_ptrs, x_row < M, step, K, WORDS, UNITS),)
    if SQUARE_TILES > 0:
        square_tiles: tl.constexpr = triton.next_power_of_2(SQUARE_TILES)
        square_tile = tl.arange(0, square_tiles)[:, None]
        squares = tl.load(squares_ptr + square_tile * ROWS + m[None, :], square_tile < SQUARE_TILES, other=0.0)
    factor = None
    residual = None
    up = None
    if MODE == 1:
        # Loaded early, used at the end.
        residual = tl.load(out_ptrs, mask, other=0.0)
    half = tl.full((UNITS, 16, COLUMNS // 2), 1.0, KIND)
    ones = tl.reshape(tl.join(half, half), (UNITS, 16, COLUMNS))
    sums = tl.zeros((UNITS, OUTPUTS, ROWS), tl.float32)
    for step in tl.static_range(STEPS):
        if PDL and (step == 0 or step + min(AHEAD, ROWS_AHEAD) <= STEPS):
            # Done before, but the assembler moves no load past it (see `gemm_small_m`).
            tl_cuda.gdc_launch_dependents()
        if SQUARE_TILES > 0 and step == 0:
            # While the input is in flight.
            factor = norm_factor(squares, eps, K, num_warps)
        columns = _columns(xs[step], WORDS)
        part = tl.dot(_weights(words[step], magic, WORDS, KIND), columns, input_precision="ieee")
        total = tl.dot(ones, columns, input_precision="ieee")
        total = tl.reshape(tl.broadcast_to(total[:, None, :, :], (UNITS, OUTPUTS // 16, 16, ROWS)), part.shape)
        if zeros_ptr is not None:
            part -= (BIAS + zeros[step].to(tl.float32)) * total
        else:
            part -= (BIAS + 8) * total
        sums += part * scales[step].to(tl.float32)
        if step + AHEAD < STEPS:
            words += (_read_words(packed_ptrs, valid_row, step + AHEAD, WORDS, UNITS, LAST),)
            scales += (
                _of_groups(
                    scales_ptr,
                    first,
                    step + AHEAD,
                    output_stride,
                    group_stride,
                    N,
                    GROUP,
                    COLUMNS,
                    LAST,
                    UNITS,
                    BLOCK_N,
                    0,
                    OUTPUTS,
                ),
            )
            if zeros_ptr is not None:
                zeros += (
                    _of_groups(
                        zeros_ptr,
                        first,
                        step + AHEAD,
                        output_stride,
                        group_stride,
                        N,
                        GROUP,
                        COLUMNS,
                        LAST,
                        UNITS,
                        BLOCK_N,
                        0,
                        OUTPUTS,
                    ),
                )
        if step + ROWS_AHEAD < STEPS:
            xs += (_read_rows(x_ptrs, x_row < M, step + ROWS_AHEAD, K, WORDS, UNITS),)

    total = add_warps(sums, UNITS, num_warps)
    if MODE == 2:
        result, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_N, ROWS)), (2, 1, 0)))
    else:
        result = tl.trans(tl.reshape(total, (BLOCK_N, ROWS)))
    squares_ptr = new_squares_ptr + first // BLOCK_N * ROWS if norm_ptr is not None else None
    finish(
        result,
        up,
        factor,
        bias,
        up_bias,
        residual,
        norm,
        out_ptrs,
        normed_ptr,
        normed_stride,
        squares_ptr,
        m,
        n,
        mask,
        MODE,
    )


_large_grouped_rows = prefer_l1(triton.jit(do_not_specialize=["M", "magic"])(_grouped_rows_kernel.fn), carveout=7)
"""The same kernel, for layers of as many bytes as `LARGE` weights in 16 bits have."""
