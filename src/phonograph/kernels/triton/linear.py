"""Matrix products for few rows (2 to about 256), where reading the weights is all that takes time.

The library's kernels are made for square products: at few rows they leave a fifth of the memory bandwidth unused on
narrow layers, and they cannot begin before the kernel before has ended. Here the weights are the long side of the
tensor cores' tile (out^T = W x^T), the rows their short one, padded to a class; each program keeps several tiles of
weights on their way, and asks the L2 cache for its first ones before it waits for its input. Narrow layers have fewer
tiles than the GPU has processors, so the inputs are split over programs as well; the partial sums are added in a fixed
order by the program that arrives last, so that results do not depend on timing.

`linear` decides by `choose` who computes a product: these kernels, those for one row (`gemv`), or torch.

Shapes: M rows, N outputs, K inputs, I intermediate size. Weights lie [outputs, inputs], rows contiguous. Sums are
float32.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from phonograph.kernels.triton import gemv
from phonograph.kernels.triton.gemv import prefetch_rows, rows_aligned
from phonograph.kernels.triton.pdl import pdl_usable

_STORE, _ADD, _SILU = 0, 1, 2
_MAX_TILES = 16384
_MAX_PARTIALS = 1 << 22


class LinearConfig(NamedTuple):
    """block_n weight rows by block_k columns a step, `rows` padded rows, `splits` programs share the inputs of a tile.

    tma: weights come by the copy engine (needs rows that begin at multiples of 16 bytes); prefetch: columns that a
    program asks the L2 cache for before it waits for its input.
    """

    rows: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    tma: bool
    prefetch: int


class LinearScratch(NamedTuple):
    """Where programs that share a tile leave partial sums and count who has arrived. Products that share it must follow
    one another on one stream; counters are zero between them."""

    partials: torch.Tensor
    arrived: torch.Tensor


def make_scratch(device: torch.device) -> LinearScratch:
    """16 MiB for partial sums, zeroed counters."""
    return LinearScratch(
        torch.zeros(_MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
    )


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: LinearConfig | None = None,
) -> None:
    """out = x @ weight^T + bias.

    `scratch` from `make_scratch`: without it the inputs of a tile are not split. `config`: instead of what `choose`
    says, for measurements.
    """
    if config is None and len(x_MK) == 1:
        gemv.gemv(x_MK, weight_NK, bias_N, out_MN)
        return
    config = config or _choose_for(x_MK, out_MN)
    if config is not None:
        _launch(x_MK, weight_NK, bias_N, out_MN, _STORE, config, scratch)
    elif bias_N is None:
        torch.mm(x_MK, weight_NK.t(), out=out_MN)
    else:
        torch.addmm(bias_N, x_MK, weight_NK.t(), out=out_MN)


def linear_add(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: LinearConfig | None = None,
) -> None:
    """hidden += x @ weight^T + bias, in place. `x` must not overlap `hidden`."""
    if config is None and len(x_MK) == 1:
        gemv.gemv_add(x_MK, weight_NK, bias_N, hidden_MN)
        return
    config = config or _choose_for(x_MK, hidden_MN)
    if config is not None:
        _launch(x_MK, weight_NK, bias_N, hidden_MN, _ADD, config, scratch)
    else:
        hidden_MN.addmm_(x_MK, weight_NK.t())
        if bias_N is not None:
            hidden_MN.add_(bias_N)


def linear_silu(
    x_MK: torch.Tensor,
    gate_up_2IK: torch.Tensor,
    bias_2I: torch.Tensor | None,
    out_MI: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: LinearConfig | None = None,
) -> bool:
    """out = silu(gate) * up with (gate, up) = x @ gate_up^T + bias; the rows of the gates come first.

    Returns False, having done nothing, where the product is torch's to compute: then there is no such fusion.
    """
    config = config or _choose_for(x_MK, out_MI, pairs=True)
    if config is None:
        return False
    _launch(x_MK, gate_up_2IK, bias_2I, out_MI, _SILU, config, scratch)
    return True


def _choose_for(x_MK: torch.Tensor, out_MN: torch.Tensor, *, pairs: bool = False) -> LinearConfig | None:
    if x_MK.dtype == torch.float32:
        return None
    num_rows, num_inputs = x_MK.shape
    return choose(rows_class(num_rows), out_MN.shape[1], num_inputs, pairs)


def rows_class(num_rows: int) -> int:
    """What rows are padded to: a power of two from 8."""
    return max(8, 1 << (num_rows - 1).bit_length())


MAX_ROWS = 64
"""Rows up to which the general rule takes these kernels."""

PROGRAMS = 264
"""Programs that keep the memory busy: two for each of an H200's 132 processors."""

MEASURED: dict[tuple[int, int, int, bool], LinearConfig | None] = {}
"""Exceptions from the rule, by (rows class, N, K, pairs), as measured on an H200; None: torch is faster."""


@functools.cache
def choose(rows: int, num_outputs: int, num_inputs: int, pairs: bool = False) -> LinearConfig | None:
    """How a product of at most `rows` (a class) rows is computed; None: by torch.

    pairs: N gates and N ups, for `linear_silu`.

    A tile of 32 weight rows is wide enough for up to 16 rows (the rows are read once for each tile, from the L2 cache),
    and narrow layers then have enough tiles. More rows need wider tiles, so their inputs are split until there are
    enough programs, as long as each keeps eight steps.
    """
    key = rows, num_outputs, num_inputs, pairs
    if key in MEASURED:
        return MEASURED[key]
    if rows > MAX_ROWS:
        return None
    tiles = triton.cdiv(num_outputs, 64) * (2 if pairs else 1)
    if rows <= 16 and tiles < PROGRAMS // 2 and not pairs:
        return LinearConfig(rows, 32, 256, 1, 2, 4, True, 256)
    block_k = 64 if pairs and rows == 64 else 128
    splits = 1
    while tiles * splits < PROGRAMS and splits < 8 and num_inputs // (block_k * (splits + 1)) >= 8:
        splits += 1
    return LinearConfig(rows, 64, block_k, splits, 4, 3 if pairs or rows == 64 else 4, True, 256)


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    mode: int,
    config: LinearConfig,
    scratch: LinearScratch | None,
) -> None:
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    assert weight_NK.shape[1] == num_inputs and weight_NK.stride(1) == 1 and x_MK.stride(1) == 1
    rows, block_n, block_k, splits, num_warps, num_stages, tma, prefetch = config
    tiles = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, rows)
    sums = 2 if mode == _SILU else 1
    if scratch is None or tiles > _MAX_TILES or tiles * splits * sums * block_n * rows > _MAX_PARTIALS:
        splits = 1
    partials, arrived = scratch if scratch is not None and splits > 1 else (None, None)
    stride = weight_NK.stride(0)
    aligned = rows_aligned(weight_NK)
    tma = tma and aligned
    pdl = pdl_usable()
    _rows_kernel[(tiles, splits)](
        x_MK,
        TensorDescriptor(weight_NK, list(weight_NK.shape), [stride, 1], [block_n, block_k]) if tma else None,
        weight_NK,
        bias_N,
        out_MN,
        partials,
        arrived,
        num_rows,
        x_MK.stride(0),
        stride,
        out_MN.stride(0),
        N=num_outputs,
        K=num_inputs,
        ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        PREFETCH=prefetch if aligned else 0,
        MODE=mode,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _weight_tile(weight_desc, weight_ptr, weight_stride, first, start, N, K, n, k, EVEN: tl.constexpr):
    """Weights [n, k] at rows `first` + n and columns `start` + k."""
    if weight_desc is not None:
        return weight_desc.load([first, start])
    rows = first + n
    pointers = weight_ptr + rows.to(tl.int64)[:, None] * weight_stride + (start + k)[None, :]
    if EVEN:
        return tl.load(pointers, (n < N)[:, None], other=0.0)
    return tl.load(pointers, (n < N)[:, None] & (start + k < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x_ptr,
    weight_desc,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    M,
    x_stride,
    weight_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
    # Tiles of the same weights lie next to one another, so that the second finds them in the L2 cache.
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
            prefetch_rows(start, weight_stride * element_bytes, count, num_bytes)
            if MODE == 2:
                up_start = start + weight_stride.to(tl.int64) * N
                prefetch_rows(up_start, weight_stride * element_bytes, count, num_bytes)
        tl_cuda.gdc_wait()

    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in range(begin, end):
        start_k = step * BLOCK_K
        x_mask = (m < M)[:, None] if K % BLOCK_K == 0 else (m < M)[:, None] & (start_k + k < K)[None, :]
        x = tl.load(x_ptrs + start_k, x_mask, other=0.0).trans()
        weight = _weight_tile(
            weight_desc, weight_ptr, weight_stride, first, start_k, rows_left, K, n, k, K % BLOCK_K == 0
        )
        sums = tl.dot(weight, x, sums)
        if MODE == 2:
            up = _weight_tile(
                weight_desc, weight_ptr, weight_stride, first + N, start_k, rows_left, K, n, k, K % BLOCK_K == 0
            )
            up_sums = tl.dot(up, x, up_sums)

    if SPLITS > 1:
        size: tl.constexpr = BLOCK_N * ROWS
        per_split: tl.constexpr = 2 * size if MODE == 2 else size
        within = n[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        base = partial_ptr + tile.to(tl.int64) * SPLITS * per_split + within
        tl.store(base + split * per_split, sums)
        if MODE == 2:
            tl.store(base + split * per_split + size, up_sums)
        # All of the program's stores come before its one arrival.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLITS - 1:
            return
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for other in tl.static_range(SPLITS):
            # Past the L1 cache, which may hold what lay there before.
            sums += tl.load(base + other * per_split, cache_modifier=".cg")
            if MODE == 2:
                up_sums += tl.load(base + other * per_split + size, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)

    valid_n = n < rows_left
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
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask)
