"""Matrix products for one row, which is what a decode step of one sequence consists of.

Such a product reads each weight once and does next to nothing with it, so it is as fast as memory, if memory never
idles. It idles between kernels: the last programs drain while the next kernel waits for their results. Here the weights
do not depend on results, so each program loads its first weights before it waits for the kernel before (programmatic
dependent launch), and asks the L2 cache for those that come next. What a decoder does around its products (norm, gated
activation, residual add) happens inside them, which leaves few kernels to drain between.

Two to four rows may go through the same kernel, which then reads the weights once for all of them.

Shapes: M rows (1 to 4), N outputs, K inputs, E hidden size, I intermediate size. Weights lie [outputs, inputs], rows
contiguous. Everything is multiplied and summed in float32.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from phonograph.kernels.triton.pdl import pdl_usable

MAX_ROWS = 4
"""Rows that these products take."""


class GemvConfig(NamedTuple):
    """block_n weight rows a program, block_k columns a step; prefetch: columns after the first step that a program asks
    the L2 cache for before it waits for its input."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int


def gemv(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    config: GemvConfig | None = None,
) -> None:
    """out = x @ weight^T + bias for 1 to MAX_ROWS rows."""
    _launch(x_MK, None, 0.0, weight_NK, bias_N, out_MN, _STORE, config)


def gemv_norm(
    hidden_ME: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    config: GemvConfig | None = None,
) -> None:
    """out = rms_norm(hidden) @ weight^T + bias, the norm over the last dimension with weights and `eps`.

    The root mean square is a factor of the whole row, so it is applied to the sums: W(xg)/rms. Each program sums the
    squares for itself while it streams.
    """
    _launch(hidden_ME, norm_weight_E, eps, weight_NE, bias_N, out_MN, _STORE, config)


def gemv_add(
    x_MK: torch.Tensor,
    weight_EK: torch.Tensor,
    bias_E: torch.Tensor | None,
    hidden_ME: torch.Tensor,
    *,
    config: GemvConfig | None = None,
) -> None:
    """hidden += x @ weight^T + bias, in place. `x` must not overlap `hidden`."""
    _launch(x_MK, None, 0.0, weight_EK, bias_E, hidden_ME, _ADD, config)


def gemv_norm_silu(
    hidden_ME: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    gate_up_2IE: torch.Tensor,
    bias_2I: torch.Tensor | None,
    out_MI: torch.Tensor,
    *,
    config: GemvConfig | None = None,
) -> None:
    """out = silu(gate) * up with (gate, up) = rms_norm(hidden) @ gate_up^T + bias; the rows of the gates come first."""
    _launch(hidden_ME, norm_weight_E, eps, gate_up_2IE, bias_2I, out_MI, _SILU, config)


_STORE, _ADD, _SILU = 0, 1, 2


def rows_aligned(weight_NK: torch.Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes, as bulk copies and prefetches need it."""
    return weight_NK.stride(0) * weight_NK.element_size() % 16 == 0 and weight_NK.data_ptr() % 16 == 0


@functools.cache
def default_config(num_inputs: int, pairs: bool) -> GemvConfig:
    """What a product of K inputs runs with. pairs: for the gated activation, where each output has two weight rows.

    A step is as wide as divides the row, so that no lanes idle: a row of 3072 goes in steps of 1024.
    """
    block_k = 2048
    while block_k > 512 and num_inputs % block_k:
        block_k //= 2
    block_k = min(block_k, max(32, triton.next_power_of_2(num_inputs)))
    block_n, num_warps = 2 if pairs else 4, 4 if block_k >= 512 else 2
    return GemvConfig(block_n=block_n, block_k=block_k, num_warps=num_warps, prefetch=2048)


def _launch(
    x_MK: torch.Tensor,
    norm_K: torch.Tensor | None,
    eps: float,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    mode: int,
    config: GemvConfig | None,
) -> None:
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    assert num_rows <= MAX_ROWS and weight_NK.shape[1] == num_inputs
    assert x_MK.stride(1) == weight_NK.stride(1) == out_MN.stride(1) == 1
    pdl = pdl_usable()
    block_n, block_k, num_warps, prefetch = config or default_config(num_inputs, mode == _SILU)
    _gemv_kernel[(triton.cdiv(num_outputs, block_n),)](
        x_MK,
        norm_K,
        weight_NK,
        bias_N,
        out_MN,
        eps,
        x_MK.stride(0),
        weight_NK.stride(0),
        out_MN.stride(0),
        N=num_outputs,
        K=num_inputs,
        ROWS=num_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PREFETCH=prefetch if rows_aligned(weight_NK) else 0,
        MODE=mode,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
    )


@triton.jit
def prefetch_rows(pointer, stride_bytes, count, num_bytes):
    """Asks the L2 cache for `num_bytes` (a multiple of 16) of each of `count` rows, and goes on.

    One thread asks for a row. The hardware takes such requests one lane after another, so they are dealt to the warps.
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
def _products(weight, x):
    """Products of weights [n, k] and x [k], summed over groups of eight columns, which one thread holds: [n, k/8]."""
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
    x_stride,
    weight_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid_n = n < N
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    up_ptrs = weight_ptrs + weight_stride.to(tl.int64) * N

    # Constants of the model: loaded before the wait, and one step ahead in the loop.
    mask = valid_n[:, None] & (k < K)[None, :]
    weight = tl.load(weight_ptrs, mask, other=0.0)
    up = tl.load(up_ptrs, mask, other=0.0) if MODE == 2 else weight
    if PDL:
        ahead: tl.constexpr = min(PREFETCH, K - BLOCK_K)
        element_bytes: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        if ahead > 0 and ahead * element_bytes % 16 == 0:
            start = weight_ptr + first.to(tl.int64) * weight_stride + BLOCK_K
            count = tl.minimum(BLOCK_N, N - first)
            prefetch_rows(start, weight_stride * element_bytes, count, ahead * element_bytes)
            if MODE == 2:
                prefetch_rows(
                    start + weight_stride.to(tl.int64) * N, weight_stride * element_bytes, count, ahead * element_bytes
                )
        tl_cuda.gdc_wait()

    zero = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    sums = (zero,) * ROWS
    up_sums = (zero,) * ROWS
    squares = (tl.zeros((BLOCK_K // 8,), tl.float32),) * ROWS
    for step in range(0, K, BLOCK_K):
        columns = step + k
        valid_k = columns < K
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + columns, valid_k, other=0.0).to(tl.float32)
        ahead_mask = valid_n[:, None] & (columns < K - BLOCK_K)[None, :]
        next_weight = tl.load(weight_ptrs + step + BLOCK_K, ahead_mask, other=0.0)
        next_up = tl.load(up_ptrs + step + BLOCK_K, ahead_mask, other=0.0) if MODE == 2 else next_weight
        new_sums = ()
        new_up_sums = ()
        new_squares = ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * x_stride + columns, valid_k, other=0.0).to(tl.float32)
            square = squares[row]
            if norm_ptr is not None:
                square += tl.sum(tl.reshape(x * x, (BLOCK_K // 8, 8)), 1)
                x *= norm
            new_squares += (square,)
            new_sums += (sums[row] + _products(weight, x),)
            if MODE == 2:
                new_up_sums += (up_sums[row] + _products(up, x),)
            else:
                new_up_sums += (up_sums[row],)
        sums, up_sums, squares = new_sums, new_up_sums, new_squares
        weight, up = next_weight, next_up

    for row in tl.static_range(ROWS):
        result = tl.sum(sums[row], 1)
        up_result = tl.sum(up_sums[row], 1)
        if norm_ptr is not None:
            scale = tl.rsqrt(tl.sum(squares[row], 0) / K + eps)
            result *= scale
            up_result *= scale
        if bias_ptr is not None:
            result += tl.load(bias_ptr + n, valid_n, other=0.0).to(tl.float32)
            if MODE == 2:
                up_result += tl.load(bias_ptr + N + n, valid_n, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + row * out_stride + n
        if MODE == 1:
            result += tl.load(out_ptrs, valid_n, other=0.0).to(tl.float32)
        elif MODE == 2:
            result = result * tl.sigmoid(result) * up_result
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), valid_n)
