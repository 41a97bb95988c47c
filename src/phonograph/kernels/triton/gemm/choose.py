"""Choice of a product's kernel and tiles: the only place where either is picked, for every format of weights.

`choose` needs no GPU and no Triton, so that `explain`, the memory plan and the engine read the same plans. Rules go by
the sizes; they are what won on an H200. The rules of weights in groups are in `choose_grouped`.

- One row of dense weights: `gemv`. A few: `gemm_small_m`, weights in registers. Up to 64 on Hopper: `gemm_ring`. Else
  `gemm_tiled`, through Triton's pipeline, or torch where that is as fast.
- FP8 weights with a scale an output: rows are rounded to FP8 too, for `gemm_ring`, or for `torch._scaled_mm`.
- Other weights in groups: `gemv_integer`, `gemm_ring_small_m`, `gemm_grouped_small_m`, `gemm_ring` and `gemm_tiled` by
  the number of rows; for more than `MAX_GROUPED_ROWS` they are written out for torch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from phonograph.kernels.triton.gemm.choose_grouped import choose_grouped, is_supported
from phonograph.kernels.triton.gemm.product_plan import (
    HEAD,
    LARGE,
    MAX_DEFERRED_ROWS,
    PROCESSORS,
    PROGRAMS,
    RING_BYTES,
    GemmDevice,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    GemvConfig,
    GemvIntegerConfig,
    KernelConfig,
    ProductPlan,
    ProductShape,
    WeightFormat,
    cdiv,
    step_bytes,
)

BATCH_INVARIANT = GemmTiledConfig(rows=64, block_n=64, block_k=64, splits=1, num_warps=4, num_stages=4, prefetch=128)
"""Tiles of all products of a batch-invariant engine: the sums of a row have one order, whatever the other rows are.
64 rows are a compromise between one row and thousands. A step with two tiles of weights fits 99 KiB."""

_SMALLEST = 1 << 22
"""Weights from which a product of 9 to 16 rows is faster through a ring than through registers."""

_SMALL = 1 << 23
"""Weights up to which a product of more than 64 rows is faster here than by torch, which adds the parts of split inputs
in another kernel."""

_SCALED_MULTIPLE, _SCALED_MAX_INPUTS = 16, 1 << 16
"""Multiple of the sizes that `torch._scaled_mm` takes, and columns of a row that one program rounds."""

MAX_16_BIT_ROWS = 16
"""Rows up to which activations stay in 16 bits without the kernel for Hopper: `torch._scaled_mm` is slower with that
few."""

_CUDA = tuple(int(part) for part in (torch.version.cuda or "13.0").split(".")[:2])
_OF_QWEN3 = "10% of the prefill of 200 tokens by Qwen3-0.6B"
_OF_ONE, _OF_EIGHT = (f"{gain} of a decode step of Llama-3.1-8B on two GPUs" for gain in ("2.1%", "4.3%"))


class ExceptionKey(NamedTuple):
    """Product with other tiles than its rule gives: bits of its weights, 0 for 16-bit weights, rows class and sizes."""

    bits: int
    rows: int
    shape: ProductShape


EXCEPTIONS: dict[ExceptionKey, tuple[KernelConfig | None, str]] = {
    ExceptionKey(0, 256, ProductShape(4096, 1024)): (GemmRingConfig(128, 64, 64, 1, 8, 1), _OF_QWEN3),
    ExceptionKey(0, 256, ProductShape(1024, 2048)): (GemmRingConfig(32, 64, 128, 1, 8, 1), _OF_QWEN3),
    ExceptionKey(0, 256, ProductShape(1024, 3072)): (GemmRingConfig(64, 64, 128, 1, 6, 1), _OF_QWEN3),
    ExceptionKey(0, 128, ProductShape(14336, 4096, gated=True)): (
        GemmTiledConfig(128, 128, 64, 1, 8, 4, 0),
        "2.5% of a decode step of Llama-3.1-8B with 128 sequences",
    ),
    ExceptionKey(0, 1, ProductShape(4096, 2048)): (GemvConfig(2, 2048, 1), _OF_ONE),
    ExceptionKey(0, 1, ProductShape(4096, 7168)): (GemvConfig(4, 1024, 4), _OF_ONE),
    ExceptionKey(0, 8, ProductShape(4096, 2048)): (GemmSmallMConfig(8, 32, 512, 2, 2, 16, 1, 1), _OF_EIGHT),
    ExceptionKey(0, 8, ProductShape(7168, 4096, gated=True)): (GemmSmallMConfig(8, 8, 2048, 1, 1, 8, 2), _OF_EIGHT),
}
"""Exceptions from the rules, each with its gain on an H200; of 2% or less it goes. None: torch, or the activation in
another kernel. Where the kernel does not run, the rule counts."""


@functools.cache
def choose(
    shape: ProductShape, weights: WeightFormat, rows: int, device: GemmDevice, *, batch_invariant: bool = False
) -> ProductPlan:
    """Return how products of `rows` rows are computed; `rows` is a class (`rows_class`)."""
    if batch_invariant:
        return ProductPlan(BATCH_INVARIANT)
    fp8_rows = takes_fp8_rows(shape, weights, rows, device)
    kernel = _kernel(shape, weights, rows, device, fp8_rows=fp8_rows)
    deferrable = not weights.bits and weights.dtype == "bfloat16" and 1 < rows <= MAX_DEFERRED_ROWS
    if kernel is not None or not shape.gated:
        return ProductPlan(kernel, fp8_rows, defers_norms=deferrable and kernel is not None)
    both = ProductShape(2 * shape.num_outputs, shape.num_inputs)
    return choose(both, weights, rows, device)._replace(gates_apart=True)


def _kernel(
    shape: ProductShape, weights: WeightFormat, rows: int, device: GemmDevice, *, fp8_rows: bool
) -> KernelConfig | None:
    """Return the kernel of `EXCEPTIONS`, or that of the rule for the format; None for torch."""
    if weights.dtype == "float32":
        return None
    key = ExceptionKey(weights.bits, rows, shape)
    if key in EXCEPTIONS:
        kernel, _ = EXCEPTIONS[key]
        fitting = _fitting(kernel, shape, device)
        if kernel is None or fitting is not None:
            return fitting
    if fp8_rows:
        return _scaled(rows, shape, device)
    if not weights.bits:
        return _dense(rows, shape, device)
    return choose_grouped(rows, shape, weights, device) if is_supported(weights, shape.num_inputs) else None


def has_fp8_products(device: GemmDevice, dtype: str) -> bool:
    """Return True if a GPU multiplies FP8 rows and weights with a scale each, into `dtype`.

    Float16 needs the product of cuBLAS; torch's own, for other GPUs and for CUDA before 12.9, writes bfloat16.
    """
    if dtype == "float16":
        return device.capability[0] == 9 and _CUDA >= (12, 9)
    return dtype == "bfloat16" and device.capability >= (8, 9)


def takes_fp8_rows(shape: ProductShape, weights: WeightFormat, rows: int, device: GemmDevice) -> bool:
    """Return True if rows are rounded to FP8, whose weights have one scale an output."""
    num_outputs = shape.num_outputs * (1 + shape.gated)
    return (
        weights.is_fp8
        and weights.group >= shape.num_inputs
        and rows > (0 if device.has_gluon else MAX_16_BIT_ROWS)
        and num_outputs % _SCALED_MULTIPLE == 0
        and shape.num_inputs % _SCALED_MULTIPLE == 0
        and shape.num_inputs <= _SCALED_MAX_INPUTS
        and has_fp8_products(device, weights.dtype)
    )


def _fitting(kernel: KernelConfig | None, shape: ProductShape, device: GemmDevice) -> KernelConfig | None:
    """Return a kernel with the stages that the device has room for, at least three; None if it does not run there."""
    if isinstance(kernel, GemmTiledConfig):
        room = device.shared_bytes // step_bytes(kernel.rows, kernel.block_n, kernel.block_k, gated=shape.gated)
        return kernel._replace(num_stages=min(kernel.num_stages, room)) if room >= min(3, kernel.num_stages) else None
    in_gluon = isinstance(kernel, GemmRingConfig | GemmRingSmallMConfig | GemvIntegerConfig)
    return kernel if device.has_gluon or not in_gluon else None


def _dense(rows: int, shape: ProductShape, device: GemmDevice) -> KernelConfig | None:
    """Return the kernel of a matrix in the type of the rows.

    Through registers and through a ring a gated activation costs nothing. Otherwise two tiles of weights at a time
    leave fewer loads in flight for each, which costs less than another kernel only at 32 and 64 rows of a large layer.
    """
    if rows == 1 and shape.num_outputs < HEAD:
        return one_row(shape.num_inputs, shape.gated)
    rows = max(8, rows)
    found = _through_ring(rows, shape, device) or _through_registers(rows, shape)
    if found is not None:
        return found
    if not shape.gated:
        return _fitting(_tiles(rows, shape.num_outputs, shape.num_inputs), shape, device)
    if cdiv(shape.num_outputs, 64) < PROGRAMS // 2 or rows not in (32, 64):
        return None
    if rows == 64:
        return _fitting(GemmTiledConfig(64, 64, 64, 1, 4, 4, 128), shape, device)
    wide = GemmTiledConfig(32, 128, 128, 1, 4, 3, 256) if cdiv(shape.num_outputs, 128) <= PROGRAMS // 2 else None
    return _fitting(wide, shape, device) or _fitting(GemmTiledConfig(32, 64, 128, 1, 4, 3, 256), shape, device)


def one_row(num_inputs: int, gated: bool) -> GemvConfig:
    """Return the tiles of one row; with `gated` each output has two weight rows.

    By measurements on an H200. Up to 4096 columns go in one step, with 16 Ki weights a program at most; more columns go
    in steps of 2048. A step is shorter where more than a quarter of the lanes would idle (in several steps, more than a
    fifth).
    """
    whole = 1 << (num_inputs - 1).bit_length()
    if whole <= 4096 and whole <= 1.34 * num_inputs:
        block_k, num_warps = max(32, whole), max(1, whole // 512)
    else:
        block_k, num_warps = 2048, 4
        while block_k > 32 and cdiv(num_inputs, block_k) * block_k > 1.25 * num_inputs:
            block_k //= 2
    return GemvConfig(2 if gated and block_k > 2048 else 4, block_k, num_warps)


def _scaled(rows: int, shape: ProductShape, device: GemmDevice) -> GemmRingConfig | None:
    """Return the ring of rows and weights in FP8; None: by torch.

    The rule is what won on an H200 with the layers of Llama-3.1-8B: one program of a multiprocessor, or two if there
    are enough tiles for them. From 257 rows on torch is as fast, and from 65 on if there are many outputs without an
    activation.
    """
    (num_outputs, num_inputs, gated), rows = shape, max(8, rows)
    tiles = cdiv(num_outputs, 64)
    if rows > 256 or (rows > 64 and not gated and tiles > PROCESSORS) or not device.has_gluon:
        return None
    block_n, block_k = 64, 128 if gated and rows in (16, 128, 256) else 256
    rows_tile = 64 if rows == 128 and tiles <= PROCESSORS // 2 else min(rows, 128)
    if rows > 128 and not gated and tiles * cdiv(rows, rows_tile) > PROCESSORS:
        block_n = 128
    steps, splits = cdiv(num_inputs, block_k), 1
    if not gated:
        programs = cdiv(num_outputs, block_n) * cdiv(rows, rows_tile)
        splits = max(1, min(8, PROCESSORS // (programs if rows == 8 else 2 * programs), steps // 4))
    room = RING_BYTES // (2 if tiles > PROCESSORS else 1)
    stages = room // step_bytes(rows_tile, block_n, block_k, gated=gated, bits=8)
    stages = max(2, min(8, stages, cdiv(steps, splits)))
    return GemmRingConfig(rows_tile, block_n, block_k, splits, stages, int(not gated or rows == 32 or rows > 64))


def _tiles(rows: int, num_outputs: int, num_inputs: int) -> GemmTiledConfig | None:
    """Return the tiles of a product through Triton's pipeline; None: torch is as fast.

    The rule is what won on an H200 over the layers of models of 0.6B to 8B weights. Narrow layers have too few tiles,
    so their inputs are split, into three steps at least. At 16 rows, which cost little to read once for each tile,
    tiles of 32 weight rows do the same without a sum at the end, unless the inputs are long. Torch is as fast at all
    but small layers from 65 rows, and at everything beyond 128 that was not measured.
    """
    tiles = cdiv(num_outputs, 64)
    narrow, medium, head = tiles < 96, 96 <= tiles < PROGRAMS, num_outputs >= HEAD
    if rows > 16:
        config = _one_each(rows, num_outputs, num_inputs)
        if config is None and rows == 32 and not medium:
            config = GemmTiledConfig(32, 64, 128, 1, 4, 3 if head else 4, 256)
        elif config is None and rows == 64 and num_outputs * num_inputs >= 1 << 25:
            config = GemmTiledConfig(64, 128, 64, 1, 8, 4, 128) if head else GemmTiledConfig(64, 64, 64, 1, 4, 5, 128)
        return config
    long = narrow and num_inputs >= 3584
    block_n, block_k, num_warps, prefetch = 64, 128, 4, 256
    if not long and (medium or narrow or head):
        block_n, block_k, num_warps, prefetch = 32, 256, 2, 512
    splits = 1
    if narrow:
        steps = cdiv(num_inputs, block_k)
        splits = max(1, min(8, PROGRAMS // cdiv(num_outputs, block_n), steps // 3))
    return GemmTiledConfig(rows, block_n, block_k, splits, num_warps, 4, prefetch)


def _through_registers(rows: int, shape: ProductShape) -> GemmSmallMConfig | None:
    """Return the config for weights in registers: for 8 rows, in small layers for 16; None for more, and for a head.

    The fewer outputs, the fewer a program has (8, 16 or 32), so that there is a program for each processor. Small
    layers that follow one another were tuned together, as one begins on the multiprocessors that the other leaves.
    """
    num_outputs, num_inputs, gated = shape
    if num_outputs >= HEAD:
        return None
    programs = cdiv(num_outputs, 16)
    if shape.num_weights >= LARGE:
        if rows > 8:
            return None
        if gated:
            return GemmSmallMConfig(rows, 8, 512, 3, 2, 4, 1)
        if programs <= PROGRAMS:
            return GemmSmallMConfig(rows, 16, 512, 3, 2, 8, 1, programs=2, together=True)
        return GemmSmallMConfig(rows, 16, 256, 3, 2, 8, 1, programs=2)
    if rows > 16:
        return None
    if gated:
        together = GemmSmallMConfig(rows, 16, 1024, 1, 1, 8, 1, together=True)
        return together if rows == 8 else GemmSmallMConfig(rows, 16, 512, 2, 1, 8, 2)
    if programs < PROGRAMS // 2:
        if num_inputs <= 2048:
            return GemmSmallMConfig(rows, 8, 1024, 2, 1, 8, 2, programs=2)
        long = GemmSmallMConfig(rows, 8, 1024, 3, 1, 4, 1, programs=2, together=True)
        return long if rows == 8 else GemmSmallMConfig(rows, 8, 2048, 2, 2, 8, 2)
    if rows == 8 and programs >= PROGRAMS - 16:
        return GemmSmallMConfig(rows, 32, 512, 2, 2, 8, 1, together=True)
    return GemmSmallMConfig(rows, 16, 512, 2, 2 if rows == 8 else 1, 8, 2)


def _through_ring(rows: int, shape: ProductShape, device: GemmDevice) -> GemmRingConfig | None:
    """Return the config for weights in a ring; None if another kernel is faster.

    Rings run on Hopper, for 9 to 64 rows, from 17 in the smallest layers and to 128 in small ones, except for a head.
    A ring takes all shared memory, so a large layer has a program for each processor. A small layer, where splitting
    inputs costs more than it gives, has one of 32 rows for every other processor; it has few steps, between which the
    tensor cores need not wait.
    """
    (num_outputs, num_inputs, gated), weights = shape, shape.num_weights
    small, least = weights < LARGE, 16 if weights < _SMALLEST else 8
    if not least < rows <= (128 if small else 64) or num_outputs >= HEAD or num_inputs % 8 or not device.has_gluon:
        return None
    tiles, steps, rows_tile = cdiv(num_outputs, 64), cdiv(num_inputs, 128), rows
    if small:
        rows_tile = min(rows, 32 if rows <= 64 or tiles * rows <= PROCESSORS * 32 else 64)
    places = RING_BYTES // step_bytes(rows_tile, 64, 128, gated=gated)
    if gated:
        splits, stages = 1, 5 if tiles <= PROCESSORS else {16: 4, 64: 2}.get(rows_tile, 3)
    else:
        programs = tiles * cdiv(rows, rows_tile)
        splits = max(1, min(PROCESSORS // max(programs, 2 * tiles * small), num_inputs // 1024))
        stages = places if tiles <= PROCESSORS else places // 2
    stages = min(stages, places, cdiv(steps, splits))
    lag = small and (rows > 16 or not gated) and stages > 1
    return GemmRingConfig(rows_tile, 64, 128, splits, stages, int(lag))


def _one_each(rows: int, num_outputs: int, num_inputs: int) -> GemmTiledConfig | None:
    """Return tiles for one program a processor, with six stages; None if there are more tiles, or torch is as fast.

    For 17 to 128 rows this beats two programs with three stages each.
    Tiles of fewer rows than there are fill the processors without partial sums, but read weights more than once, which
    a large layer must not.
    """
    weights = num_outputs * num_inputs
    if rows > (64 if weights > _SMALL else 128):
        return None
    tiles = cdiv(num_outputs, 64)
    for rows_tile in (32, 64) if weights <= 1 << 24 else (rows,):
        programs = tiles * cdiv(rows, rows_tile)
        if rows_tile <= rows and programs <= PROCESSORS:
            splits = max(1, min(8, PROCESSORS // programs, cdiv(num_inputs, 128) // 2))
            return GemmTiledConfig(rows_tile, 64, 128, splits, 4, 6, 256)
    if rows == 128 and 2 * cdiv(num_outputs, 128) <= PROCESSORS:
        return GemmTiledConfig(64, 128, 128, 1, 8, 4, 256)
    return None
