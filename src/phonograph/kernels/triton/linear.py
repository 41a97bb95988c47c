"""Matrix products for few rows (2 to 64), where reading the weights is all that takes time.

The library's kernels are made for square products: at few rows they leave a fifth of the memory bandwidth unused on
narrow layers, and they cannot begin before the kernel before has ended. Here the weights are the long side of the
tensor cores' tile (out^T = W x^T), the rows their short one, padded to a class; each program keeps several tiles of
weights on their way, and asks the L2 cache for its first ones before it waits for its input. Narrow layers have fewer
tiles than the GPU has processors, so the inputs are split over programs as well; the partial sums are added in a fixed
order by the program that arrives last, so that results do not depend on timing.

`linear` decides by the sizes who computes a product: these kernels, those for one row (`gemv`), or torch.

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

from phonograph.kernels.triton import gemv, layers
from phonograph.kernels.triton.pdl import pdl_usable

_STORE, _ADD, _SILU = 0, 1, 2
_MAX_TILES = 16384
_MAX_PARTIALS = 1 << 22


class LinearConfig(NamedTuple):
    """block_n weight rows by block_k columns a step, `rows` padded rows, `splits` programs share the inputs of a tile.

    prefetch: columns that a program asks the L2 cache for before it waits for its input.
    """

    rows: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
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

    `scratch` from `make_scratch`: without it the inputs of a tile are not split. `config`: instead of what is chosen
    by the sizes, for measurements.
    """
    if config is None and len(x_MK) == 1 and out_MN.shape[1] < HEAD:
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


def linear_norm_silu(
    hidden_ME: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    gate_up_2IE: torch.Tensor,
    bias_2I: torch.Tensor | None,
    out_MI: torch.Tensor,
    normed_ME: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: LinearConfig | None = None,
) -> bool:
    """out = silu(gate) * up with (gate, up) = rms_norm(hidden) @ gate_up^T + bias; the rows of the gates come first.

    `normed` is where the norm is written. Returns False, having done nothing, where the activation is better computed
    apart from that product.
    """
    if config is None and hidden_ME.dtype != torch.float32:
        config = choose_silu(rows_class(len(hidden_ME)), out_MI.shape[1])
    if config is None:
        return False
    layers.rms_norm(hidden_ME, norm_weight_E, eps, normed_ME)
    _launch(normed_ME, gate_up_2IE, bias_2I, out_MI, _SILU, config, scratch)
    return True


def linear_norm(
    hidden_ME: torch.Tensor,
    norm_weight_E: torch.Tensor,
    eps: float,
    weight_NE: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    normed_ME: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: LinearConfig | None = None,
) -> None:
    """out = rms_norm(hidden) @ weight^T + bias, the norm with weights and `eps`.

    The root mean square is a factor of a whole row, so at few rows it is applied to the sums, and each program sums
    the squares for itself. `normed` is where the norm is written where it has a kernel of its own.
    """
    config = config or (_choose_for(hidden_ME, out_MN) if fuses_norm(hidden_ME) else None)
    if config is None:
        layers.rms_norm(hidden_ME, norm_weight_E, eps, normed_ME)
        linear(normed_ME, weight_NE, bias_N, out_MN, scratch=scratch)
        return
    _launch(hidden_ME, weight_NE, bias_N, out_MN, _STORE, config, scratch, norm_K=norm_weight_E, eps=eps)


def linear_gated_add(
    gate_up_M2I: torch.Tensor,
    weight_NI: torch.Tensor,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    inner_MI: torch.Tensor,
    *,
    scratch: LinearScratch | None = None,
    config: LinearConfig | None = None,
) -> None:
    """hidden += (silu(gate) * up) @ weight^T + bias, in place; a row's gates come first.

    At few rows and inputs each program computes the activation of its inputs for itself. `inner` is where it is
    written where it has a kernel of its own.
    """
    config = config or (_choose_for(inner_MI, hidden_MN) if fuses_activation(inner_MI) else None)
    if config is None:
        layers.silu_and_mul(gate_up_M2I, inner_MI)
        linear_add(inner_MI, weight_NI, bias_N, hidden_MN, scratch=scratch)
        return
    _launch(gate_up_M2I, weight_NI, bias_N, hidden_MN, _ADD, config, scratch, gated=True)


def fuses_norm(x_MK: torch.Tensor) -> bool:
    """Whether the norm of so many rows goes into the product behind it. In float16 a row times its norm's weights,
    without the root mean square, could overflow."""
    return 1 < len(x_MK) <= FUSED_ROWS and x_MK.dtype == torch.bfloat16


def fuses_activation(x_MK: torch.Tensor) -> bool:
    """Whether the gated activation of so many rows goes into the product behind it."""
    return 1 < len(x_MK) <= FUSED_ROWS and x_MK.dtype != torch.float32 and x_MK.shape[1] <= FUSED_INPUTS


FUSED_ROWS = 16
"""Rows up to which a norm or an activation costs less inside each program of a product than a kernel of its own."""

FUSED_INPUTS = 4096
"""Inputs up to which that holds of the activation, which takes more arithmetic."""


def _choose_for(x_MK: torch.Tensor, out_MN: torch.Tensor) -> LinearConfig | None:
    if x_MK.dtype == torch.float32:
        return None
    num_rows, num_inputs = x_MK.shape
    return choose(rows_class(num_rows), out_MN.shape[1], num_inputs)


def rows_class(num_rows: int) -> int:
    """What rows are padded to: a power of two from 8."""
    return max(8, 1 << (num_rows - 1).bit_length())


HEAD = 1 << 16
"""Outputs from which a product is a language model's head. It is so long that even one row is faster here."""

PROGRAMS = 264
"""Programs that keep the memory busy: two for each of an H200's 132 processors."""

MEASURED: dict[tuple[int, int, int], LinearConfig | None] = {
    (8, 6144, 4096): LinearConfig(8, 16, 512, 1, 1, 4, 512),
    (8, 28672, 4096): LinearConfig(8, 32, 256, 1, 2, 4, 0),
    (8, 1024, 2048): LinearConfig(8, 32, 128, 5, 2, 5, 256),
    (32, 4096, 1024): None,
    (32, 6144, 1024): LinearConfig(32, 64, 128, 1, 4, 4, 256),
}
"""Exceptions from `choose`'s rule, by (rows class, N, K), as measured on an H200; None: torch is as fast."""


@functools.cache
def choose(rows: int, num_outputs: int, num_inputs: int) -> LinearConfig | None:
    """How a product of at most `rows` (a class) rows is computed; None: by torch.

    The rule is what won on an H200 over the layers of an 8B and a 0.6B model. Narrow layers have too few tiles, so
    their inputs are split, into three steps at least. Up to 16 rows, where the rows cost little to read once for each
    tile, tiles of 32 weight rows do the same without a sum at the end, unless the inputs are long. Torch is as fast
    at layers of medium width from 32 rows, at all but large layers from 64, and at everything beyond.
    """
    key = rows, num_outputs, num_inputs
    if key in MEASURED:
        return MEASURED[key]
    tiles = triton.cdiv(num_outputs, 64)
    narrow, medium, head = tiles < 96, 96 <= tiles < PROGRAMS, num_outputs >= HEAD
    block_n, block_k, num_warps, num_stages, prefetch = 64, 128, 4, 4, 256
    if rows <= 16:
        long = narrow and num_inputs >= 3584
        if not long and (rows == 8 or medium or narrow or head):
            block_n, block_k, num_warps, prefetch = 32, 256, 2, 512
    elif rows == 32:
        if medium:
            return None
        num_stages = 3 if head else 4
    elif rows == 64:
        if num_outputs * num_inputs < 1 << 25:
            return None
        num_stages = 3
        if not narrow:
            block_k, num_stages, prefetch = 64, 5, 128
    else:
        return None
    splits = 1
    if narrow:
        programs = 2 * PROGRAMS if rows == 8 else PROGRAMS
        steps = triton.cdiv(num_inputs, block_k)
        splits = max(1, min(8, programs // triton.cdiv(num_outputs, block_n), steps // 3))
    return LinearConfig(rows, block_n, block_k, splits, num_warps, num_stages, prefetch)


@functools.cache
def choose_silu(rows: int, num_outputs: int) -> LinearConfig | None:
    """How the product with the gated activation is computed; None: as a product and a kernel of its own.

    Two tiles of weights at a time leave less on the way for each. Only at 32 and 64 rows of a large layer that costs
    less than the other kernel.
    """
    if triton.cdiv(num_outputs, 64) >= PROGRAMS // 2:
        if rows == 32:
            return LinearConfig(rows, 64, 128, 1, 4, 3, 256)
        if rows == 64:
            return LinearConfig(rows, 128, 64, 1, 8, 3, 128)
    return None


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    mode: int,
    config: LinearConfig,
    scratch: LinearScratch | None,
    *,
    norm_K: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> None:
    num_rows, num_inputs = len(x_MK), weight_NK.shape[1]
    num_outputs = out_MN.shape[1]
    assert x_MK.shape[1] == num_inputs * (1 + gated) and weight_NK.stride(1) == 1 and x_MK.stride(1) == 1
    rows, block_n, block_k, splits, num_warps, num_stages, prefetch = config
    tiles = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, rows)
    if scratch is None or mode == _SILU or tiles > _MAX_TILES or tiles * splits * (block_n + 1) * rows > _MAX_PARTIALS:
        splits = 1
    partials, arrived = scratch if scratch is not None and splits > 1 else (None, None)
    stride = weight_NK.stride(0)
    # Bulk copies and prefetches need rows that begin at multiples of 16 bytes.
    aligned = stride * weight_NK.element_size() % 16 == 0 and weight_NK.data_ptr() % 16 == 0
    pdl = pdl_usable()
    _rows_kernel[(tiles, splits)](
        x_MK,
        norm_K,
        TensorDescriptor(weight_NK, list(weight_NK.shape), [stride, 1], [block_n, block_k]) if aligned else None,
        weight_NK,
        bias_N,
        out_MN,
        partials,
        arrived,
        num_rows,
        eps,
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
        GATED=gated,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@triton.jit
def _prefetch_rows(pointer, stride_bytes, count, num_bytes):
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
    norm_ptr,
    weight_desc,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    M,
    eps,
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
    GATED: tl.constexpr,
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
            _prefetch_rows(start, weight_stride * element_bytes, count, num_bytes)
            if MODE == 2:
                up_start = start + weight_stride.to(tl.int64) * N
                _prefetch_rows(up_start, weight_stride * element_bytes, count, num_bytes)
        tl_cuda.gdc_wait()

    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    # Squares of eight columns, which one thread holds, are summed at once.
    squares = tl.zeros((ROWS, BLOCK_K // 8), tl.float32)
    for step in range(begin, end):
        start_k = step * BLOCK_K
        x_mask = (m < M)[:, None] if K % BLOCK_K == 0 else (m < M)[:, None] & (start_k + k < K)[None, :]
        x = tl.load(x_ptrs + start_k, x_mask, other=0.0)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + start_k + k, start_k + k < K, other=0.0).to(tl.float32)
            value = x.to(tl.float32)
            squares += tl.sum(tl.reshape(value * value, (ROWS, BLOCK_K // 8, 8)), 2)
            x = (value * norm[None, :]).to(x.dtype)
        elif GATED:
            gate = x.to(tl.float32)
            gate *= tl.sigmoid(gate)
            x = (gate * tl.load(x_ptrs + K + start_k, x_mask, other=0.0).to(tl.float32)).to(x.dtype)
        x = x.trans()
        weight = _weight_tile(
            weight_desc, weight_ptr, weight_stride, first, start_k, rows_left, K, n, k, K % BLOCK_K == 0
        )
        sums = tl.dot(weight, x, sums)
        if MODE == 2:
            up = _weight_tile(
                weight_desc, weight_ptr, weight_stride, first + N, start_k, rows_left, K, n, k, K % BLOCK_K == 0
            )
            up_sums = tl.dot(up, x, up_sums)

    square_sum = tl.sum(squares, 1)
    if SPLITS > 1:
        # Sums of squares lie behind the products'.
        size: tl.constexpr = BLOCK_N * ROWS + ROWS
        within = n[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        base = partial_ptr + tile.to(tl.int64) * SPLITS * size
        tl.store(base + split * size + within, sums)
        square_ptrs = base + BLOCK_N * ROWS + tl.arange(0, ROWS)
        if norm_ptr is not None:
            tl.store(square_ptrs + split * size, square_sum)
        # All of the program's stores come before its one arrival.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLITS - 1:
            return
        sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for other in tl.static_range(SPLITS):
            # Past the L1 cache, which may hold what lay there before.
            sums += tl.load(base + other * size + within, cache_modifier=".cg")
        if norm_ptr is not None:
            square_sum = tl.zeros((ROWS,), tl.float32)
            for other in tl.static_range(SPLITS):
                square_sum += tl.load(square_ptrs + other * size, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)

    if norm_ptr is not None:
        sums *= tl.rsqrt(square_sum / K + eps)[None, :]
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
