"""Plan of a matrix product: a kernel with its tiles, or torch; and the values that it is chosen by.

Plain values, made without a GPU and without Triton. A kernel, its file and its configuration have one name:
`gemm_ring.py` launches `_gemm_ring_kernel` by a `GemmRingConfig`.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import NamedTuple

from phonograph.core.device import DeviceSpec

LARGE = 1 << 23
"""Weights from which a layer takes so long that changing the size of the L1 cache pays: all layers of an 8B model, none
of a 0.6B one."""

HEAD = 1 << 16
"""Outputs from which a product is a language model's head, of which even one row is faster in tiles."""

PROGRAMS = 264
"""Programs that keep the memory busy: two for each of an H200's 132 multiprocessors."""

PROCESSORS = PROGRAMS // 2 + 8
"""Largest number of programs of which most have a multiprocessor to themselves."""

RING_BYTES = 208 << 10
"""Shared memory of a ring whose program has a multiprocessor to itself."""

SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor, of which a program has a KiB more than it asks for."""

MAX_DEFERRED_ROWS = 16
"""Rows up to which a norm may be deferred. For more, a kernel for the norm costs less than reading the sums of squares
in every program."""

_PROGRAM_BYTES = {
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
}


class GemvConfig(NamedTuple):
    """Tiles of one row: outputs of a program, columns of a step, warps."""

    block_n: int
    block_k: int
    num_warps: int


class GemmSmallMConfig(NamedTuple):
    """Tiles of `rows` (8, 16 or 32) padded rows, block_n outputs (8, 16, 32) a program and block_k columns a step.

    ahead, rows_ahead: steps whose weights, and whose rows, are in flight at a time
    sums: partial sums of an output in a warp, because a tensor core's product waits for the one before it in its sum
    programs: programs that fit the registers of a multiprocessor; 0 leaves it to the compiler
    together: a warp's columns of a step are neighbours; otherwise warps take turns at every 32

    Sizes are powers of two, block_k is 32 * num_warps * sums or more.
    """

    rows: int
    block_n: int
    block_k: int
    ahead: int
    rows_ahead: int
    num_warps: int
    sums: int
    programs: int = 0
    together: bool = False


class GemmGroupedSmallMConfig(NamedTuple):
    """Tiles of `rows` (8, 16 or 32) padded rows and block_n outputs (a multiple of 16) a program.

    units: products of 128 columns (fewer of 8 bits and in smaller groups) of a step, a multiple of num_warps
    ahead, rows_ahead: steps whose weights, and whose rows, are in flight at a time; the second divides the first
    """

    rows: int
    block_n: int
    units: int
    ahead: int
    rows_ahead: int
    num_warps: int


class GemmTiledConfig(NamedTuple):
    """Tiles of block_n weight rows, block_k columns a step and `rows` padded rows.

    splits: programs that share the inputs of a tile
    prefetch: columns that a program prefetches into the L2 cache before it waits for its input
    """

    rows: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    prefetch: int


class GemmRingConfig(NamedTuple):
    """Tiles of the ring on Hopper; fields as in `GemmTiledConfig`.

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


class GemmRingSmallMConfig(NamedTuple):
    """Tiles of the ring of few rows on Hopper: `rows` padded rows, a multiple of 8.

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


class GemvIntegerConfig(NamedTuple):
    """Tiles of one row by products of integers on Hopper, with fields of `GemmRingSmallMConfig`."""

    block_n: int
    units: int
    splits: int
    stages: int
    warps_n: int
    warps_k: int


KernelConfig = (
    GemvConfig
    | GemmSmallMConfig
    | GemmGroupedSmallMConfig
    | GemmTiledConfig
    | GemmRingConfig
    | GemmRingSmallMConfig
    | GemvIntegerConfig
)
"""Kernel of a product, with its tiles."""


class GemmDevice(NamedTuple):
    """Properties of a GPU that the choice depends on.

    Attributes:
        capability: CUDA compute capability.
        shared_bytes: shared memory that a program may have.
        has_gluon: True if kernels for Hopper run: the GPU is one, and Triton has the version they are written in.
    """

    capability: tuple[int, int]
    shared_bytes: int
    has_gluon: bool

    @classmethod
    def of(cls, device: DeviceSpec) -> GemmDevice:
        return cls.with_capability(device.capability)

    @classmethod
    @functools.cache
    def with_capability(cls, capability: tuple[int, int]) -> GemmDevice:
        shared_bytes = _PROGRAM_BYTES.get(capability, 99 << 10)
        return cls(capability, shared_bytes, capability[0] == 9 and _triton_version().startswith("3.6."))


class ProductShape(NamedTuple):
    """Sizes of a product x @ weight^T.

    Attributes:
        num_outputs: of the result.
        num_inputs: of a row.
        gated: the result is activation(gate) * up, of a matrix with 2 * num_outputs outputs.
    """

    num_outputs: int
    num_inputs: int
    gated: bool = False

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs * (1 + self.gated)


class WeightFormat(NamedTuple):
    """Format of a matrix in memory.

    Attributes:
        dtype: type of the rows, and of the weights if they are not quantized.
        bits: of a quantized weight, 4 or 8; 0 for a matrix in `dtype`.
        group: inputs of a group.
        is_fp8: True for FP8, False for integers.
        interleaved: words of 4 bits lie as `grouped.interleave` puts them.
    """

    dtype: str
    bits: int = 0
    group: int = 0
    is_fp8: bool = False
    interleaved: bool = False


class ProductPlan(NamedTuple):
    """Computation of the products of a number of rows.

    Attributes:
        kernel: kernel and tiles; None for torch, which takes quantized weights written out, or with `fp8_rows` as
            they are (`torch._scaled_mm`).
        fp8_rows: rows are FP8 with a scale each.
        defers_norms: norms before and after the product may be deferred (`product.DeferredNorm`).
        gates_apart: a gated product is computed without its activation, which another kernel applies.
    """

    kernel: KernelConfig | None
    fp8_rows: bool = False
    defers_norms: bool = False
    gates_apart: bool = False

    @property
    def norms_inside(self) -> bool:
        """True if the kernel norms its row itself."""
        return isinstance(self.kernel, GemvConfig)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        if self.kernel is None:
            return "torch._scaled_mm" if self.fp8_rows else "torch"
        words = re.findall("[A-Z][a-z]*", type(self.kernel).__name__.removesuffix("Config"))
        return "_".join(words).lower()


def rows_class(num_rows: int) -> int:
    """Return the number that rows are padded to: a power of two from 8, or 1 for one row."""
    return 1 if num_rows == 1 else max(8, 1 << (num_rows - 1).bit_length())


def cdiv(one: int, other: int) -> int:
    return -(-one // other)


def step_bytes(rows: int, block_n: int, block_k: int, *, gated: bool, bits: int = 16) -> int:
    """Return the shared memory of a step: a tile of weights, two if `gated`, and of rows (8 bits if `bits` is 8)."""
    return (block_n * (1 + gated) * bits + rows * (8 if bits == 8 else 16)) * block_k // 8


@functools.cache
def _triton_version() -> str:
    """Return Triton's version. Where it is not installed, plans are for the version that kernels are written in."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "3.6."
