"""Products of one row with weights of 4 bits on Hopper, by the tensor cores' products of integers.

Shapes: N outputs in tiles of BLOCK_N, K inputs in steps of UNITS units of 128 columns, SPLITS programs a tile; BOTH_N
outputs of a program, gates and then ups.

Algorithm: products of integers with a scale for each vector, after LLM.int8() (Dettmers et al., 2022), here with two
bytes for each number of the row, on the ring of `gemm_ring`.
1. With one row, `gemm_ring_small_m` waits for its instructions more than for memory: seven for the eight weights of a
   word, one product of the tensor cores. Here weights become bytes by three, and a product takes two words.
2. The row becomes integers of 16 bits, which are two bytes each (`integer_operands`). Each program makes the integers
   of its columns itself, when its predecessor has ended.
3. Words come through a ring in shared memory, gates and ups by one request.
4. Outputs and columns are dealt to WARPS_N x WARPS_K warps. Split inputs are added by the program that arrives last.

    K ->       unit 0: scale, 128 integers    unit 1 ...
    x          [ high bytes | low bytes ]     two columns of the right operand
    W [N, K]   [ 16 (weight - 8), bytes ]     high * 256 + low, exact, times both scales, summed in float32

More rows would each take as much shared memory again, which programs of the next kernel would not find. With two, the
kernel is slower than `gemm_ring_small_m`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phonograph.kernels.triton.gemm.hopper.gemm_ring_parts import (
    UNIT,
    GroupSizes,
    add_parts,
    constant,
    finished,
    keep,
    leave_part,
    takes,
)
from phonograph.kernels.triton.gemm.hopper.integer_operands import (
    PIECES,
    left,
    multiply,
    put_row,
    right,
    sums_layout,
    words_layout,
)
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import SILU, Parts, Product
from phonograph.kernels.triton.gemm.product_plan import GemvIntegerConfig
from phonograph.kernels.triton.launch.gluon import (
    let_next_kernel_start,
    make_barriers,
    next_stage,
    wait_for_kernel_before,
)


def launch(product: Product, config: GemvIntegerConfig, parts: Parts | None) -> None:
    """Compute a product of one row, which begins at a multiple of 16 bytes.

    Args:
        product: with interleaved weights of 4 bits.
        config: the tiles.
        parts: scratch, needed if inputs are split.
    """
    x_1K, out_1N, words_OW = product.rows, product.out_MN, product.matrix
    block_n, units, _, _, warps_n, warps_k = config
    assert len(x_1K) == 1 and x_1K.dtype == out_1N.dtype and takes(product.weight, units)
    assert units % warps_k == 0 and block_n % (16 * warps_n) == 0
    pair, num_outputs, stride = 1 + (product.mode >= SILU), out_1N.shape[1], words_OW.stride(0)
    tile, shape = [pair, block_n, 16 * units], [pair, num_outputs, words_OW.shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.int32)
    launch_product(
        _gemv_integer_kernel,
        product,
        config,
        parts,
        x_ptr=x_1K.view(torch.int32),  # pairs of columns
        words_desc=TensorDescriptor(words_OW, shape, [num_outputs * stride, stride, 1], tile, layout),
        num_warps=warps_n * warps_k,
    )


@gluon.jit
def _ask_for_words(ring, place, desc, full, first, step, end):
    """Load a step's words into a place in the ring, if the step exists."""
    there = step < end
    mbarrier.expect(full.index(place), desc.block_type.nbytes, pred=there)
    column = step * desc.block_type.shape[2]
    tma.async_copy_global_to_shared(desc, [0, first, column], full.index(place), ring.index(place), pred=there)


@gluon.jit
def _of_outputs(values, turn, SUMS: gl.constexpr):
    """Return a step's scales or zeros of weights, [units, n, 1], or one for all units."""
    return values.index(turn).load(gl.SliceLayout(2, SUMS)).to(gl.float32)[:, :, None]


@gluon.jit
def _of_row(values, turn, SUMS: gl.constexpr):
    """Return a step's scales or sums of the row, [units, 1, 1]."""
    return values.index(turn).load(gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None][:, :, None]


@gluon.jit
def _gemv_integer_kernel(
    x_ptr,
    words_desc,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    output_stride,
    group_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    MODE: gl.constexpr,
    UNITS: gl.constexpr,
    WARPS_N: gl.constexpr,
    WARPS_K: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        let_next_kernel_start()
    PAIR: gl.constexpr = words_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = words_desc.block_type.shape[1]
    # Outputs of a program: gates, and then ups.
    BOTH_N: gl.constexpr = PAIR * BLOCK_N
    BLOCK_K: gl.constexpr = UNITS * UNIT
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WARPS: gl.constexpr = WARPS_N * WARPS_K
    # The row's type as well.
    KIND: gl.constexpr = out_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS_K, WARPS_N, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=LAYOUT, k_width=4)
    WORDS: gl.constexpr = words_layout(WARPS_N, WARPS_K, BOTH_N, 16 * UNITS)
    SUMS: gl.constexpr = sums_layout(WARPS_N, WARPS_K, UNITS, BOTH_N)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOTH_N, 16 * UNITS], gl.int32)
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, PAIR, BLOCK_N, 16 * UNITS], words_desc.layout)
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
        _ask_for_words(ring, place, words_desc, full, first, begin + place, end)
    first_group = begin * BLOCK_K // GROUP
    at = first, first_group, output_stride, group_stride
    SIZES: gl.constexpr = GroupSizes(N, K, PAIR, BLOCK_N, BLOCK_K, SPLITS, GROUP, WARPS)
    scales = keep(scales_ptr, *at, SIZES)
    zeros = keep(zeros_ptr, *at, SIZES) if zeros_ptr is not None else None
    n = first + gl.arange(0, BLOCK_N, layout=OUT)
    mask = n < N
    bias = constant(bias_ptr, n, N) if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N, n, N) if bias_ptr is not None and MODE >= 2 else None
    # Steps of a program, as a power of two; the pieces of two steps lie one after another.
    ROW_TURNS: gl.constexpr = max(2, triton.next_power_of_2((STEPS + SPLITS - 1) // SPLITS))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PIECE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Reads after the last piece must hit memory of the program.
    pieces = gl.allocate_shared_memory(gl.int8, [2 * ROW_TURNS * UNITS + PIECES, 2, 64], PIECE)
    row_scales = gl.allocate_shared_memory(gl.float32, [ROW_TURNS, UNITS], FLAT)
    row_sums = None
    if zeros_ptr is not None:
        row_sums = gl.allocate_shared_memory(gl.float32, [ROW_TURNS, UNITS], FLAT)
    if PDL:
        wait_for_kernel_before()
    # Loaded early, used at the end.
    residual = gl.load(out_ptr + n, mask=mask, other=0.0) if MODE == 1 else None
    pairs_end = gl.minimum(end * BLOCK_K, K) // 2
    put_row(pieces, row_scales, row_sums, x_ptr, begin * (BLOCK_K // 2), pairs_end, WARPS, KIND)

    sums = gl.zeros([UNITS, BOTH_N, 4], gl.float32, SUMS)
    place, phase = 0, 0
    for step in range(begin, end):
        turn = step - begin
        mbarrier.wait(full.index(place), phase)
        words = ring.index(place)._reinterpret(gl.int32, [BOTH_N, 16 * UNITS], TILE).load(gl.SliceLayout(2, WORDS))
        # All warps have read this place.
        gl.thread_barrier()
        _ask_for_words(ring, place, words_desc, full, first, step + STAGES, end)
        place, phase = next_stage(place, phase, STAGES)
        row = right(pieces, turn, UNITS, WARPS_N, WARPS_K, RIGHT)
        part = multiply(left(words, UNITS, LEFT), row, SUMS, LAYOUT)
        kept = turn if GROUP == UNIT else step * BLOCK_K // GROUP - first_group
        if zeros_ptr is not None:
            part -= (_of_outputs(zeros, kept, SUMS) - 8) * _of_row(row_sums, turn, SUMS)
        sums += part * (_of_outputs(scales, kept, SUMS) * _of_row(row_scales, turn, SUMS))

    SUM: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUMS))
    total = gl.sum(sums, 0)
    result = gl.sum(gl.where(gl.arange(0, 4, layout=SUM)[None, :] == 0, total, 0.0), 1)
    up = None
    if MODE >= 2:
        result, up = gl.split(result.reshape((2, BLOCK_N)).permute((1, 0)))
        up = gl.convert_layout(up, OUT)
    result = gl.convert_layout(result, OUT)
    if SPLITS > 1:
        base = partial_ptr + tile * (SPLITS * BLOCK_N) + gl.arange(0, BLOCK_N, layout=OUT)
        if leave_part(base, result, split, BLOCK_N, arrived_ptr, tile) < SPLITS - 1:
            return
        result = add_parts(base, gl.zeros([BLOCK_N], gl.float32, OUT), BLOCK_N, SPLITS, arrived_ptr, tile)

    gl.store(out_ptr + n, finished(result, up, bias, up_bias, residual, MODE).to(KIND), mask=mask)
