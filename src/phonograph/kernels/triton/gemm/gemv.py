"""Matrix products of one row: all products of a decode step of one sequence.

Shapes: N outputs, K inputs; a program has BLOCK_N outputs and takes BLOCK_K inputs a step. Sums are float32.

Algorithm: GEMV with whole rows of weights, started early by programmatic dependent launch (CUDA programming guide).
1. The product is bound by reading weights. Weights do not depend on results, so each program loads its first step
   before it waits for its predecessor, and memory does not idle between kernels.
2. Each thread multiplies eight columns of a weight row and of x, and sums them; one step is loaded ahead.
3. The row's norm is a factor of the sums, W(xg) / rms, and each program sums the squares while it streams.
4. Activation and residual are applied to the sums, so that a step has few kernels to start.

                  K ->   step 0   step 1   step 2
    program 0   N   |  [ 4 rows: loaded, multiplied, summed over K ]  -> 4 outputs
    program 1   |   |  [ 4 rows                                     ]  -> 4 outputs
    x [1, K]           read by every program, from the L2 cache
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.gemm.gemm_epilogue import finished
from phonograph.kernels.triton.gemm.launch_product import launch_product
from phonograph.kernels.triton.gemm.product import Product
from phonograph.kernels.triton.gemm.product_plan import LARGE, GemvConfig
from phonograph.kernels.triton.launch.l1_carveout import prefer_l1


def launch(product: Product, config: GemvConfig) -> None:
    """Compute a product of one row, or of its rms_norm.

    The root mean square is a factor of the whole row, so it is applied to the sums: W(xg)/rms. Each program sums the
    squares for itself while it streams. `x` must not overlap `out`.
    """
    assert len(product.rows) == 1
    launch_product(_large_gemv if product.matrix.numel() >= LARGE else _gemv_kernel, product, config)


@triton.jit
def products(weight, x):
    """Return products of weights [n, k] and x [k], summed over groups of eight columns of a thread: [n, k/8]."""
    product = weight.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(product, (product.shape[0], product.shape[1] // 8, 8)), 2)


@triton.jit
def _gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_n = n < N
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    up_ptrs = weight_ptrs + weight_stride.to(tl.int64) * N

    # Constants of the model, loaded before the wait, and one step ahead in the loop.
    mask = valid_n[:, None] & (k < K)[None, :]
    weight = tl.load(weight_ptrs, mask, other=0.0)
    up = tl.load(up_ptrs, mask, other=0.0) if MODE >= 2 else weight
    if PDL:
        tl_cuda.gdc_wait()

    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    squares = tl.zeros((BLOCK_K // 8,), tl.float32)
    for step in range(0, K, BLOCK_K):
        columns = step + k
        valid_k = columns < K
        x = tl.load(x_ptr + columns, valid_k, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += tl.sum(tl.reshape(x * x, (BLOCK_K // 8, 8)), 1)
            x *= tl.load(norm_ptr + columns, valid_k, other=0.0).to(tl.float32)
        ahead_mask = valid_n[:, None] & (columns < K - BLOCK_K)[None, :]
        next_weight = tl.load(weight_ptrs + step + BLOCK_K, ahead_mask, other=0.0)
        sums += products(weight, x)
        weight = next_weight
        if MODE >= 2:
            next_up = tl.load(up_ptrs + step + BLOCK_K, ahead_mask, other=0.0)
            up_sums += products(up, x)
            up = next_up

    result = tl.sum(sums, 1)
    up_result = tl.sum(up_sums, 1)
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps) if norm_ptr is not None else None
    bias = tl.load(bias_ptr + n, valid_n, other=0.0).to(tl.float32) if bias_ptr is not None else None
    up_bias = (
        tl.load(bias_ptr + N + n, valid_n, other=0.0).to(tl.float32) if bias_ptr is not None and MODE >= 2 else None
    )
    residual = tl.load(out_ptr + n, valid_n, other=0.0) if MODE == 1 else None
    result = finished(result, up_result, factor, bias, up_bias, residual, MODE)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), valid_n)


_large_gemv = prefer_l1(triton.jit(_gemv_kernel.fn), carveout=3)
"""The same kernel, for layers of `LARGE` weights and more."""
