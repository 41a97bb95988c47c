"""Choice of the kernel of a product with weights in groups, and of its tiles: rules by its sizes, measured on an H200.

The rule is what won with the layers of Qwen2.5-7B in 4 bits and of Llama-3.1-8B in FP8. Other groups of 4 bits, which
have no ring, groups of 8 bits, and integers of 8 bits were not measured.
"""

from __future__ import annotations

from phonograph.kernels.torch.grouped import MAX_GROUPED_ROWS
from phonograph.kernels.triton.gemm.product_plan import (
    PROCESSORS,
    PROGRAMS,
    RING_BYTES,
    SHARED_BYTES,
    GemmDevice,
    GemmGroupedSmallMConfig,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmTiledConfig,
    GemvIntegerConfig,
    KernelConfig,
    ProductShape,
    WeightFormat,
    cdiv,
    step_bytes,
)

_MANY = 1 << 25
"""Weights of 4 bits from which a product of up to 8 rows is faster in large tiles of a ring."""


def is_supported(weights: WeightFormat, num_inputs: int) -> bool:
    """Return True if kernels multiply weights in these groups; others are written out for torch."""
    _, bits, group, is_fp8, interleaved = weights
    if interleaved:
        return True
    if is_fp8:
        return num_inputs % 4 == 0 and (group >= num_inputs or group % 64 == 0)
    if bits == 8:
        return group >= num_inputs or group == 32 or group % 64 == 0
    return group in (32, 64) or group % 128 == 0


def choose_grouped(rows: int, shape: ProductShape, weights: WeightFormat, device: GemmDevice) -> KernelConfig | None:
    """Return how a product of `rows` rows (a class) is computed; None: written out, by torch."""
    (num_outputs, num_inputs, gated), (_, bits, group, _, interleaved) = shape, weights
    if rows > MAX_GROUPED_ROWS:
        return None
    if interleaved and device.has_gluon:
        one = _integer_row(shape, group) if rows == 1 else None
        if one is not None:
            return one
        if rows > 8:
            return _grouped_ring(rows, shape)
        few = _grouped_few_ring(shape, group)
        if few is not None:
            return few
    rows = max(8, rows)
    if rows > 32:
        # A step has columns of one group.
        block_k = 128 if group >= num_inputs else min(128, group & -group)
        tiles, steps = cdiv(num_outputs, 128) * cdiv(rows, 128), cdiv(num_inputs, block_k)
        splits = 1 if gated else max(1, min(8, PROCESSORS // tiles, steps // 3))
        return GemmTiledConfig(min(rows, 128), 64 if gated else 128, block_k, splits, 8, 3, 0)
    long, narrow = num_inputs >= 8192, cdiv(num_outputs, 16) <= PROGRAMS
    if bits == 8:
        if rows > 16 or group < num_inputs:
            # Sums of more rows, or of groups, leave registers for one product of a warp at a time.
            ahead = (1 if rows > 16 else 2) if gated else 4 if long or narrow else 3
            return GemmGroupedSmallMConfig(rows, 16, 8, ahead, 1, 8)
        if gated:
            return GemmGroupedSmallMConfig(rows, 16, 16, 1, 1, 4)
        if long:
            return GemmGroupedSmallMConfig(rows, 16, 32, 1, 1, 8)
        few = GemmGroupedSmallMConfig(rows, 16, 16, 4, 1, 8)
        return few if narrow else GemmGroupedSmallMConfig(rows, 16, 8, 3, 1, 8)
    if gated:
        return GemmGroupedSmallMConfig(rows, 16, 8, 1, 1, 4)
    if long:
        return GemmGroupedSmallMConfig(rows, 16, 8, 2, 1, 8)
    few = GemmGroupedSmallMConfig(rows, 16, 16, 2, 1, 4)
    return few if narrow else GemmGroupedSmallMConfig(rows, 16, 4, 4, 2, 4)


def integer_stages(block_n: int, units: int, steps: int, places: int, *, gated: bool) -> int:
    """Return the stages of `gemv_integer` for which `places` programs of a multiprocessor have shared memory.

    Args:
        block_n: outputs of a program.
        units: of 128 columns, of a step.
        steps: of a program.
        places: programs of a multiprocessor.
        gated: weights are of gates and ups.
    """
    turns, both = 1 << (steps - 1).bit_length(), block_n * (1 + gated)
    # The row's bytes, and the scales of the weights.
    kept = 256 * units * max(2, turns) + 2 * both * units * turns
    return (SHARED_BYTES // places - 2048 - kept) // (64 * both * units)


def _integer_row(shape: ProductShape, group: int) -> GemvIntegerConfig | None:
    """Return the tiles of one row with weights of 4 bits; None if the kernel of few rows is to multiply it.

    The kernel does not take all groups, and is not faster for a matrix of many outputs without an activation, like a
    head. Two or three programs share a multiprocessor. Their rings are short, so that programs of the next kernel begin
    early and load their first weights while this one ends. A layer with no more outputs than inputs follows attention,
    and overlaps its tail if its rings are short.
    """
    (num_outputs, num_inputs, gated), weights = shape, shape.num_weights
    processors = PROGRAMS // 2
    block_n, units, splits, most, warps = 64, 4 if weights >= _MANY else 2, 1, 3, (2, 1)
    if gated:
        block_n, units, most = 64 if weights >= _MANY else 16, 1, 6
        warps = (2, 1) if block_n == 64 else (1, 1)
    elif weights < _MANY and num_outputs <= min(num_inputs, 4096):
        block_n, units, most, warps = 16, 4, 2, (1, 4)
    if group != 128 and group % (128 * units):
        return None
    tiles, steps = cdiv(num_outputs, block_n), cdiv(num_inputs, 128 * units)
    if not gated:
        if tiles > 3 * processors:
            return None
        programs = 3 * processors if weights >= _MANY else 5 * processors // 2 if block_n == 64 else 2 * processors
        splits = max(1, min(8, programs // tiles, steps // 3))
    each, places = cdiv(steps, splits), max(2, cdiv(tiles * splits, processors))
    stages = min(most, each, integer_stages(block_n, units, each, places, gated=gated))
    return GemvIntegerConfig(block_n, units, splits, stages, *warps) if stages >= 1 else None


def _grouped_few_ring(shape: ProductShape, group: int) -> GemmRingSmallMConfig | None:
    """Return the ring of up to 8 rows with weights of 4 bits; None for layers that are faster through registers.

    All programs have a place from the start, about five of a multiprocessor. Inputs of large layers are split so that
    all multiprocessors have the same number of programs: with six of some and five of most, a sixth of the time is
    lost. Layers of fewer weights pay if there are two programs of 16 outputs for each multiprocessor.
    """
    num_outputs, num_inputs, gated = shape
    units, block_n, processors = 2 if gated else 4, 32, PROGRAMS // 2
    if group != 128 and group % (128 * units):
        return None
    if shape.num_weights < _MANY:
        if gated or cdiv(num_outputs, 16) < PROGRAMS:
            return None
        block_n = 16
    tiles, steps = cdiv(num_outputs, block_n), cdiv(num_inputs, 128 * units)
    splits = 1
    if not gated and block_n == 32:
        few = [one for one in range(1, 9) if steps >= 4 * one and tiles * one <= 6 * processors] or [1]

        def idle(one: int) -> tuple[float, int]:
            places = cdiv(tiles * one, processors)
            return round(places * processors / (tiles * one), 2), abs(places - 5)

        splits = min([one for one in few if tiles * one > 2 * processors] or few[-1:], key=idle)
    # A program keeps its scales and zeros, in a number of steps rounded up to a power of two.
    kept = 3 * block_n * (1 + gated) * units << (cdiv(steps, splits) - 1).bit_length()
    places = min(6, max(4, cdiv(tiles * splits, processors)))
    stages = (SHARED_BYTES // places - 1280 - kept) // step_bytes(8, block_n, 128 * units, gated=gated, bits=4)
    warps = (2, 2) if gated else (1, 2 if block_n == 32 else 4)
    return GemmRingSmallMConfig(8, block_n, units, splits, max(2, min(8, stages, cdiv(steps, splits))), *warps)


def _grouped_ring(rows: int, shape: ProductShape) -> GemmRingConfig:
    """Return the ring of weights of 4 bits: two to four programs of a multiprocessor, if there are enough tiles.

    Up to 32 rows two programs are enough, if their rings hold most of their steps. From 65 rows on tiles have half the
    rows, unless inputs are long.
    """
    num_outputs, num_inputs, gated = shape
    steps = cdiv(num_inputs, 128)
    rows_tile = min(rows, 128 if rows > 128 or (steps > 64 and not gated) else 64)
    tiles = cdiv(num_outputs, 64) * cdiv(rows, rows_tile)
    processors, splits = PROGRAMS // 2, 1
    if gated or (rows <= 128 and tiles > 2 * processors):
        places = max(2, min(4, cdiv(tiles, processors)))
    else:
        places = 3 if rows_tile <= 32 and steps > 64 else 2
        splits = max(1, min(8, places * processors // tiles, steps // 4))
    stages = RING_BYTES // places // step_bytes(rows_tile, 64, 128, gated=gated, bits=4)
    return GemmRingConfig(rows_tile, 64, 128, splits, max(2, min(8, stages, cdiv(steps, splits))))
