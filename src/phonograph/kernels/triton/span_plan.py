"""How the products between two attention launches share a GPU in one launch (`span`): the choice, the tiles, and when
their weights are asked for.

The kernel is compiled for a plan, so all of it is known to the compiler; the functions at the end are for there.

Shapes: Q attention outputs, E hidden size, I intermediate size, F outputs of QKV; of a product N outputs, K inputs.
"""

# pyright: basic
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from phonograph.kernels.triton.linear import rows_class
from phonograph.kernels.triton.pdl import gluon_usable

_MOST_HELD = 96
"""Registers of a thread for rows. Those of a product that need no more are read once for all its tiles."""


class ProductConfig(NamedTuple):
    """block_n outputs a tile, block_k columns a step, powers of two; block_n from 8, block_k from 32 * warps * sums.

    sums: that a warp keeps of an output, since each product of the tensor cores waits for the one before it in its sum.
    """

    block_n: int
    block_k: int
    sums: int


class SpanConfig(NamedTuple):
    """`rows` (8 or 16) padded rows.

    before: how many registers' worth of weights a thread asks for before the kernel before has ended, at least a
    step's; they may reach into the second product.
    ahead: how many are on their way later, of the next product at most.
    """

    rows: int
    num_warps: int
    before: int
    ahead: int
    output: ProductConfig
    gate_up: ProductConfig
    down: ProductConfig
    qkv: ProductConfig


class StreamConfig(NamedTuple):
    """Of `stream`: `rows` (8 to 64) padded rows; a stage of its rings holds block_k columns, of `STREAM_TILE` weight
    rows or of all rows.

    splits: programs that share the inputs of a unit, of O, gate-up, down and QKV: powers of two, at most the rows.
    """

    rows: int
    block_k: int
    weight_stages: int
    row_stages: int
    splits: tuple[int, int, int, int]

    @property
    def shared_bytes(self) -> int:
        """Of its rings, of 16-bit elements."""
        return 2 * self.block_k * (self.weight_stages * STREAM_TILE + self.row_stages * self.rows)


STREAM_TILE = 64
"""Outputs of a tile of `stream`: of four warps that multiply, the tensor cores' 16 each."""


class SpanSizes(NamedTuple):
    """Q, E, I and F."""

    attended: int
    hidden: int
    intermediate: int
    qkv: int


_QWEN3_600M = SpanSizes(attended=2048, hidden=1024, intermediate=3072, qkv=4096)
_LLAMA3_8B = SpanSizes(attended=4096, hidden=4096, intermediate=14336, qkv=6144)
MEASURED: dict[tuple[int, SpanSizes], SpanConfig | StreamConfig] = {
    (8, _QWEN3_600M): SpanConfig(
        8, 8, 64, 128, ProductConfig(8, 2048, 4), ProductConfig(8, 1024, 4), ProductConfig(8, 1024, 4),
        ProductConfig(32, 1024, 1),
    ),
    (16, _QWEN3_600M): SpanConfig(
        16, 8, 64, 128, ProductConfig(8, 1024, 4), ProductConfig(8, 1024, 2), ProductConfig(8, 1024, 4),
        ProductConfig(32, 512, 1),
    ),
    (32, _QWEN3_600M): StreamConfig(32, 128, 10, 6, (8, 1, 8, 1)),
    (8, _LLAMA3_8B): StreamConfig(8, 256, 5, 8, (2, 1, 2, 1)),
}  # fmt: skip
"""What was measured to be faster than a launch for each product, by `span_class` and sizes."""


def span_class(num_rows: int) -> int:
    """One row, whose other choice is `gemv`, or what rows are padded to."""
    return 1 if num_rows == 1 else rows_class(num_rows)


def choose_span(num_rows: int, sizes: SpanSizes, dtype: torch.dtype) -> SpanConfig | StreamConfig | None:
    """How all products between two attention launches run in one; None: in a launch each.

    Only where it was measured, and in bfloat16: in float16 a row times its norm's weights could overflow without the
    division by its root mean square.
    """
    if dtype != torch.bfloat16 or num_rows > 64:
        return None
    config = MEASURED.get((span_class(num_rows), sizes))
    return None if isinstance(config, StreamConfig) and not gluon_usable() else config


def has_span(sizes: SpanSizes) -> bool:
    """Whether `choose_span` ever has one for them."""
    return any(measured == sizes for _, measured in MEASURED)


@dataclass(frozen=True, slots=True)
class Product:
    """One of the products: N outputs in `tiles`, of which a program has up to `rounds`, each in `steps` pieces of K.

    batch: products that its tile is, one or more for each warp; first: its first piece, counted over all products;
    held: steps of the rows that are on their way together.
    """

    outputs: int
    inputs: int
    block_n: int
    block_k: int
    batch: int
    tiles: int
    rounds: int
    steps: int
    held: int
    first: int


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """until: how many pieces of weights have been asked for when piece i is about to be used; behind the last, all."""

    products: tuple[Product, ...]
    until: tuple[int, ...]
    rows: int
    num_warps: int
    num_programs: int


@functools.cache
def make_plan(sizes: SpanSizes, config: SpanConfig, num_programs: int, *, last: bool) -> SpanPlan:
    """last: no layer follows, so there is no QKV."""
    shapes = product_shapes(sizes, last=last)
    threads = 32 * config.num_warps
    products: list[Product] = []
    registers: list[int] = []
    for (outputs, inputs), (block_n, block_k, sums) in zip(shapes, config[-4:], strict=False):
        batch = sums * config.num_warps
        assert all(size & (size - 1) == 0 for size in (block_n, block_k, batch)), config
        assert block_n >= 8 and block_k >= 32 * batch, config
        tiles, steps = -(-outputs // block_n), -(-inputs // block_k)
        rounds = -(-tiles // num_programs)
        held = max(1, min(steps, _MOST_HELD * 2 * threads // (config.rows * block_k)))
        weight_rows = 2 * block_n if len(products) == 1 else block_n  # a gate and an up
        products.append(Product(outputs, inputs, block_n, block_k, batch, tiles, rounds, steps, held, len(registers)))
        registers += [weight_rows * block_k // (2 * threads)] * (rounds * steps)
    until: list[int] = []
    for product in products:
        end = product.first + product.rounds * product.steps
        for piece in range(product.first, end):
            most, limit = (len(registers), config.before) if piece == 0 else (end, config.ahead)
            asked = piece + 1
            while asked < most and sum(registers[piece : asked + 1]) <= limit:
                asked += 1
            until.append(max(asked, until[-1] if until else 0))
    until.append(len(registers))
    return SpanPlan(tuple(products), tuple(until), config.rows, config.num_warps, num_programs)


@dataclass(frozen=True, slots=True)
class StreamProduct:
    """N outputs in `tiles`, each in `steps` of block_k inputs. A unit is a tile, of gate-up one of gates and one
    of ups, and a share of the inputs; there are `units`."""

    outputs: int
    inputs: int
    tiles: int
    steps: int
    splits: int
    units: int


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """num_partials, num_squares: float32 values of scratch. The rest is the configuration's."""

    products: tuple[StreamProduct, ...]
    rows: int
    weight_stages: int
    row_stages: int
    num_partials: int
    num_squares: int


@functools.cache
def make_stream_plan(sizes: SpanSizes, config: StreamConfig, *, last: bool) -> StreamPlan:
    """last: no layer follows, so there is no QKV."""
    products: list[StreamProduct] = []
    assert config.rows <= 64, config
    for (outputs, inputs), splits in zip(product_shapes(sizes, last=last), config.splits, strict=False):
        tiles, steps = -(-outputs // STREAM_TILE), -(-inputs // config.block_k)
        assert splits <= steps, "each program has a step at least"
        assert splits & (splits - 1) == 0 and splits <= config.rows, config
        products.append(StreamProduct(outputs, inputs, tiles, steps, splits, tiles * splits))
    plane = STREAM_TILE * config.rows
    partials = (one.units * plane * (1 + (at == 1)) for at, one in enumerate(products) if one.splits > 1)
    return StreamPlan(
        products=tuple(products),
        rows=config.rows,
        weight_stages=config.weight_stages,
        row_stages=config.row_stages,
        num_partials=max(partials, default=0),
        num_squares=max(products[0].tiles, products[2].tiles) * config.rows,
    )


def product_shapes(sizes: SpanSizes, *, last: bool) -> list[tuple[int, int]]:
    """(N, K) of O, of gate-up for each of the two, of down and, where a layer follows, of QKV."""
    attended, hidden, intermediate, qkv = sizes
    return [(hidden, attended), (intermediate, hidden), (hidden, intermediate), (qkv, hidden)][: 3 if last else 4]


@triton.constexpr_function
def plan_value(plan, name):
    return getattr(plan, name)


@triton.constexpr_function
def num_products(plan):
    return len(plan.products)


@triton.constexpr_function
def product_value(plan, index, name):
    return getattr(plan.products[index], name)


@triton.constexpr_function
def product_of(plan, piece):
    return sum(piece >= product.first for product in plan.products) - 1


@triton.constexpr_function
def asked_until(plan, piece):
    return plan.until[piece]
