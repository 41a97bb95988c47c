"""Choice of the kernel of a matrix product and of its tiles: rules by its sizes, and exceptions, measured on an H200.

The rules of weights in groups are in `tuning_grouped`.

Shapes: M rows, N outputs, K inputs, I intermediate size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from phonograph.kernels.triton.gemm.gemm_grouped_small_m import GroupedRowsConfig
from phonograph.kernels.triton.gemm.gemm_small_m import FewRowsConfig
from phonograph.kernels.triton.gemm.gemm_tiled import LinearConfig, step_bytes
from phonograph.kernels.triton.launch.l1_carveout import LARGE
from phonograph.kernels.triton.launch.pdl import gluon_usable
from phonograph.kernels.triton.launch.shared_memory import shared_memory


class RingConfig(NamedTuple):
    """Tiles of the kernel for Hopper (`gemm_ring`), like those of `LinearConfig`.

    stages: steps of a program that have a place in its ring
    lag: steps that are still multiplied while a program requests the next ones, 0 or 1. With 1 the tensor cores never
        wait, but a place stays empty for one step longer.
    """

    rows: int
    block_n: int
    block_k: int
    splits: int
    stages: int
    lag: int = 0


class FewRowsRingConfig(NamedTuple):
    """Tiles of the kernel for few rows on Hopper (`gemm_ring_small_m`): `rows` padded rows, a multiple of 8.

    units: products of 128 columns of a step, a multiple of warps_k
    stages: steps of a program that have a place in its ring
    warps_n, warps_k: warps among which a program's outputs, 16 at a time, and its columns are dealt
    """

    rows: int
    block_n: int
    units: int
    splits: int
    stages: int
    warps_n: int
    warps_k: int


class IntegerRowConfig(NamedTuple):
    """Tiles of the kernel for one row by products of integers (`gemv_integer`), with fields of `FewRowsRingConfig`.

    rows: rows class of the sums of squares
    """

    rows: int
    block_n: int
    units: int
    splits: int
    stages: int
    warps_n: int
    warps_k: int


ProductConfig = LinearConfig | FewRowsConfig | RingConfig | GroupedRowsConfig | FewRowsRingConfig | IntegerRowConfig
"""Kernel of a product, with its tiles."""


def rows_class(num_rows: int) -> int:
    """Return the number that rows are padded to: a power of two from 8."""
    return max(8, 1 << (num_rows - 1).bit_length())


HEAD = 1 << 16
"""Outputs from which a product is a language model's head, of which even one row is faster in tiles."""

PROGRAMS = 264
"""Programs that keep the memory busy: two for each of an H200's 132 multiprocessors."""

PROCESSORS = PROGRAMS // 2 + 8
"""Largest number of programs of which most have a multiprocessor to themselves."""

RING_BYTES = 208 << 10
"""Bytes of shared memory of a ring whose program has a multiprocessor to itself."""

SHARED_BYTES = 228 << 10
"""Bytes of shared memory of a multiprocessor, of which a program has a KiB more than it asks for."""

_SMALLEST = 1 << 22
"""Weights from which a product of 9 to 16 rows is faster through a ring than through registers."""

_SMALL = 1 << 23
"""Weights up to which a product of more than 64 rows is faster here than by torch, which adds the parts of split inputs
in another kernel."""

BATCH_INVARIANT = LinearConfig(rows=64, block_n=64, block_k=64, splits=1, num_warps=4, num_stages=4, prefetch=128)
"""Tiles of all products of a batch-invariant engine: a row's sums have one order, whatever rows are beside it. 64 rows
are a compromise between one row and thousands; with two tiles of weights, for the gated activation, a step still fits
99 KiB of shared memory."""

MEASURED: dict[tuple[int, int, int], ProductConfig | None] = {
    (256, 4096, 1024): RingConfig(128, 64, 64, 1, 8, 1),
    (256, 1024, 2048): RingConfig(32, 64, 128, 1, 8, 1),
    (256, 1024, 3072): RingConfig(64, 64, 128, 1, 6, 1),
}
"""Exceptions from `choose`'s rule, by (rows class, N, K); None: torch is as fast. A tile may have fewer rows than the
class. Torch takes the place of rings where these do not run."""

MEASURED_SILU: dict[tuple[int, int, int], ProductConfig | None] = {
    (128, 14336, 4096): LinearConfig(128, 128, 64, 1, 8, 4, 0),
}
"""Exceptions from `choose_silu`'s rule, by (rows class, I, K); None: as a product and a kernel of its own."""


MEASURED_SCALED: dict[tuple[int, int, int, bool], RingConfig | None] = {
    # With more stages its programs do not find room beside those of attention.
    (8, 4096, 4096, False): RingConfig(8, 64, 256, 2, 6),
    (512, 6144, 4096, False): RingConfig(128, 128, 256, 1, 3, 1),
}
"""Exceptions from `choose_scaled`'s rule, by (rows class, N, K, pairs); None: torch is as fast."""


def cdiv(one: int, other: int) -> int:
    return -(-one // other)


@functools.cache
def choose(rows: int, num_outputs: int, num_inputs: int) -> ProductConfig | None:
    """Return how a product of at most `rows` (a class) rows is computed; None: by torch."""
    key = rows, num_outputs, num_inputs
    if key in MEASURED:
        configs: list[ProductConfig | None] = [MEASURED[key]]
    else:
        configs = [_through_ring(*key, pairs=False) or _through_registers(*key, pairs=False) or _tiles(*key)]
    return _first_that_fits(configs, silu=False)


@functools.cache
def choose_silu(rows: int, num_outputs: int, num_inputs: int) -> ProductConfig | None:
    """Return how the product with the gated activation is computed; None: as a product and a kernel of its own.

    Through registers and through a ring the activation costs nothing. Otherwise two tiles of weights at a time leave
    fewer loads in flight for each, which costs less than the other kernel only at 32 and 64 rows of a large layer.
    """
    key = rows, num_outputs, num_inputs
    configs: list[ProductConfig | None] = []
    if key in MEASURED_SILU:
        configs = [MEASURED_SILU[key]]
    elif ahead := _through_ring(*key, pairs=True) or _through_registers(*key, pairs=True):
        configs = [ahead]
    elif cdiv(num_outputs, 64) >= PROGRAMS // 2:
        if rows == 64:
            configs = [LinearConfig(64, 64, 64, 1, 4, 4, 128)]
        elif rows == 32:
            configs = [LinearConfig(32, 64, 128, 1, 4, 3, 256)]
            if cdiv(num_outputs, 128) <= PROGRAMS // 2:
                configs.insert(0, LinearConfig(32, 128, 128, 1, 4, 3, 256))
    return _first_that_fits(configs, silu=True)


def choose_scaled(rows: int, num_outputs: int, num_inputs: int, pairs: bool) -> RingConfig | None:
    """Return how a product of rows and weights in FP8 is computed; None: by torch.

    With `pairs`, weights are of gates and ups. The rule is what won on an H200 with the layers of Llama-3.1-8B: one
    program of a multiprocessor, or two if there are tiles for so many. From 257 rows on torch is as fast, and from 65
    on if there are many outputs without an activation.
    """
    key = rows, num_outputs, num_inputs, pairs
    if key in MEASURED_SCALED:
        return MEASURED_SCALED[key] if gluon_usable() else None
    tiles = cdiv(num_outputs, 64)
    if rows > 256 or (rows > 64 and not pairs and tiles > PROCESSORS) or not gluon_usable():
        return None
    block_n, block_k = 64, 128 if pairs and rows in (16, 128, 256) else 256
    rows_tile = 64 if rows == 128 and tiles <= PROCESSORS // 2 else min(rows, 128)
    if rows > 128 and not pairs and tiles * cdiv(rows, rows_tile) > PROCESSORS:
        block_n = 128
    steps, splits = cdiv(num_inputs, block_k), 1
    if not pairs:
        programs = cdiv(num_outputs, block_n) * cdiv(rows, rows_tile)
        splits = max(1, min(8, PROCESSORS // (programs if rows == 8 else 2 * programs), steps // 4))
    room = RING_BYTES // (2 if tiles > PROCESSORS else 1)
    stages = room // step_bytes(rows_tile, block_n, block_k, silu=pairs, bits=8)
    stages = max(2, min(8, stages, cdiv(steps, splits)))
    return RingConfig(rows_tile, block_n, block_k, splits, stages, int(not pairs or rows == 32 or rows > 64))


def _first_that_fits(configs: list[ProductConfig | None], *, silu: bool) -> ProductConfig | None:
    """Return the first config that the current device can run, with fewer stages if need be (at least three)."""
    for config in configs:
        if isinstance(config, LinearConfig):
            stages = shared_memory() // step_bytes(config.rows, config.block_n, config.block_k, silu=silu)
            if stages >= min(3, config.num_stages):
                return config._replace(num_stages=min(config.num_stages, stages))
        elif config is not None and (gluon_usable() or not isinstance(config, RingConfig)):
            return config
    return None


def _tiles(rows: int, num_outputs: int, num_inputs: int) -> LinearConfig | None:
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
            config = LinearConfig(32, 64, 128, 1, 4, 3 if head else 4, 256)
        elif config is None and rows == 64 and num_outputs * num_inputs >= 1 << 25:
            config = LinearConfig(64, 128, 64, 1, 8, 4, 128) if head else LinearConfig(64, 64, 64, 1, 4, 5, 128)
        return config
    long = narrow and num_inputs >= 3584
    block_n, block_k, num_warps, prefetch = 64, 128, 4, 256
    if not long and (medium or narrow or head):
        block_n, block_k, num_warps, prefetch = 32, 256, 2, 512
    splits = 1
    if narrow:
        steps = cdiv(num_inputs, block_k)
        splits = max(1, min(8, PROGRAMS // cdiv(num_outputs, block_n), steps // 3))
    return LinearConfig(rows, block_n, block_k, splits, num_warps, 4, prefetch)


def _through_registers(rows: int, num_outputs: int, num_inputs: int, *, pairs: bool) -> FewRowsConfig | None:
    """Return the config for weights in registers: for 8 rows, in small layers for 16; None for more, and for a head.

    The fewer outputs, the fewer a program has (8, 16 or 32), so that there is a program for each processor. Small
    layers that follow one another were tuned together, as one begins on the multiprocessors that the other leaves.

    With `pairs`, weights are of gates and ups.
    """
    if num_outputs >= HEAD:
        return None
    programs = cdiv(num_outputs, 16)
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
        if num_inputs <= 2048:
            return FewRowsConfig(rows, 8, 1024, 2, 1, 8, 2, programs=2)
        long = FewRowsConfig(rows, 8, 1024, 3, 1, 4, 1, programs=2, together=True)
        return long if rows == 8 else FewRowsConfig(rows, 8, 2048, 2, 2, 8, 2)
    if rows == 8 and programs >= PROGRAMS - 16:
        return FewRowsConfig(rows, 32, 512, 2, 2, 8, 1, together=True)
    return FewRowsConfig(rows, 16, 512, 2, 2 if rows == 8 else 1, 8, 2)


def _through_ring(rows: int, num_outputs: int, num_inputs: int, *, pairs: bool) -> RingConfig | None:
    """Return the config for weights in a ring; None if another kernel is faster.

    Rings run on Hopper, for 9 to 64 rows, from 17 in the smallest layers and to 128 in small ones, except for a head.
    A ring takes all shared memory, so a large layer has a program for each processor. A small layer, where splitting
    inputs costs more than it gives, has one of 32 rows for every other processor; it has few steps, between which the
    tensor cores need not wait.

    With `pairs`, weights are of gates and ups.
    """
    weights = num_outputs * num_inputs * (1 + pairs)
    small, least = weights < LARGE, 16 if weights < _SMALLEST else 8
    if not least < rows <= (128 if small else 64) or num_outputs >= HEAD or num_inputs % 8 or not gluon_usable():
        return None
    tiles, steps, rows_tile = cdiv(num_outputs, 64), cdiv(num_inputs, 128), rows
    if small:
        rows_tile = min(rows, 32 if rows <= 64 or tiles * rows <= PROCESSORS * 32 else 64)
    places = RING_BYTES // step_bytes(rows_tile, 64, 128, silu=pairs)
    if pairs:
        splits, stages = 1, 5 if tiles <= PROCESSORS else {16: 4, 64: 2}.get(rows_tile, 3)
    else:
        programs = tiles * cdiv(rows, rows_tile)
        splits = max(1, min(PROCESSORS // max(programs, 2 * tiles * small), num_inputs // 1024))
        stages = places if tiles <= PROCESSORS else places // 2
    stages = min(stages, places, cdiv(steps, splits))
    lag = small and (rows > 16 or not pairs) and stages > 1
    return RingConfig(rows_tile, 64, 128, splits, stages, int(lag))


def _one_each(rows: int, num_outputs: int, num_inputs: int) -> LinearConfig | None:
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
            return LinearConfig(rows_tile, 64, 128, splits, 4, 6, 256)
    if rows == 128 and 2 * cdiv(num_outputs, 128) <= PROCESSORS:
        return LinearConfig(64, 128, 128, 1, 8, 4, 256)
    return None
