"""What kernels of matrix products share: weights asked for ahead of time, and what becomes of a tile's sums, and
how many programs are on the device at once."""

# pyright: basic
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


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
def finish_tile(sums, up_sums, bias_ptr, out_ptr, out_stride, first, n, m, M, N: tl.constexpr, MODE: tl.constexpr):
    """Writes the outputs `first` + n of rows m, and returns them with the mask of those that there are.

    MODE 0: the sums; 1: added to what is there; 2: silu(sums) * up_sums. The ups' bias lies behind the gates'.
    """
    valid_n = n < N - first
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + first + n, valid_n, other=0.0).to(tl.float32)[:, None]
        if MODE == 2:
            up_sums += tl.load(bias_ptr + N + first + n, valid_n, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * out_stride + (first + n)[:, None]
    mask = valid_n[:, None] & (m < M)[None, :]
    if MODE == 1:
        sums += tl.load(out_ptrs, mask, other=0.0).to(tl.float32)
    elif MODE == 2:
        sums = sums * tl.sigmoid(sums) * up_sums
    result = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, result, mask)
    return result, mask


@functools.cache
def num_processors(device: torch.device, *, without_gpu: int) -> int:
    """Programs that are on the device at once, one a multiprocessor; without a GPU as many as the caller says."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else without_gpu
