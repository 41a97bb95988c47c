"""Matrix products for few rows (2 to 256), where reading the weights is all that takes time.

The library's kernels are made for square products: at few rows they leave a fifth of the memory bandwidth unused on
narrow layers, and they cannot begin before the kernel before has ended. Here the weights are the long side of the
tensor cores' tile (out^T = W x^T), the rows their short one, padded to a class; each program keeps several tiles of
weights on their way, and asks the L2 cache for its first ones before it waits for its input. Narrow layers have fewer
tiles than the GPU has processors, so the inputs are split over programs as well; the partial sums are added in a fixed
order by the program that arrives last, so that results do not depend on timing.

The norm between two products needs no kernel of its own: the root mean square is a factor of a whole row, so the
product that makes a row leaves it times the norm's weights, and the sums of its squares by tile (`RowSquares`), and the
product that takes the row multiplies its sums by the factor at its end.

`linear` decides by the sizes who computes a product: this kernel, that for Hopper (`ring`), that for fewer rows
(`few_rows`), that for one (`gemv`), or torch.

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

from phonograph.kernels.triton import few_rows, gemv, layers
from phonograph.kernels.triton.few_rows import FewRowsConfig, RowSquares
from phonograph.kernels.triton.pdl import gluon_usable, pdl_usable
from phonograph.kernels.triton.preload import LARGE

_STORE, _ADD, _SILU = 0, 1, 2
_MAX_TILES = 16384
MAX_PARTIALS = 1 << 22
_MAX_SQUARES = 1 << 16
# Of them in a row: each program that takes the row reads them all.
_MAX_SQUARE_TILES = 256


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

    def shared_bytes(self, *, silu: bool) -> int:
        """Of the tiles of 16-bit elements that a program has under way; `silu`: gates and ups are two of weights."""
        return 2 * self.num_stages * self.block_k * (self.block_n * (1 + silu) + self.rows)


class RingConfig(NamedTuple):
    """As `LinearConfig`, for the kernel for Hopper (`ring`): `stages` steps of a program have a place in its ring."""

    rows: int
    block_n: int
    block_k: int
    splits: int
    stages: int


ProductConfig = LinearConfig | FewRowsConfig | RingConfig
"""Which kernel computes a product, and how."""


class LinearScratch(NamedTuple):
    """Where programs that share a tile leave partial sums and count who has arrived, and where sums of squares lie.
    Products that share it must follow one another on one stream; counters are zero between them."""

    partials: torch.Tensor
    arrived: torch.Tensor
    squares: torch.Tensor


def make_scratch(device: torch.device) -> LinearScratch:
    """16 MiB for partial sums, zeroed counters, 256 KiB for sums of squares."""
    return LinearScratch(
        torch.zeros(MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
        torch.zeros(_MAX_SQUARES, dtype=torch.float32, device=device),
    )


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    squares: RowSquares | None = None,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> None:
    """out = x @ weight^T + bias; with `squares`, of x divided by its rows' root mean squares (see `linear_add_norm`).

    `scratch` from `make_scratch`: without it the inputs of a tile are not split. `config`: instead of what is chosen
    by the sizes, for measurements and for `BATCH_INVARIANT`.
    """
    if config is None and len(x_MK) == 1 and out_MN.shape[1] < HEAD:
        gemv.gemv(x_MK, weight_NK, bias_N, out_MN)
        return
    config = config or _choose_for(x_MK, out_MN)
    if config is not None:
        _launch(x_MK, weight_NK, bias_N, out_MN, _STORE, config, scratch, squares=squares)
        return
    assert squares is None, "`takes_squares` is to be asked first"
    if bias_N is None:
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
    config: ProductConfig | None = None,
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


def linear_add_norm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    hidden_MN: torch.Tensor,
    norm_weight_N: torch.Tensor,
    eps: float,
    normed_MN: torch.Tensor,
    *,
    defer: bool,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> RowSquares | None:
    """hidden += x @ weight^T + bias, in place, then normed = rms_norm(hidden) with the norm's weights and `eps`.

    defer: the product that takes `normed` can divide by the root mean square itself (`takes_squares`). What is returned
    is for it then, unless None, where `normed` is complete already.
    """
    num_rows, num_outputs = hidden_MN.shape
    config = config or (_choose_for(x_MK, hidden_MN) if num_rows > 1 else None)
    if defer and config is not None and scratch is not None:
        tiles = triton.cdiv(num_outputs, config.block_n)
        if num_rows <= config.rows and tiles <= _MAX_SQUARE_TILES:
            sums = scratch.squares[: tiles * config.rows].view(tiles, config.rows)
            squares = RowSquares(sums, num_outputs, eps)
            _launch(
                x_MK, weight_NK, bias_N, hidden_MN, _ADD, config, scratch, norm=(norm_weight_N, normed_MN, squares)
            )  # fmt: skip
            return squares
    linear_add(x_MK, weight_NK, bias_N, hidden_MN, scratch=scratch, config=config)
    layers.rms_norm(hidden_MN, norm_weight_N, eps, normed_MN)
    return None


def takes_squares(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> bool:
    """Whether `linear` can take rows that are still to be divided by their root mean squares.

    Not in float16, where a row times its norm's weights could overflow without that division. From 17 rows on a kernel
    for the norm costs less than that every program reads the squares.
    """
    if dtype != torch.bfloat16 or not 1 < num_rows <= 16:
        return False
    return choose(rows_class(num_rows), num_outputs, num_inputs) is not None


def linear_silu(
    x_MK: torch.Tensor,
    gate_up_2IK: torch.Tensor,
    bias_2I: torch.Tensor | None,
    out_MI: torch.Tensor,
    *,
    squares: RowSquares | None = None,
    scratch: LinearScratch | None = None,
    config: ProductConfig | None = None,
) -> bool:
    """out = silu(gate) * up with (gate, up) = x @ gate_up^T + bias; the rows of the gates come first. For `squares`
    see `linear`.

    Returns False, having done nothing, where the product is torch's to compute: then there is no such fusion.
    """
    if config is None and x_MK.dtype != torch.float32:
        config = choose_silu(rows_class(len(x_MK)), out_MI.shape[1], x_MK.shape[1])
    if config is None:
        return False
    _launch(x_MK, gate_up_2IK, bias_2I, out_MI, _SILU, config, scratch, squares=squares)
    return True


def _choose_for(x_MK: torch.Tensor, out_MN: torch.Tensor) -> ProductConfig | None:
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

_PROCESSORS = PROGRAMS // 2 + 8
"""Programs that have a multiprocessor to themselves; some may well have two."""
_RING = 208 << 10
"""Bytes of shared memory that a ring may take where its program has a multiprocessor to itself."""

_SMALL = 1 << 23
"""Weights up to which a product of more than 64 rows is better here than by torch, whose kernels take 5 us at least and
add the parts of split inputs in another kernel."""

BATCH_INVARIANT = LinearConfig(rows=64, block_n=64, block_k=64, splits=1, num_warps=4, num_stages=4, prefetch=128)
"""For all products of an engine whose results must not depend on the batch: a row's sums are then in one order,
whatever rows are beside it and how many. Tiles of 64 rows are a compromise between one row and thousands; the gated
activation has two tiles of weights a step, which still fits 99 KiB of shared memory."""

MEASURED: dict[tuple[int, int, int], ProductConfig | None] = {
    (256, 4096, 1024): LinearConfig(64, 128, 128, 1, 8, 4, 256),
    (256, 1024, 2048): LinearConfig(64, 64, 128, 2, 4, 6, 256),
    (256, 1024, 3072): LinearConfig(64, 64, 128, 2, 4, 6, 256),
}
"""Exceptions from `choose`'s rule, by (rows class, N, K), as measured on an H200; None: torch is as fast. A tile
may have fewer rows than the class."""

MEASURED_SILU: dict[tuple[int, int, int], ProductConfig | None] = {
    (128, 14336, 4096): LinearConfig(128, 128, 64, 1, 8, 4, 0),
}
"""Exceptions from `choose_silu`'s rule, by (rows class, I, K); None: as a product and a kernel of its own."""


@functools.cache
def choose(rows: int, num_outputs: int, num_inputs: int) -> ProductConfig | None:
    """How a product of at most `rows` (a class) rows is computed; None: by torch.

    The rule is what won on an H200 over the layers of models of 0.6B to 8B weights. Up to 8 rows, in small layers up to
    16, weights go through registers (`_through_registers`), then up to 64 through a ring, on Hopper (`_through_ring`).
    Elsewhere narrow layers have too few tiles, so their inputs are split, into three steps at least; at 16 rows, which
    cost little to read once for each tile, tiles of 32 weight rows do the same without a sum at the end, unless the
    inputs are long. Beyond, `_one_each` has the layers that fit. Torch is as fast at all but small layers from 65 rows,
    and at everything beyond 128 that was not measured.
    """
    key = rows, num_outputs, num_inputs
    if key in MEASURED:
        return _first_that_fits(MEASURED[key], silu=False)
    if (found := _through_ring(rows, num_outputs, num_inputs, pairs=False)) is not None:
        return found
    if (few := _through_registers(rows, num_outputs, num_inputs, pairs=False)) is not None:
        return few
    tiles = triton.cdiv(num_outputs, 64)
    narrow, medium, head = tiles < 96, 96 <= tiles < PROGRAMS, num_outputs >= HEAD
    if rows > 16:
        config = _one_each(rows, num_outputs, num_inputs)
        if config is None and rows == 32 and not medium:
            config = LinearConfig(32, 64, 128, 1, 4, 3 if head else 4, 256)
        elif config is None and rows == 64 and num_outputs * num_inputs >= 1 << 25:
            config = LinearConfig(64, 128, 64, 1, 8, 4, 128) if head else LinearConfig(64, 64, 64, 1, 4, 5, 128)
        return _first_that_fits(config, silu=False)
    long = narrow and num_inputs >= 3584
    block_n, block_k, num_warps, prefetch = 64, 128, 4, 256
    if not long and (medium or narrow or head):
        block_n, block_k, num_warps, prefetch = 32, 256, 2, 512
    splits = 1
    if narrow:
        steps = triton.cdiv(num_inputs, block_k)
        splits = max(1, min(8, PROGRAMS // triton.cdiv(num_outputs, block_n), steps // 3))
    return _first_that_fits(LinearConfig(rows, block_n, block_k, splits, num_warps, 4, prefetch), silu=False)


def _through_registers(rows: int, num_outputs: int, num_inputs: int, *, pairs: bool) -> FewRowsConfig | None:
    """Weights of 8 rows, in small layers of 16, held in registers. `pairs`: of gates and ups. None: too many rows, or a
    model's head, which is as fast either way.

    The fewer outputs, the fewer a program has: 8 or 16, so that there is one for each processor.
    """
    if num_outputs >= HEAD:
        return None
    programs = triton.cdiv(num_outputs, 16)
    if num_outputs * num_inputs * (1 + pairs) >= LARGE:
        if rows > 8:
            return None
        if pairs:
            return FewRowsConfig(rows, 8, 512, 3, 2, 4, 1)
        if programs <= PROGRAMS:
            return FewRowsConfig(rows, 16, 512, 3, 2, 8, 1, programs=2, together=True)
        return FewRowsConfig(rows, 16, 256, 3, 2, 8, 1, programs=2)
    if rows > 16:
        return None
    if pairs:
        together = FewRowsConfig(rows, 16, 1024, 1, 1, 8, 1, together=True)
        return together if rows == 8 else FewRowsConfig(rows, 16, 512, 2, 1, 8, 2)
    if programs < PROGRAMS // 2:
        return FewRowsConfig(rows, 8, 2048, 2, 2, 8, 2)
    return FewRowsConfig(rows, 16, 512, 2, 2 if rows == 8 else 1, 8, 2)


def _through_ring(rows: int, num_outputs: int, num_inputs: int, *, pairs: bool) -> RingConfig | None:
    """For 9 to 64 rows on Hopper. `pairs`: of gates and ups. None: few rows of a small layer, a head.

    A ring takes what shared memory there is, so that a large layer has a program for each processor. Of a small one,
    where sharing inputs costs more than it gives, every other processor has one; its rows are dealt out by 32.
    """
    small = num_outputs * num_inputs * (1 + pairs) < LARGE
    if not (16 if small else 8) < rows <= 64 or num_outputs >= HEAD or num_inputs % 8 or not gluon_usable():
        return None
    rows_tile = 32 if small else rows
    steps, step_bytes = triton.cdiv(num_inputs, 128), 2 * 128 * (64 * (1 + pairs) + rows_tile)
    tiles = triton.cdiv(num_outputs, 64)
    if pairs:
        stages = 5 if tiles <= _PROCESSORS else {16: 4, 64: 2}.get(rows_tile, 3)
        return RingConfig(rows_tile, 64, 128, 1, min(stages, _RING // step_bytes, steps))
    splits = max(1, min((_PROCESSORS // 2 if small else _PROCESSORS) // tiles, num_inputs // 1024))
    room = _RING if tiles <= _PROCESSORS else _RING // 2
    return RingConfig(rows_tile, 64, 128, splits, min(room // step_bytes, triton.cdiv(steps, splits)))


def _one_each(rows: int, num_outputs: int, num_inputs: int) -> LinearConfig | None:
    """One program a processor, with six steps under way: for 17 to 128 rows faster than two with three each. None:
    there are more tiles than processors, or torch is as fast.

    Tiles of fewer rows than there are fill the processors without partial sums, which must be written and read again;
    but then weights are read more than once, so not those of a large layer.
    """
    weights = num_outputs * num_inputs
    if rows > (64 if weights > _SMALL else 128):
        return None
    tiles = triton.cdiv(num_outputs, 64)
    for rows_tile in (32, 64) if weights <= 1 << 24 else (rows,):
        programs = tiles * triton.cdiv(rows, rows_tile)
        if rows_tile <= rows and programs <= _PROCESSORS:
            splits = max(1, min(8, _PROCESSORS // programs, triton.cdiv(num_inputs, 128) // 2))
            return LinearConfig(rows_tile, 64, 128, splits, 4, 6, 256)
    if rows == 128 and 2 * triton.cdiv(num_outputs, 128) <= _PROCESSORS:
        return LinearConfig(64, 128, 128, 1, 8, 4, 256)
    return None


@functools.cache
def choose_silu(rows: int, num_outputs: int, num_inputs: int) -> ProductConfig | None:
    """How the product with the gated activation is computed; None: as a product and a kernel of its own.

    Through registers and through a ring the activation costs nothing. Otherwise two tiles of weights at a time leave
    less on the way for each, and only at 32 and 64 rows of a large layer that costs less than the other kernel.
    """
    key = rows, num_outputs, num_inputs
    if key in MEASURED_SILU:
        return _first_that_fits(MEASURED_SILU[key], silu=True)
    if (found := _through_ring(rows, num_outputs, num_inputs, pairs=True)) is not None:
        return found
    if (few := _through_registers(rows, num_outputs, num_inputs, pairs=True)) is not None:
        return few
    if triton.cdiv(num_outputs, 64) < PROGRAMS // 2 or rows not in (32, 64):
        return None
    if rows == 64:
        return _first_that_fits(LinearConfig(64, 64, 64, 1, 4, 4, 128), silu=True)
    wide = LinearConfig(32, 128, 128, 1, 4, 3, 256) if triton.cdiv(num_outputs, 128) <= PROGRAMS // 2 else None
    return _first_that_fits(wide, LinearConfig(32, 64, 128, 1, 4, 3, 256), silu=True)


def _first_that_fits(*configs: ProductConfig | None, silu: bool) -> ProductConfig | None:
    """The first for which the current device has the shared memory, with fewer steps under way if need be, but three;
    None: torch."""
    given = [one for one in configs if one is not None]
    if not torch.cuda.is_available():
        return given[0] if given else None
    most = torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin
    for config in given:
        if isinstance(config, FewRowsConfig | RingConfig):
            return config
        stages = most // config._replace(num_stages=1).shared_bytes(silu=silu)
        if stages >= min(3, config.num_stages):
            return config._replace(num_stages=min(config.num_stages, stages))
    return None


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    mode: int,
    config: ProductConfig,
    scratch: LinearScratch | None,
    *,
    squares: RowSquares | None = None,
    norm: tuple[torch.Tensor, torch.Tensor, RowSquares] | None = None,
) -> None:
    """squares: of the input; norm: the next norm's weights, its output and where the squares of the result go."""
    if isinstance(config, FewRowsConfig):
        few_rows.launch(x_MK, weight_NK, bias_N, out_MN, mode, config, squares=squares, norm=norm)
        return
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_MN.shape[1]
    assert weight_NK.shape[1] == num_inputs and weight_NK.stride(1) == 1 and x_MK.stride(1) == 1
    rows, block_n, block_k, splits = config[:4]
    tiles = triton.cdiv(num_outputs, block_n) * triton.cdiv(num_rows, rows)
    if scratch is None or mode == _SILU or tiles > _MAX_TILES or tiles * splits * block_n * rows > MAX_PARTIALS:
        splits = 1
    parts = scratch[:2] if scratch is not None and splits > 1 else None
    assert squares is None or squares.sums.shape[1] == rows
    # Bulk copies and prefetches need rows that begin at multiples of 16 bytes.
    aligned = _rows_aligned(weight_NK)
    if isinstance(config, RingConfig):
        if aligned and _rows_aligned(x_MK):
            # Gluon is experimental: imported only where it is to run.
            from phonograph.kernels.triton import ring

            config = config._replace(splits=splits)
            ring.launch(x_MK, weight_NK, bias_N, out_MN, mode, config, parts, squares=squares, norm=norm)
            return
        config = LinearConfig(rows, block_n, block_k, splits, 4, min(3, config.stages), 256)
    num_warps, num_stages, prefetch = config[4:]
    partials, arrived = parts or (None, None)
    norm_weight, normed, made = norm or (None, None, None)
    stride = weight_NK.stride(0)
    pdl = pdl_usable()
    _rows_kernel[(tiles, splits)](
        x_MK,
        TensorDescriptor(weight_NK, list(weight_NK.shape), [stride, 1], [block_n, block_k]) if aligned else None,
        weight_NK,
        bias_N,
        out_MN,
        partials,
        arrived,
        squares.sums if squares is not None else None,
        norm_weight,
        normed,
        made.sums if made is not None else None,
        num_rows,
        squares.eps if squares is not None else 0.0,
        x_MK.stride(0),
        stride,
        out_MN.stride(0),
        normed.stride(0) if normed is not None else 0,
        N=num_outputs,
        K=num_inputs,
        ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        SQUARE_TILES=squares.sums.shape[0] if squares is not None else 0,
        PREFETCH=prefetch if aligned else 0,
        MODE=mode,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _rows_aligned(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0


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
    weight_desc,
    weight_ptr,
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
    x_stride,
    weight_stride,
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

    if SQUARE_TILES > 0:
        # Asked for now, needed at the end.
        square_tiles: tl.constexpr = triton.next_power_of_2(SQUARE_TILES)
        square_tile = tl.arange(0, square_tiles)[:, None]
        square_ptrs = squares_ptr + square_tile * ROWS + tl.arange(0, ROWS)[None, :]
        squares = tl.load(square_ptrs, square_tile < SQUARE_TILES, other=0.0)
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
            # Past the L1 cache, which may hold what lay there before.
            sums += tl.load(base + other * size, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)

    if SQUARE_TILES > 0:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
        sums *= factor
        up_sums *= factor
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
    result = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, result, mask)
    if norm_ptr is not None:
        value = tl.where(mask, result.to(tl.float32), 0.0)
        tl.store(new_squares_ptr + first // BLOCK_N * ROWS + tl.arange(0, ROWS), tl.sum(value * value, 0))
        value *= tl.load(norm_ptr + first + n, valid_n, other=0.0).to(tl.float32)[:, None]
        normed_ptrs = normed_ptr + m.to(tl.int64)[None, :] * normed_stride + (first + n)[:, None]
        tl.store(normed_ptrs, value.to(normed_ptr.dtype.element_ty), mask)
