"""Products of one row with weights of 4 bits by products of integers, against float64."""

from __future__ import annotations

import math
import random

import gluon_on_threads
import pytest
import torch
from grouped_problem import GroupedCase, check_products, random_tiles
from product_problem import linear, poisoned

from phonograph.kernels.triton.gemm.choose_grouped import choose_grouped
from phonograph.kernels.triton.gemm.product_plan import (
    SHARED_BYTES,
    GemmDevice,
    GemvIntegerConfig,
    ProductShape,
    WeightFormat,
)

gemv_integer = pytest.importorskip("phonograph.kernels.triton.gemm.hopper.gemv_integer")

SIZES = [
    (72, 256, 128, GemvIntegerConfig(32, 1, 1, 2, 1, 1)),
    (136, 328, 128, GemvIntegerConfig(16, 2, 2, 1, 1, 2)),
    (200, 1000, 512, GemvIntegerConfig(64, 4, 2, 2, 2, 4)),
    (40, 1160, 128, GemvIntegerConfig(32, 2, 1, 3, 2, 1)),
    (256, 640, 640, GemvIntegerConfig(128, 1, 1, 1, 4, 1)),
    # Programs begin in the middle of a group, and have steps of two.
    (72, 1920, 640, GemvIntegerConfig(32, 1, 4, 2, 1, 1)),
]
"""outputs, inputs, group, config"""
KINDS = "int4 interleaved", "int4 interleaved with zeros"
Size = tuple[int, int, int, GemvIntegerConfig]


def check(size: Size, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    outputs, inputs, group, config = size

    def made(*, pairs: bool = False) -> GroupedCase:
        return GroupedCase(1, outputs, inputs, dtype, device, group=group, kind=kind, pairs=pairs)

    check_products(made, config, poisoned(device))


def check_unlike(dtype: torch.dtype, device: torch.device) -> None:
    """Check columns of very unlike sizes, and zeros: each 128 columns have a scale of their own."""
    case = GroupedCase(1, 72, 640, dtype, device, group=128, kind="int4 interleaved with zeros")
    case.x[0, :128] *= 1e-6
    case.x[0, 128:256] = 0
    case.x[0, 300] = 1000
    config = GemvIntegerConfig(16, 1, 2, 2, 1, 1)
    linear(case.x, case.grouped, None, case.out, scratch=poisoned(device), config=config)
    case.check(case.product(case.x, bias=False))
    small = GroupedCase(1, 72, 384, dtype, device, group=128, kind="int4 interleaved")
    small.x[0, 128:] = 0
    small.x *= 1e-4
    linear(small.x, small.grouped, None, small.out, scratch=poisoned(device), config=config)
    wanted = small.product(small.x, bias=False)
    assert (small.out.double() - wanted).norm() <= 1e-2 * wanted.norm()


def check_not_finite(dtype: torch.dtype, device: torch.device) -> None:
    """Check that no number is made up where the row has none."""
    for value in (math.nan, math.inf, -math.inf):
        case = GroupedCase(1, 72, 384, dtype, device, group=128, kind="int4 interleaved")
        case.x[0, 200] = value
        config = GemvIntegerConfig(16, 1, 1, 2, 1, 1)
        linear(case.x, case.grouped, None, case.out, scratch=poisoned(device), config=config)
        assert not case.out.isfinite().any()


def check_halves_of_bytes(dtype: torch.dtype, device: torch.device) -> None:
    """Check integers of the row whose low byte is 128, which is the signed byte -128 and one more in the high byte."""
    case = GroupedCase(1, 72, 384, dtype, device, group=128, kind="int4 interleaved")
    # By the largest number of each 128, 0.5 is the integer 128.
    case.x.fill_(0.5)
    case.x[0, ::128] = 127
    linear(
        case.x, case.grouped, None, case.out, scratch=poisoned(device), config=GemvIntegerConfig(16, 1, 1, 2, 1, 1)
    )  # fmt: skip
    case.check(case.product(case.x, bias=False))


@pytest.fixture
def threads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("the kernel itself is tried here")
    name = "_gemv_integer_kernel"
    monkeypatch.setattr(gemv_integer, name, gluon_on_threads.launcher(gemv_integer, name))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_on_threads(size: Size, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(size, kind, dtype, device)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_on_threads(dtype: torch.dtype, device: torch.device) -> None:
    check_unlike(dtype, device)
    check_halves_of_bytes(dtype, device)
    check_not_finite(dtype, device)


def chosen(shape: ProductShape) -> GemvIntegerConfig:
    """Return the tiles of one row on Hopper, with groups of 128."""
    weights = WeightFormat("bfloat16", bits=4, group=128, interleaved=True)
    config = choose_grouped(1, shape, weights, GemmDevice((9, 0), 227 << 10, has_gluon=True))
    assert isinstance(config, GemvIntegerConfig)
    return config


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(896, 4864), (2048, 5632), (3584, 18944), (4096, 14336), (5120, 27648), (8192, 28672)]
)
def test_chosen_tiles_fit(hidden: int, intermediate: int) -> None:
    """A program has shared memory for its ring, the row and the scales."""
    layers = (2 * hidden, hidden, False), (hidden, hidden, False), (intermediate, hidden, True)
    for shape in (ProductShape(*layer) for layer in (*layers, (hidden, intermediate, False))):
        config = chosen(shape)
        block_n, units, splits, stages, _, _ = config
        both, steps = block_n * (1 + shape.gated), -(-shape.num_inputs // (128 * units * splits))
        turns = 1 << (steps - 1).bit_length()
        used = 64 * both * units * stages + 256 * units * max(2, turns) + 3 * both * units * turns + 2048
        assert used <= SHARED_BYTES - 1024 and 1 <= stages <= steps


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_on_the_gpu(size: Size, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(size, kind, dtype, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_on_the_gpu(dtype: torch.dtype, device: torch.device) -> None:
    check_unlike(dtype, device)
    check_halves_of_bytes(dtype, device)
    check_not_finite(dtype, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("seed", range(20))
def test_random_sizes_on_the_gpu(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    config, inputs = random_tiles(rng, GemvIntegerConfig)
    size = rng.randint(1, 60) * 8, inputs, rng.choice([128, 128 * config.units]), config
    check(size, KINDS[seed % 2], torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("outputs", "inputs", "pairs"),
    [
        (3584, 18944, False),
        (4608, 3584, False),
        (3584, 3584, False),
        (18944, 3584, True),
        (896, 4864, False),
        (4864, 896, True),
        (152, 896, False),
    ],
)
def test_chosen_tiles_on_the_gpu(outputs: int, inputs: int, pairs: bool, device: torch.device) -> None:
    config = chosen(ProductShape(outputs, inputs, pairs))
    check((outputs, inputs, 128, config), KINDS[0], torch.bfloat16, device)
