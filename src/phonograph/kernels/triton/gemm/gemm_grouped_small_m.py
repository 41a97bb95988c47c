"""Matrix products of up to 32 rows with weights of 4 or 8 bits in groups.

Shapes: M rows, padded to ROWS; N outputs, K inputs, G groups of inputs, W words of 32 bits of an output; a unit is the
columns of one product of the tensor cores: 128, or one smaller group (64 columns, or 32, of 8 bits). A step is UNITS.

Algorithm: `gemm_small_m`, with weights that become numbers by bit operations, as in Marlin (Frantar et al., 2024).
1. A program loads AHEAD steps of words and scales into registers before it waits for its input. Units are dealt to its
   warps, and `add_warps` adds their sums.
2. Weights of 4 bits are multiplied as bias + weight (`grouped_operands`), less than one instruction for each weight.
3. A product of x with ones gives the columns' sum: out = scale * (sum of x (bias + weight) - (bias + zero) * sum of x).
4. Integers of 8 bits are multiplied less 128, so only zeros other than 128 need the product with ones. One scale for
   all inputs is applied once, at the end.

    K ->        group 0 = unit 0   unit 1   ...    | next step
    16 outputs  [ warp 0         ][ warp 1 ][ ... ]|[ warp 0 ]   words of AHEAD steps are in registers
    x           [ 128 columns    ][        ][     ]|
    scales      [ one for an output and a group  ]     added over the warps at the end
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.gemm.gemm_epilogue import add_warps, constant, finished
from phonograph.kernels.triton.gemm.grouped_operands import (
    BIAS_OF_BFLOAT16,
    BIAS_OF_FLOAT16,
    BIAS_OF_INT8,
    columns,
    read_groups,
    read_rows,
    read_words,
    weights,
)
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import Product
from phonograph.kernels.triton.gemm.product_plan import LARGE, GemmGroupedSmallMConfig
from phonograph.kernels.triton.launch.l1_carveout import prefer_l1

_Sizes = namedtuple("_Sizes", "N K GROUP COLUMNS UNITS BLOCK_N OUTPUTS")


def launch(product: Product, config: GemmGroupedSmallMConfig) -> None:
    """Compute a product of at most `config.rows` rows, whose columns are in the order of the weights."""
    rows, block_n, units, ahead, rows_ahead, num_warps = config
    assert len(product.rows) <= rows and block_n % 16 == 0 and units % num_warps == 0 and ahead % rows_ahead == 0
    kernel = _large_gemm_grouped_small_m if 2 * product.matrix.numel() >= LARGE else _gemm_grouped_small_m_kernel
    launch_product(kernel, product, config)


@triton.jit
def _groups(pointer, first, step, output_stride, group_stride, sizes: tl.constexpr):
    """Load the scales or zeros of a step's units, [units, outputs, 1]; units after the last group repeat its values."""
    unit = step * sizes.UNITS + tl.arange(0, sizes.UNITS)[:, None, None]
    group_at = tl.minimum(unit * sizes.COLUMNS // sizes.GROUP, (sizes.K - 1) // sizes.GROUP).to(tl.int64) * group_stride
    return read_groups(pointer, first, output_stride, group_at, sizes.N, sizes.BLOCK_N, 0, sizes.OUTPUTS)


@triton.jit
def _with(items, place: tl.constexpr, value):
    """Return a tuple with another item at a place."""
    return items[:place] + (value,) + items[place + 1 :]


@triton.jit(do_not_specialize=["M", "magic"])
def _gemm_grouped_small_m_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    M,
    magic,
    x_stride,
    weight_stride,
    output_stride,
    group_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INT8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS_AHEAD: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    KIND: tl.constexpr = x_ptr.dtype.element_ty
    BIAS_OF_INT4: tl.constexpr = BIAS_OF_BFLOAT16 if tl.bfloat16 == KIND else BIAS_OF_FLOAT16
    BIAS: tl.constexpr = BIAS_OF_INT8 if INT8 else BIAS_OF_INT4
    COLUMNS: tl.constexpr = min(GROUP, 128) if BITS == 4 else 32 if GROUP == 32 else 64
    WORDS: tl.constexpr = COLUMNS * BITS // 128
    EIGHTS: tl.constexpr = COLUMNS // 32
    LAST: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    # Words of a row; words of 4-bit weights have whole groups.
    COUNT: tl.constexpr = 4 * WORDS * LAST if BITS == 4 else (K + 3) // 4
    # Zeros of integers are subtracted unit by unit.
    HAS_ZEROS: tl.constexpr = BITS == 4 or zeros_ptr is not None
    NEEDS_ONES: tl.constexpr = HAS_ZEROS or offsets_ptr is not None
    ONE_SCALE: tl.constexpr = GROUP >= K and not NEEDS_ONES
    STEPS: tl.constexpr = (LAST + UNITS - 1) // UNITS
    # With a gated activation the rows of the ups follow the rows of the gates.
    OUTPUTS: tl.constexpr = 2 * BLOCK_N if MODE >= 2 else BLOCK_N
    SIZES: tl.constexpr = _Sizes(N, K, GROUP, COLUMNS, UNITS, BLOCK_N, OUTPUTS)
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
    weight_ptrs = weight_ptr + (row + tile // (BLOCK_N // 8) * N).to(tl.int64) * weight_stride
    x_row = eight + 8 * tl.arange(0, ROWS // 8)[None, :]
    x_ptrs = x_ptr + x_row.to(tl.int64) * x_stride

    # Constants of the model, requested before the wait. They leave the L1 cache to the rows.
    words = ()
    scales = ()
    zeros = ()
    offsets = ()
    for step in tl.static_range(AHEAD):
        words += (read_words(weight_ptrs, valid_row, step, COUNT, WORDS, UNITS),)
        if not ONE_SCALE:
            scales += (_groups(scales_ptr, first, step, output_stride, group_stride, SIZES),)
        if zeros_ptr is not None:
            zeros += (_groups(zeros_ptr, first, step, output_stride, group_stride, SIZES),)
        if offsets_ptr is not None:
            offsets += (_groups(offsets_ptr, first, step, output_stride, group_stride, SIZES),)
    bias = constant(bias_ptr, n, valid_n) if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N, n, valid_n) if bias_ptr is not None and MODE >= 2 else None
    scale = constant(scales_ptr, n * output_stride, valid_n) if ONE_SCALE else None
    up_scale = constant(scales_ptr + N * output_stride, n * output_stride, valid_n) if ONE_SCALE and MODE >= 2 else None
    if PDL:
        tl_cuda.gdc_wait()

    xs = ()
    for step in tl.static_range(ROWS_AHEAD):
        xs += (read_rows(x_ptrs, x_row < M, step, K, EIGHTS, UNITS),)
    up = None
    # Loaded early, used at the end.
    residual = tl.load(out_ptrs, mask, other=0.0) if MODE == 1 else None
    half = tl.full((UNITS, 16, COLUMNS // 2), 1.0, KIND)
    ones = tl.reshape(tl.join(half, half), (UNITS, 16, COLUMNS))
    sums = tl.zeros((UNITS, OUTPUTS, ROWS), tl.float32)
    # AHEAD steps a turn; those beyond the last read nothing and add zeros. One stage: Triton's own pipeline would bring
    # the operands through shared memory.
    for turn in tl.range((STEPS + AHEAD - 1) // AHEAD, num_stages=1):
        for place in tl.static_range(AHEAD):
            right = columns(xs[place % ROWS_AHEAD], BITS, INTERLEAVED)
            left = weights(words[place], magic, BITS, KIND, INT8)
            if ONE_SCALE:
                sums = tl.dot(left, right, sums, input_precision="ieee")
            else:
                part = tl.dot(left, right, input_precision="ieee")
                if NEEDS_ONES:
                    ones_sums = tl.dot(ones, right, input_precision="ieee")[:, None, :, :]
                    ones_sums = tl.broadcast_to(ones_sums, (UNITS, OUTPUTS // 16, 16, ROWS))
                    ones_sums = tl.reshape(ones_sums, part.shape)
                    if HAS_ZEROS:
                        zero = BIAS + (zeros[place].to(tl.float32) if zeros_ptr is not None else 8)
                        part -= zero * ones_sums
                    if offsets_ptr is not None:
                        sums += offsets[place].to(tl.float32) * ones_sums
                sums += part * scales[place].to(tl.float32)
            next_step = (turn + 1) * AHEAD + place
            words = _with(words, place, read_words(weight_ptrs, valid_row, next_step, COUNT, WORDS, UNITS))
            if not ONE_SCALE:
                values = _groups(scales_ptr, first, next_step, output_stride, group_stride, SIZES)
                scales = _with(scales, place, values)
            if zeros_ptr is not None:
                values = _groups(zeros_ptr, first, next_step, output_stride, group_stride, SIZES)
                zeros = _with(zeros, place, values)
            if offsets_ptr is not None:
                values = _groups(offsets_ptr, first, next_step, output_stride, group_stride, SIZES)
                offsets = _with(offsets, place, values)
            next_rows = turn * AHEAD + place + ROWS_AHEAD
            values = read_rows(x_ptrs, x_row < M, next_rows, K, EIGHTS, UNITS)
            xs = _with(xs, place % ROWS_AHEAD, values)

    total = add_warps(sums, UNITS, num_warps)
    if MODE >= 2:
        result, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_N, ROWS)), (2, 1, 0)))
    else:
        result = tl.trans(tl.reshape(total, (BLOCK_N, ROWS)))
    if ONE_SCALE:
        result *= scale
        if MODE >= 2:
            up *= up_scale
    tl.store(out_ptrs, finished(result, up, None, bias, up_bias, residual, MODE).to(out_ptr.dtype.element_ty), mask)


_large_gemm_grouped_small_m = prefer_l1(
    triton.jit(do_not_specialize=["M", "magic"])(_gemm_grouped_small_m_kernel.fn), carveout=7
)
"""The same kernel, for layers from the bytes of `LARGE` weights in 16 bits on."""
