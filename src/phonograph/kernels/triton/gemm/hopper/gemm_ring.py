"""Matrix products of 9 to 256 rows on Hopper, through a ring of tiles in shared memory.

Shapes: M rows in tiles of ROWS, N outputs in tiles of BLOCK_N, K inputs in steps of BLOCK_K; SPLITS programs a tile;
the ring has STAGES places of a step. Rows and weights have 16 bits, or both are FP8, or weights have 4 bits.

Algorithm: TMA and `wgmma` with a ring of barriers, as in CUTLASS's kernels for Hopper, but without a producer warp.
1. A program requests the weights of its whole ring before it waits for its input, and the rows after that. Loads in
   flight need neither registers nor warps, so four warps do; `gemm_small_m` has no registers for more than 32 rows.
2. Each step waits for its place, multiplies out^T = W x^T (weights are the long side), and requests the step that takes
   the place next. With LAG 1 the request waits until the next products run, so that the tensor cores never wait.
3. Each thread unpacks the 4-bit words of its part of the tile into registers, from which the tensor cores take weights;
   other programs of the multiprocessor unpack meanwhile.
4. Split inputs are added by the program that arrives last, in a fixed order.

    ring     | place 0 | place 1 | place 2 |      each: weights [BLOCK_N, BLOCK_K] (two if gated) and rows
    step     |    0    |    1    |    2    |    requested before the wait (weights), after it (rows)
             |    3    |    4    | ...          requested when the products of steps 0 and 1 have ended

Triton's interpreter does not run Gluon: without a Hopper GPU tests compile the kernel, and run it on threads
(`tests/support/gluon_on_threads.py`).
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.gemm.grouped_operands import (
    BIAS_OF_BFLOAT16,
    BIAS_OF_FLOAT16,
    in_order,
    unpacked,
)
from phonograph.kernels.triton.gemm.hopper.gemm_ring_parts import (
    add_parts,
    ask_for_rows,
    ask_for_weights,
    constant,
    deferred_factor,
    finished,
    leave_part,
    read_squares,
    rows_descriptor,
)
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import SILU, Parts, Product
from phonograph.kernels.triton.gemm.product_plan import GemmRingConfig
from phonograph.kernels.triton.launch.gluon import (
    let_next_kernel_start,
    make_barriers,
    next_stage,
    wait_for_kernel_before,
)


def launch(product: Product, config: GemmRingConfig, parts: Parts | None) -> None:
    """Compute a product of rows that begin at multiples of 16 bytes.

    Args:
        product: rows and weights of 16 bits; rows of 16 bits and interleaved weights of 4; or both in FP8, weights with
            a scale an output.
        config: the tiles.
        parts: scratch, needed if inputs are split.
    """
    x_MK, weight, matrix = product.rows, product.grouped, product.matrix
    rows, block_n, block_k, _, stages, lag = config
    assert stages > lag
    kind = _KINDS[x_MK.dtype]
    num_warps = 8 if block_n * (1 + (product.mode >= SILU)) * rows > 8192 else 4
    tile, weights_kind, group = [block_n, block_k], kind, 0
    if product.row_scales is not None:
        assert weight is not None and weight.has_output_scales() and kind == gl.float8e4nv
        matrix = weight.packed_OW
    elif weight is not None:
        assert takes(weight, config)
        # Each warp has 16 outputs of a tile, whose weights no other warp unpacks.
        num_warps, group, tile, weights_kind = block_n // 16, weight.group, [block_n, block_k // 8], gl.int32
    rows_layout = gl.NVMMASharedLayout.get_default_for([rows, block_k], kind)
    weights_layout = gl.NVMMASharedLayout.get_default_for(tile, weights_kind)
    launch_product(
        _gemm_ring_kernel,
        product,
        config,
        parts,
        x_desc=rows_descriptor(x_MK, [rows, block_k], rows_layout),
        weight_desc=TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], tile, weights_layout),
        GROUP=group,
        WARPS=num_warps,
        num_warps=num_warps,
    )


_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def takes(weight: Grouped, config: GemmRingConfig) -> bool:
    """Return True if a tile has 64 or 128 outputs and lies in one group of interleaved words.

    With a lag, products would still read registers that the next step's weights are written to.
    """
    return weight.interleaved and weight.group % config.block_k == 0 and config.block_n in (64, 128) and config.lag == 0


@gluon.constexpr_function
def _words_layout(num_warps, num_words):
    """Return the layout of a tile's words [16 num_warps, num_words]: one of four words a thread, of two outputs."""
    words = [[0, 1 << bit] for bit in range(2, num_words.bit_length() - 1)]
    warps = [[16 << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *words], lanes, warps, [], [16 * num_warps, num_words])


@gluon.jit
def _numbers(words, scale, zero, magic, KIND: gl.constexpr, NUMBERS: gl.constexpr):
    """Return the weights [n, k] of interleaved words [n, w], in registers, for which no thread asks another.

    Args:
        words: words of rows.
        scale: scales [n, 1].
        zero: zeros plus the bias of `unpacked`, [n, 1], or one number for all.
        magic: `MAGIC` of the type.
        KIND: type of the numbers.
        NUMBERS: layout of the numbers.
    """
    values = in_order(unpacked(words, magic, 4, KIND))
    values = gl.convert_layout(values.reshape((words.shape[0], 8 * words.shape[1])), NUMBERS, assert_trivial=True)
    # Differences of small integers are exact.
    return (values - zero) * scale


@gluon.jit
def _groups_of(scales_ptr, zeros_ptr, n, output_stride, group_at, KIND: gl.constexpr):
    """Load the scales of outputs n in a group, and their zeros plus the bias of `unpacked`, or one number for all."""
    BIAS: gl.constexpr = BIAS_OF_BFLOAT16 if gl.bfloat16 == KIND else BIAS_OF_FLOAT16
    # A matrix has fewer than 2 ** 31 groups.
    at = n * output_stride + group_at
    scale = gl.load(scales_ptr + at).to(KIND)[:, None]
    zero = gl.to_tensor(BIAS + 8).to(KIND)
    if zeros_ptr is not None:
        zero = (gl.load(zeros_ptr + at).to(gl.float32) + BIAS).to(KIND)[:, None]
    return scale, zero


@gluon.jit
def _wait_for_products(STEPS: gl.constexpr, sums, ups, PAIR: gl.constexpr):
    """Wait until the products of at most STEPS steps are in flight."""
    if PAIR == 2:
        sums, ups = warpgroup_mma_wait(2 * STEPS, deps=(sums, ups))
    else:
        sums = warpgroup_mma_wait(STEPS, deps=(sums,))
    return sums, ups


@gluon.jit(do_not_specialize=["M"])
def _gemm_ring_kernel(
    x_desc,
    weight_desc,
    scales_ptr,
    zeros_ptr,
    row_scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    squares_ptr,
    norm_ptr,
    normed_ptr,
    new_squares_ptr,
    M,
    eps,
    magic,
    output_stride,
    group_stride,
    out_stride,
    normed_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    SQUARE_TILES: gl.constexpr,
    MODE: gl.constexpr,
    LAG: gl.constexpr,
    WARPS: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        let_next_kernel_start()
    BLOCK_N: gl.constexpr = weight_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    PAIR: gl.constexpr = 2 if MODE >= 2 else 1
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BYTES: gl.constexpr = PAIR * weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    KIND: gl.constexpr = x_desc.dtype
    WIDE: gl.constexpr = min(WARPS, BLOCK_N // 16)
    # The tensor cores take 32 bytes of columns at a time.
    COLUMNS: gl.constexpr = 32 * ROWS * BLOCK_K // x_desc.block_type.nbytes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[WIDE, WARPS // WIDE],
        instr_shape=[16, ROWS * WIDE // WARPS, COLUMNS],
    )
    NUMBERS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    # Sixteen bytes of an output row a thread.
    LANES: gl.constexpr = BLOCK_N // 8
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    WIDTH: gl.constexpr = weight_desc.block_type.shape[1]
    weights = gl.allocate_shared_memory(weight_desc.dtype, [PAIR * STAGES, BLOCK_N, WIDTH], weight_desc.layout)
    rows = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    full = make_barriers(STAGES, 1)
    fence_async_shared()
    gl.thread_barrier()

    row_tiles = (M + ROWS - 1) // ROWS
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first = tile // row_tiles * BLOCK_N
    first_row = tile % row_tiles * ROWS
    begin = split * STEPS // SPLITS
    end = (split + 1) * STEPS // SPLITS
    # Constants of the model, requested before the wait.
    for place in gl.static_range(STAGES):
        ask_for_weights(weights, place, weight_desc, full, BYTES, first, begin + place, end, N, PAIR)
    scale, zero, up_scale, up_zero = 0, 0, 0, 0
    if GROUP > 0:
        group_n = gl.minimum(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, NUMBERS)), N - 1)
        group_at = begin * BLOCK_K // GROUP * group_stride
        scale, zero = _groups_of(scales_ptr, zeros_ptr, group_n, output_stride, group_at, KIND)
        if MODE >= 2:
            up_scale, up_zero = _groups_of(scales_ptr, zeros_ptr, group_n + N, output_stride, group_at, KIND)
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    bias = constant(bias_ptr, n, N)[:, None] if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N, n, N)[:, None] if bias_ptr is not None and MODE >= 2 else None
    norm = constant(norm_ptr, n, N)[:, None] if norm_ptr is not None else None
    if PDL:
        wait_for_kernel_before()
    for place in gl.static_range(STAGES):
        ask_for_rows(rows, place, x_desc, full, first_row, begin + place, end)
    m = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    mask = (n < N)[:, None] & (m < M)[None, :]
    out_ptrs = out_ptr + m.to(gl.int64)[None, :] * out_stride + n[:, None]
    # Loaded early, used at the end.
    residual = gl.load(out_ptrs, mask=mask, other=0.0) if MODE == 1 else None
    if SQUARE_TILES > 0:
        squares = read_squares(squares_ptr, SQUARE_TILES, ROWS, WARPS)

    sums = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    ups = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    place, turn = 0, 0
    for step in range(begin, end):
        mbarrier.wait(full.index(place), turn)
        x = rows.index(place).permute((1, 0))
        if GROUP > 0:
            words = weights.index(PAIR * place).load(_words_layout(WARPS, WIDTH))
            left = _numbers(words, scale, zero, magic, KIND, NUMBERS)
            # Of the next step; the last step repeats its groups.
            group_at = gl.minimum(step + 1, STEPS - 1) * BLOCK_K // GROUP * group_stride
            scale, zero = _groups_of(scales_ptr, zeros_ptr, group_n, output_stride, group_at, KIND)
        else:
            left = weights.index(PAIR * place)
        sums = warpgroup_mma(left, x, sums, is_async=True)
        if MODE >= 2:
            if GROUP > 0:
                words = weights.index(PAIR * place + 1).load(_words_layout(WARPS, WIDTH))
                up_left = _numbers(words, up_scale, up_zero, magic, KIND, NUMBERS)
                up_scale, up_zero = _groups_of(scales_ptr, zeros_ptr, group_n + N, output_stride, group_at, KIND)
            else:
                up_left = weights.index(PAIR * place + 1)
            ups = warpgroup_mma(up_left, x, ups, is_async=True)
        sums, ups = _wait_for_products(LAG, sums, ups, PAIR)
        # All warps have read this place, or with LAG that of the step before.
        gl.thread_barrier()
        free, ahead = place, step + STAGES
        if LAG > 0:
            free = gl.where(place == 0, STAGES - 1, place - 1)
            ahead = gl.where(step == begin, end, ahead - 1)
        ask_for_weights(weights, free, weight_desc, full, BYTES, first, ahead, end, N, PAIR)
        ask_for_rows(rows, free, x_desc, full, first_row, ahead, end)
        place, turn = next_stage(place, turn, STAGES)
    if LAG > 0:
        sums, ups = _wait_for_products(0, sums, ups, PAIR)
        # The ring's memory serves from here on to exchange sums, while other warps may still multiply.
        gl.thread_barrier()

    if SPLITS > 1:
        SIZE: gl.constexpr = BLOCK_N * ROWS
        within_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
        within = within_n[:, None] * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        base = partial_ptr + tile * (SPLITS * SIZE) + within
        if leave_part(base, sums, split, SIZE, arrived_ptr, tile) < SPLITS - 1:
            return
        sums = add_parts(base, gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT), SIZE, SPLITS, arrived_ptr, tile)

    result = gl.convert_layout(sums, OUT)
    up = gl.convert_layout(ups, OUT) if MODE >= 2 else None
    if row_scales_ptr is not None:
        row_scale = gl.load(row_scales_ptr + m, mask=m < M, other=0.0)[None, :]
        result *= gl.load(scales_ptr + n * output_stride, mask=n < N, other=0.0)[:, None] * row_scale
        if MODE >= 2:
            up *= gl.load(scales_ptr + (N + n) * output_stride, mask=n < N, other=0.0)[:, None] * row_scale
    if SQUARE_TILES > 0:
        factor = deferred_factor(squares, eps, K, OUT)
        result *= factor
        if MODE >= 2:
            up *= factor
    rounded = finished(result, up, bias, up_bias, residual, MODE).to(out_ptr.dtype.element_ty)
    gl.store(out_ptrs, rounded, mask=mask)
    if norm is not None:
        value = gl.where(mask, rounded.to(gl.float32), 0.0)
        gl.store(new_squares_ptr + first // BLOCK_N * ROWS + m, gl.sum(value * value, 0))
        normed_ptrs = normed_ptr + m.to(gl.int64)[None, :] * normed_stride + n[:, None]
        gl.store(normed_ptrs, (value * norm).to(normed_ptr.dtype.element_ty), mask=mask)
