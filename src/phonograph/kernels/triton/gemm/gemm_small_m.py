"""Matrix products of up to 32 rows, with weights in registers.

Shapes: M rows, padded to ROWS; N outputs, K inputs; a program has BLOCK_N outputs and takes BLOCK_K inputs a step.

Algorithm: split-K inside one program (slice-K of NVIDIA's CUTLASS), by `mma.m16n8k16`.
1. As in `gemv`, a program loads its first AHEAD steps of weights into registers before it waits for its input.
2. The steps' columns are dealt to the warps; each warp computes its own product, and `add_warps` adds them at the end.
   Programs have nothing to add.
3. A thread reads 16 bytes of a row, which are eight neighbouring columns, where the tensor cores want pairs of columns
   that lie eight apart. A sum over columns does not depend on their order, so the thread passes the eight columns that
   it read, of rows and weights alike, and threads exchange nothing.
4. Weights take the side of 16 of the tensor cores' tile, rows the side of 8; with BLOCK_N 8 the reverse.

    K ->          warp 0  warp 1  ...  warp 7 | warp 0  warp 1 ...
    8 weight rows [32 cols][32 cols]  [32    ] [        next step ]   a warp's 32 columns: 4 threads x 8
    8 rows of x   [the same columns          ] [                  ]
    sums            s0   +   s1   +   +  s7      -> outputs [ROWS, BLOCK_N]

Loads in flight have their place in the L1 cache, and so have the rows, which all programs of a multiprocessor read. So
large layers prefer L1 cache to shared memory (`prefer_l1`). A multiprocessor changes the division only when it is
empty. After a kernel that needs much shared memory and leaves registers for this one's programs, the division stays,
and this kernel takes twice the time. So either all large layers of a step run here, or none.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.gemm.gemm_epilogue import (
    add_warps,
    constant,
    finished,
    norm_factor,
    read_squares,
    store_normed,
)
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import Product
from phonograph.kernels.triton.gemm.product_plan import LARGE, GemmSmallMConfig
from phonograph.kernels.triton.launch.l1_carveout import prefer_l1

_REGISTERS = 65536
"""Registers of a multiprocessor."""


def launch(product: Product, config: GemmSmallMConfig) -> None:
    """Compute a product of at most `config.rows` rows."""
    rows, block_n, block_k, _, _, num_warps, sums, programs, _ = config
    assert len(product.rows) <= rows and block_n % 8 == 0 and block_k % (32 * num_warps * sums) == 0
    registers = {"maxnreg": min(255, _REGISTERS // (32 * num_warps * programs) // 8 * 8)} if programs else {}
    kernel = _large_gemm_small_m if product.matrix.numel() >= LARGE else _gemm_small_m_kernel
    launch_product(kernel, product, config, BATCH=sums * num_warps, **registers)


@triton.jit
def _read(
    row_ptrs,
    valid_rows,
    step: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BATCH: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Load a step's columns of the rows [8, r], as [8, block_k / 32, r, 32].

    Four threads read 64 bytes of a row, and eight rows go to a warp, by the order of the dimensions.
    """
    group = tl.arange(0, BLOCK_K // 32)
    if TOGETHER:
        group = group % BATCH * (BLOCK_K // 32 // BATCH) + group // BATCH
    column = step * BLOCK_K + group[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = valid_rows[:, None, :, None]
    if (step + 1) * BLOCK_K > K:
        mask = mask & (column < K)[None, :, None, :]
    pointers = row_ptrs[:, None, :, None] + column[None, :, None, :]
    return tl.load(pointers, mask, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _deal(tile, BATCH: tl.constexpr, WIDTH: tl.constexpr):
    """Rearrange a tile of `_read` as [batch, 8 r, k].

    Each thread has eight neighbours of 32 columns; they become its groups of `WIDTH` in the tensor cores' operand.
    """
    steps: tl.constexpr = tile.shape[1] // BATCH
    r: tl.constexpr = tile.shape[2]
    tile = tl.reshape(tile, (8, steps, BATCH, r, 4, 8 // WIDTH, WIDTH))
    return tl.reshape(tl.permute(tile, (2, 3, 0, 1, 5, 4, 6)), (BATCH, 8 * r, steps * 32))


@triton.jit
def _add_products(sums, weight, x, BATCH: tl.constexpr):
    """Return sums + weight x^T, [batch, weight rows, rows].

    With eight rows of weights, return sums + x weight^T, [batch, 16 or more rows, 8].
    """
    if weight.shape[2] > 1:
        left = _deal(weight, BATCH, 2)
        right = _deal(x, BATCH, 2)
    elif x.shape[2] > 1:
        left = _deal(x, BATCH, 2)
        right = _deal(weight, BATCH, 2)
    else:
        left = _deal(x, BATCH, 4)
        left = tl.permute(tl.join(left, tl.zeros_like(left)), (0, 3, 1, 2))
        left = tl.reshape(left, (BATCH, 16, left.shape[3]))
        right = _deal(weight, BATCH, 4)
    return tl.dot(left, tl.permute(right, (0, 2, 1)), sums, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def _gemm_small_m_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    squares_ptr,
    norm_ptr,
    normed_ptr,
    new_squares_ptr,
    M,
    eps,
    x_stride,
    weight_stride,
    out_stride,
    normed_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS_AHEAD: tl.constexpr,
    BATCH: tl.constexpr,
    TOGETHER: tl.constexpr,
    SQUARE_TILES: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # Rows of weights, in groups of eight; with a gated activation the ups follow the gates.
    eights: tl.constexpr = BLOCK_N // 8
    tiles: tl.constexpr = 2 * eights if MODE >= 2 else eights
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    valid_n = n < N
    mask = (m < M)[:, None] & valid_n[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    eight = tl.arange(0, 8)[:, None]
    tile = tl.arange(0, tiles)[None, :]
    weight_row = first + eight + tile % eights * 8
    valid_weight = weight_row < N
    weight_ptrs = weight_ptr + (weight_row + tile // eights * N).to(tl.int64) * weight_stride
    x_row = eight + 8 * tl.arange(0, ROWS // 8)[None, :]
    x_ptrs = x_ptr + x_row.to(tl.int64) * x_stride

    # Constants of the model, requested before the wait. They leave the L1 cache to the rows.
    weights = ()
    for step in tl.static_range(min(AHEAD, steps)):
        weights += (_read(weight_ptrs, valid_weight, step, K, BLOCK_K, BATCH, TOGETHER, "evict_first"),)
    bias = constant(bias_ptr, n, valid_n) if bias_ptr is not None else None
    up_bias = constant(bias_ptr + N, n, valid_n) if bias_ptr is not None and MODE >= 2 else None
    norm = constant(norm_ptr, n, valid_n) if norm_ptr is not None else None
    if PDL:
        tl_cuda.gdc_wait()

    xs = ()
    for step in tl.static_range(min(ROWS_AHEAD, steps)):
        xs += (_read(x_ptrs, x_row < M, step, K, BLOCK_K, BATCH, TOGETHER, ""),)
    if SQUARE_TILES > 0:
        squares = read_squares(squares_ptr, m, ROWS, SQUARE_TILES)
    factor = None
    up = None
    # Loaded early, used at the end.
    residual = tl.load(out_ptrs, mask, other=0.0) if MODE == 1 else None
    sums = tl.zeros((BATCH, 8 * tiles, ROWS) if tiles > 1 else (BATCH, max(ROWS, 16), 8), tl.float32)
    for step in tl.static_range(steps):
        if PDL and (step == 0 or step + min(AHEAD, ROWS_AHEAD) <= steps):
            # Done before, but the assembler moves no load past it. Otherwise it would save registers, load a few values
            # at a time, and wait for memory each time.
            tl_cuda.gdc_launch_dependents()
        if SQUARE_TILES > 0 and step == 0:
            # While the input is in flight.
            factor = norm_factor(squares, eps, K, num_warps)
        sums = _add_products(sums, weights[step], xs[step], BATCH)
        if step + AHEAD < steps:
            weights += (_read(weight_ptrs, valid_weight, step + AHEAD, K, BLOCK_K, BATCH, TOGETHER, "evict_first"),)
        if step + ROWS_AHEAD < steps:
            xs += (_read(x_ptrs, x_row < M, step + ROWS_AHEAD, K, BLOCK_K, BATCH, TOGETHER, ""),)

    if tiles == 1 and ROWS == 8:
        sums, _ = tl.split(tl.permute(tl.reshape(sums, (BATCH, 2, 8, 8)), (0, 2, 3, 1)))
    total = add_warps(sums, BATCH, num_warps)
    if tiles == 1:
        result = tl.reshape(total, (ROWS, 8))
    elif MODE >= 2:
        result, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_N, ROWS)), (2, 1, 0)))
    else:
        result = tl.trans(tl.reshape(total, (BLOCK_N, ROWS)))
    rounded = finished(result, up, factor, bias, up_bias, residual, MODE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, rounded, mask)
    if norm_ptr is not None:
        squares_ptr = new_squares_ptr + first // BLOCK_N * ROWS
        store_normed(rounded, norm, normed_ptr, normed_stride, squares_ptr, m, n, mask, 1)


_large_gemm_small_m = prefer_l1(triton.jit(do_not_specialize=["M"])(_gemm_small_m_kernel.fn), carveout=7)
"""The same kernel, for layers of `LARGE` weights and more."""
