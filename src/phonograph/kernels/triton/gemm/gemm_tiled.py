"""Matrix products of tiles of rows, through Triton's pipeline, on every GPU and for every size.

Shapes: M rows in tiles of ROWS, N outputs in tiles of BLOCK_N, K inputs in steps of BLOCK_K; SPLITS programs a tile.

Algorithm: tiled GEMM of Triton's tutorial on matrix multiplication, transposed, with split-K.
1. The weights are the long side of the tensor cores' tile, the rows the short side: out^T = W x^T.
2. A program prefetches its first weights into the L2 cache before it waits for its input; then Triton's pipeline
   (`num_stages`) keeps several steps in flight. Weights in groups are loaded as words and become numbers of x's type.
3. Narrow layers have fewer tiles than the GPU has multiprocessors, so SPLITS programs share the inputs of a tile. The
   program that arrives last adds the partial sums in a fixed order: results do not depend on timing.

              K ->   split 0     split 1
    N tile 0  |  [ program 0,0 | program 0,1 ]  -> parts in scratch; the last to arrive adds part 0, then part 1
    N tile 1  |  [ program 1,0 | program 1,1 ]
              M: tiles of the same weights are neighbours in the grid, so that the second finds them in the L2 cache
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.gemm.gemm_epilogue import constant, finished, read_squares, store_normed
from phonograph.kernels.triton.gemm.grouped_operands import (
    BIAS_OF_BFLOAT16,
    BIAS_OF_FLOAT16,
    BIAS_OF_INT8,
    numbers,
)
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import Parts, Product
from phonograph.kernels.triton.gemm.product_plan import GemmTiledConfig

TileShape = namedtuple("TileShape", "K BLOCK_K BITS GROUP INTERLEAVED INT8")
"""Constants of a tile: columns of a row and of a tile, `Grouped` bits and group, its order, and its type."""


def takes(weight: Grouped, config: GemmTiledConfig) -> bool:
    """Return True if a step has columns of one group."""
    return weight.scales_OG.shape[1] == 1 or weight.group % config.block_k == 0


def launch(product: Product, config: GemmTiledConfig, parts: Parts | None) -> None:
    """Compute a product; `parts` is needed if inputs are split."""
    matrix, grouped, block = product.matrix, product.grouped, [config.block_n, config.block_k]
    assert grouped is None or takes(grouped, config)
    aligned = rows_aligned(matrix) and grouped is None
    desc = TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block) if aligned else None
    prefetch = config.prefetch if aligned else 0
    launch_product(_gemm_tiled_kernel, product, config, parts, weight_desc=desc, PREFETCH=prefetch)


def rows_aligned(matrix: torch.Tensor) -> bool:
    """Return True if rows begin at multiples of 16 bytes, which bulk copies and prefetches need."""
    return matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


@triton.jit
def _prefetch_rows(pointer, stride_bytes, count, num_bytes):
    """Prefetch `num_bytes` (a multiple of 16) of each of `count` rows into the L2 cache, without waiting.

    One thread requests a row. The hardware takes these requests one lane after another, so warps share them.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred %own;
        .reg .u32 %row, %warp, %warps;
        .reg .u64 %address;
        mov.u32 %warp, %tid.x;
        mov.u32 %warps, %ntid.x;
        and.b32 %row, %warp, 31;
        shr.u32 %warp, %warp, 5;
        shr.u32 %warps, %warps, 5;
        mad.lo.u32 %row, %row, %warps, %warp;
        setp.lt.u32 %own, %row, $3;
        mad.wide.u32 %address, %row, $2, $1;
        @%own cp.async.bulk.prefetch.L2.global [%address], $4;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r",
        [pointer, stride_bytes, count, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def weight_tile(
    desc,
    weight_ptr,
    weight_stride,
    groups,
    first,
    start,
    rows_left,
    n,
    k,
    SHAPE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Load weights [n, k] at rows `first` + n and columns `start` + k, as numbers of KIND.

    Args:
        desc: descriptor of a matrix of numbers, or None for words and for unaligned rows.
        weight_ptr: the matrix, or the words of weights in groups.
        weight_stride: of its rows.
        groups: pointers of scales, zeros and offsets, their strides of outputs and groups, and `MAGIC`.
        first: the first row.
        start: the first column.
        rows_left: rows from `first` on.
        n: rows of the tile.
        k: columns of the tile.
        SHAPE: `TileShape`; bits and inputs of a group are 0 for a matrix of numbers.
        KIND: type of the numbers.
    """
    if SHAPE.BITS > 0:
        row = first + tl.minimum(n, rows_left - 1)
        tile = grouped_tile(weight_ptr, weight_stride, groups, row, start, SHAPE, KIND)
    elif desc is not None:
        tile = desc.load([first, start])
    else:
        pointers = weight_ptr + (first + n).to(tl.int64)[:, None] * weight_stride + (start + k)[None, :]
        mask = (n < rows_left)[:, None]
        if SHAPE.K % SHAPE.BLOCK_K != 0:
            mask = mask & (start + k < SHAPE.K)[None, :]
        tile = tl.load(pointers, mask, other=0.0)
    return tile


@triton.jit
def grouped_tile(words_ptr, word_stride, groups, row, start, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Load weights in groups at rows `row` and the columns of a tile from `start` on; see `weight_tile`."""
    scales_ptr, zeros_ptr, offsets_ptr, output_stride, group_stride, magic = groups
    COUNT: tl.constexpr = 32 // SHAPE.BITS
    word = start // COUNT + tl.arange(0, SHAPE.BLOCK_K // COUNT)[None, :]
    row = row.to(tl.int64)[:, None]
    if SHAPE.BITS == 4 or SHAPE.K % SHAPE.BLOCK_K == 0:
        words = tl.load(words_ptr + row * word_stride + word)
    else:
        words = tl.load(words_ptr + row * word_stride + word, word < (SHAPE.K + COUNT - 1) // COUNT, other=0)
    at = row * output_stride + (start // SHAPE.GROUP).to(tl.int64) * group_stride
    scale = tl.load(scales_ptr + at).to(KIND)
    BIAS_OF_INT4: tl.constexpr = BIAS_OF_BFLOAT16 if tl.bfloat16 == KIND else BIAS_OF_FLOAT16
    BIAS: tl.constexpr = BIAS_OF_INT8 if SHAPE.INT8 else BIAS_OF_INT4
    MIDDLE: tl.constexpr = BIAS + 8 if SHAPE.BITS == 4 else None
    if zeros_ptr is not None:
        zero = (tl.load(zeros_ptr + at).to(tl.float32) + BIAS).to(KIND)
        values = numbers(words, magic, zero, scale, SHAPE.BITS, SHAPE.INTERLEAVED, KIND, SHAPE.INT8)
    else:
        # A constant: a variable would make the numbers float32.
        values = numbers(words, magic, MIDDLE, scale, SHAPE.BITS, SHAPE.INTERLEAVED, KIND, SHAPE.INT8)
    if offsets_ptr is not None:
        values += tl.load(offsets_ptr + at).to(KIND)
    return values


@triton.jit(do_not_specialize=["M", "magic"])
def _gemm_tiled_kernel(
    x_ptr,
    weight_desc,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
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
    x_stride,
    weight_stride,
    output_stride,
    group_stride,
    out_stride,
    normed_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARE_TILES: tl.constexpr,
    PREFETCH: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    # Tiles of the same weights are neighbours, so that the second finds them in the L2 cache.
    row_tiles = tl.cdiv(M, ROWS)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = tile // row_tiles * BLOCK_N
    m = tile % row_tiles * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    begin = split * steps // SPLITS
    end = (split + 1) * steps // SPLITS
    rows_left = N - first

    if PDL:
        element_bytes: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        if PREFETCH > 0 and K * element_bytes % 16 == 0:
            start = weight_ptr + first.to(tl.int64) * weight_stride + begin * BLOCK_K
            count = tl.minimum(BLOCK_N, rows_left)
            num_bytes = tl.minimum(PREFETCH, K - begin * BLOCK_K) * element_bytes
            _prefetch_rows(start, weight_stride * element_bytes, count, num_bytes)
            if MODE >= 2:
                up_start = start + weight_stride.to(tl.int64) * N
                _prefetch_rows(up_start, weight_stride * element_bytes, count, num_bytes)
        tl_cuda.gdc_wait()

    if SQUARE_TILES > 0:
        # Loaded early, used at the end.
        squares = read_squares(squares_ptr, tl.arange(0, ROWS), ROWS, SQUARE_TILES)
    groups = (scales_ptr, zeros_ptr, offsets_ptr, output_stride, group_stride, magic)
    SHAPE: tl.constexpr = TileShape(K, BLOCK_K, BITS, GROUP, INTERLEAVED, INT8)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in range(begin, end):
        start_k = step * BLOCK_K
        x_mask = (m < M)[:, None] if K % BLOCK_K == 0 else (m < M)[:, None] & (start_k + k < K)[None, :]
        x = tl.load(x_ptrs + start_k, x_mask, other=0.0).trans()
        weight = weight_tile(
            weight_desc, weight_ptr, weight_stride, groups, first, start_k, rows_left, n, k, SHAPE, x.dtype
        )
        sums = tl.dot(weight, x, sums)
        if MODE >= 2:
            up = weight_tile(
                weight_desc, weight_ptr, weight_stride, groups, first + N, start_k, rows_left, n, k, SHAPE, x.dtype
            )
            up_sums = tl.dot(up, x, up_sums)

    if SPLITS > 1:
        size: tl.constexpr = BLOCK_N * ROWS
        within = n[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        base = partial_ptr + tile.to(tl.int64) * SPLITS * size + within
        tl.store(base + split * size, sums)
        # All of the program's stores come before its one arrival.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLITS - 1:
            return
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for other in tl.static_range(SPLITS):
            # Bypasses the L1 cache, which may hold older values.
            sums += tl.load(base + other * size, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)

    if SQUARE_TILES > 0:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
        sums *= factor
        up_sums *= factor
    valid_n = n < rows_left
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * out_stride + (first + n)[:, None]
    mask = valid_n[:, None] & (m < M)[None, :]
    bias = constant(bias_ptr + first, n, valid_n, 1) if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N + first, n, valid_n, 1) if bias_ptr is not None and MODE >= 2 else None
    residual = tl.load(out_ptrs, mask, other=0.0) if MODE == 1 else None
    rounded = finished(sums, up_sums, None, bias, up_bias, residual, MODE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, rounded, mask)
    if norm_ptr is not None:
        squares_ptr = new_squares_ptr + first // BLOCK_N * ROWS
        norm = constant(norm_ptr + first, n, valid_n, 1)
        store_normed(rounded, norm, normed_ptr + first, normed_stride, squares_ptr, m, n, mask, 0)
