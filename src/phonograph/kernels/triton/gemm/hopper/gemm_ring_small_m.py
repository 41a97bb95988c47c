"""Matrix products of up to 8 rows with weights of 4 bits on Hopper, through a ring in shared memory.

Shapes: M rows, padded to ROWS; N outputs in tiles of BLOCK_N, K inputs in steps of UNITS units of 128 columns, SPLITS
programs a tile.

Algorithm: the arithmetic of `gemm_grouped_small_m` (after Marlin, Frantar et al., 2024) on the ring of `gemm_ring`.
1. In registers the compiler requests the next words only after a step's products. Here the copy engine brings words
   and rows while the tensor cores work: large layers are faster; small ones are not, as programs begin and end later.
2. Words are interleaved (`Grouped`): a thread reads four words of an output and the 32 columns that they multiply,
   which are operands of the tensor cores (`mma.m16n8k16`) without an exchange between threads.
3. Weights are multiplied as bias + weight; a product with ones gives the columns' sums, to subtract bias and zeros.
   Scales and zeros of all groups of a program are in shared memory from its start.
4. Outputs and columns of a step are dealt to WARPS_N x WARPS_K warps. Split inputs are added by the last program.

    K ->              unit 0    unit 1    unit 2    unit 3   | next step
    outputs  0 to 15  [ k 0 ]   [ k 1 ]   [ k 0 ]   [ k 1 ]  |   WARPS_K 2: units in turns
    outputs 16 to 31  [ the same warps, or WARPS_N 2: two others ]
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.triton.gemm.grouped_operands import BIAS_OF_BFLOAT16, BIAS_OF_FLOAT16, unpacked
from phonograph.kernels.triton.gemm.hopper.gemm_ring_parts import (
    UNIT,
    GroupSizes,
    add_parts,
    ask_for_rows,
    ask_for_weights,
    constant,
    finished,
    keep,
    leave_part,
    rows_descriptor,
    takes,
)
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import Parts, Product
from phonograph.kernels.triton.gemm.product_plan import GemmRingSmallMConfig
from phonograph.kernels.triton.launch.gluon import (
    let_next_kernel_start,
    make_barriers,
    next_stage,
    powers,
    wait_for_kernel_before,
)

_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def launch(product: Product, config: GemmRingSmallMConfig, parts: Parts | None) -> None:
    """Compute a product of at most `config.rows` rows, which begin at multiples of 16 bytes.

    Args:
        product: with interleaved weights.
        config: the tiles.
        parts: scratch, needed if inputs are split.
    """
    x_MK, words_OW = product.rows, product.matrix
    rows, block_n, units, _, _, warps_n, warps_k = config
    assert len(x_MK) <= rows and takes(product.weight, units)
    assert units % warps_k == 0 and block_n % (16 * warps_n) == 0
    words_tile, rows_tile = [block_n, 16 * units], [rows, UNIT.value * units]
    words_layout = gl.NVMMASharedLayout.get_default_for(words_tile, gl.int32)
    rows_layout = gl.NVMMASharedLayout.get_default_for(rows_tile, _KINDS[x_MK.dtype])
    words_strides = [words_OW.stride(0), 1]
    launch_product(
        _gemm_ring_small_m_kernel,
        product,
        config,
        parts,
        x_desc=rows_descriptor(x_MK, rows_tile, rows_layout),
        words_desc=TensorDescriptor(words_OW, list(words_OW.shape), words_strides, words_tile, words_layout),
        num_warps=warps_n * warps_k,
    )


@gluon.constexpr_function
def _words_layout(warps_n, warps_k, outputs, words):
    """Return the layout of a tile's words: four words of a unit a thread, of two outputs eight apart."""
    registers = [[0, 1], [0, 2], [8, 0], *([one, 0] for one in powers(16 * warps_n, outputs))]
    registers += [[0, one] for one in powers(16 * warps_k, words)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[one, 0] for one in powers(16, 16 * warps_n)] + [[0, one] for one in powers(16, 16 * warps_k)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, words])


@gluon.constexpr_function
def _rows_layout(warps_n, warps_k, rows, columns):
    """Return the layout of a tile's rows: 32 columns of a unit of one row a thread."""
    registers = [[0, one] for one in powers(1, 32)] + [[one, 0] for one in powers(8, rows)]
    registers += [[0, one] for one in powers(128 * warps_k, columns)]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0] for _ in powers(16, 16 * warps_n)] + [[0, one] for one in powers(128, 128 * warps_k)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def _left(words, magic, UNITS: gl.constexpr, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Return the weights of a tile's words plus the bias, as a left operand [halves of units, n, k].

    A product of the tensor cores takes the same pair of two neighbouring words, whose columns are neighbours in the
    rows as well: registers in order.
    """
    EIGHTS: gl.constexpr = words.shape[0] // 8
    words = words.reshape((EIGHTS, 8, UNITS, 16)).permute((1, 2, 0, 3))
    # Halves of a thread's words, words of a half; halves of a word, its pairs in twos.
    values = unpacked(words, magic, 4, KIND).reshape((8, UNITS, EIGHTS, 4, 2, 2, 2, 2, 2))
    values = values.permute((4, 1, 2, 0, 7, 5, 3, 8, 6)).reshape((2 * UNITS, 8 * EIGHTS, UNIT // 2))
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def _right(x, UNITS: gl.constexpr, OPERAND: gl.constexpr):
    """Return a tile's rows as a right operand [halves of units, k, m], in the order of `_left`."""
    EIGHTS: gl.constexpr = x.shape[0] // 8
    values = x.reshape((EIGHTS, 8, UNITS, 4, 2, 2, 2, 2, 2)).permute((6, 2, 4, 7, 3, 5, 8, 0, 1))
    return gl.convert_layout(values.reshape((2 * UNITS, UNIT // 2, 8 * EIGHTS)), OPERAND, assert_trivial=True)


@gluon.jit
def _multiply(left, right, LAYOUT: gl.constexpr):
    """Return left @ right, [units, n, m]. Both halves of a unit have sums of their own: shorter chains of products."""
    UNITS: gl.constexpr = left.shape[0] // 2
    N: gl.constexpr = left.shape[1]
    M: gl.constexpr = right.shape[2]
    both = mma_v2(left, right, gl.zeros([2 * UNITS, N, M], gl.float32, LAYOUT))
    one, other = gl.split(both.reshape((2, UNITS, N, M)).permute((1, 2, 3, 0)))
    return gl.convert_layout(one + other, LAYOUT, assert_trivial=True)


@gluon.jit
def _kept(values, turn, HALF: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a step's scales or zeros of the gates or of the ups, [units, n, 1], or one for all units."""
    found = values.index(turn).slice(HALF * BLOCK_N, BLOCK_N, 1)
    return found.load(gl.SliceLayout(2, LAYOUT)).to(gl.float32)[:, :, None]


@gluon.jit
def _scaled(part, column_sums, scales, zeros, turn, HALF: gl.constexpr, BIAS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a part without the bias of its weights, times the scales of its groups."""
    BLOCK_N: gl.constexpr = part.shape[1]
    if zeros is not None:
        part -= (_kept(zeros, turn, HALF, BLOCK_N, LAYOUT) + BIAS) * column_sums
    else:
        part -= (BIAS + 8) * column_sums
    return part * _kept(scales, turn, HALF, BLOCK_N, LAYOUT)


@gluon.jit(do_not_specialize=["M", "magic"])
def _gemm_ring_small_m_kernel(
    x_desc,
    words_desc,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    M,
    magic,
    output_stride,
    group_stride,
    out_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    MODE: gl.constexpr,
    WARPS_N: gl.constexpr,
    WARPS_K: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        let_next_kernel_start()
    BLOCK_N: gl.constexpr = words_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    UNITS: gl.constexpr = BLOCK_K // UNIT
    PAIR: gl.constexpr = 2 if MODE >= 2 else 1
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BYTES: gl.constexpr = PAIR * words_desc.block_type.nbytes + x_desc.block_type.nbytes
    KIND: gl.constexpr = x_desc.dtype
    BIAS: gl.constexpr = BIAS_OF_BFLOAT16 if gl.bfloat16 == KIND else BIAS_OF_FLOAT16
    WARPS: gl.constexpr = WARPS_N * WARPS_K
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS_K, WARPS_N, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=LAYOUT, k_width=4)
    # Sixteen bytes of an output row a thread.
    LANES: gl.constexpr = BLOCK_N // 8
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    ring = gl.allocate_shared_memory(gl.int32, [PAIR * STAGES, BLOCK_N, 16 * UNITS], words_desc.layout)
    rows = gl.allocate_shared_memory(KIND, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    full = make_barriers(STAGES, 1)
    fence_async_shared()
    gl.thread_barrier()

    tile = gl.program_id(0)
    split = gl.program_id(1)
    first = tile * BLOCK_N
    begin = split * STEPS // SPLITS
    end = (split + 1) * STEPS // SPLITS
    # Constants of the model, requested before the wait.
    for place in gl.static_range(STAGES):
        ask_for_weights(ring, place, words_desc, full, BYTES, first, begin + place, end, N, PAIR)
    first_group = begin * BLOCK_K // GROUP
    at = first, first_group, output_stride, group_stride
    SIZES: gl.constexpr = GroupSizes(N, K, PAIR, BLOCK_N, BLOCK_K, SPLITS, GROUP, WARPS)
    scales = keep(scales_ptr, *at, SIZES)
    zeros = keep(zeros_ptr, *at, SIZES) if zeros_ptr is not None else None
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    bias = constant(bias_ptr, n, N)[:, None] if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N, n, N)[:, None] if bias_ptr is not None and MODE >= 2 else None
    if PDL:
        wait_for_kernel_before()
    for place in gl.static_range(STAGES):
        ask_for_rows(rows, place, x_desc, full, 0, begin + place, end)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    mask = (n < N)[:, None] & (m < M)[None, :]
    out_ptrs = out_ptr + m.to(gl.int64)[None, :] * out_stride + n[:, None]
    # Loaded early, used at the end.
    residual = gl.load(out_ptrs, mask=mask, other=0.0) if MODE == 1 else None

    sums = gl.zeros([UNITS, BLOCK_N, ROWS], gl.float32, LAYOUT)
    ups = gl.zeros([UNITS, BLOCK_N, ROWS], gl.float32, LAYOUT)
    ones = gl.full([2 * UNITS, 16 * WARPS_N, UNIT // 2], 1.0, KIND, LEFT)
    place, turn = 0, 0
    for step in range(begin, end):
        mbarrier.wait(full.index(place), turn)
        x = rows.index(place).load(_rows_layout(WARPS_N, WARPS_K, ROWS, BLOCK_K))
        words = ring.index(PAIR * place).load(_words_layout(WARPS_N, WARPS_K, BLOCK_N, 16 * UNITS))
        if MODE >= 2:
            up_words = ring.index(PAIR * place + 1).load(_words_layout(WARPS_N, WARPS_K, BLOCK_N, 16 * UNITS))
        # All warps have read this place.
        gl.thread_barrier()
        ask_for_weights(ring, place, words_desc, full, BYTES, first, step + STAGES, end, N, PAIR)
        ask_for_rows(rows, place, x_desc, full, 0, step + STAGES, end)
        place, turn = next_stage(place, turn, STAGES)
        right = _right(x, UNITS, RIGHT)
        # The same for each sixteen outputs of a warp.
        column_sums = _multiply(ones, right, LAYOUT).reshape((UNITS, 1, 16 * WARPS_N, ROWS))
        column_sums = column_sums.broadcast_to((UNITS, BLOCK_N // (16 * WARPS_N), 16 * WARPS_N, ROWS))
        column_sums = gl.convert_layout(column_sums.reshape((UNITS, BLOCK_N, ROWS)), LAYOUT, assert_trivial=True)
        kept = step - begin if GROUP == UNIT else step * BLOCK_K // GROUP - first_group
        part = _multiply(_left(words, magic, UNITS, KIND, LEFT), right, LAYOUT)
        sums += _scaled(part, column_sums, scales, zeros, kept, 0, BIAS, LAYOUT)
        if MODE >= 2:
            part = _multiply(_left(up_words, magic, UNITS, KIND, LEFT), right, LAYOUT)
            ups += _scaled(part, column_sums, scales, zeros, kept, 1, BIAS, LAYOUT)

    result = gl.convert_layout(gl.sum(sums, 0), OUT)
    up = gl.convert_layout(gl.sum(ups, 0), OUT) if MODE >= 2 else None
    if SPLITS > 1:
        SIZE: gl.constexpr = BLOCK_N * ROWS
        within_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
        within = within_n[:, None] + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))[None, :] * BLOCK_N
        base = partial_ptr + tile * (SPLITS * SIZE) + within
        if leave_part(base, result, split, SIZE, arrived_ptr, tile) < SPLITS - 1:
            return
        result = add_parts(base, gl.zeros([BLOCK_N, ROWS], gl.float32, OUT), SIZE, SPLITS, arrived_ptr, tile)
    rounded = finished(result, up, bias, up_bias, residual, MODE).to(out_ptr.dtype.element_ty)
    gl.store(out_ptrs, rounded, mask=mask)
