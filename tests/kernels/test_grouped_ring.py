"""Products through a ring with weights of 4 bits, or with rows and weights in FP8, against float64."""

from __future__ import annotations

import functools
import random

import gluon_on_threads
import pytest
import torch
from grouped_problem import GroupedCase, check_products, random_tiles, scratch_of
from product_problem import poisoned, silu_of

from phonograph.kernels.triton.gemm.product import ADD, SILU, STORE, Product
from phonograph.kernels.triton.gemm.product_plan import GemmRingConfig, GemmRingSmallMConfig, ProductPlan
from phonograph.kernels.triton.gemm.run_product import run

ring = pytest.importorskip("phonograph.kernels.triton.gemm.hopper.gemm_ring")
few_ring = pytest.importorskip("phonograph.kernels.triton.gemm.hopper.gemm_ring_small_m")

SIZES = [
    (9, 72, 256, GemmRingConfig(16, 64, 128, 1, 2)),
    (16, 136, 328, GemmRingConfig(16, 64, 128, 3, 1)),
    (30, 200, 1000, GemmRingConfig(32, 128, 64, 2, 4)),
    (61, 264, 384, GemmRingConfig(64, 64, 128, 1, 3)),
    (50, 72, 640, GemmRingConfig(32, 64, 128, 2, 3)),
]
"""rows, outputs, inputs, config"""

LARGE = [
    (250, 264, 640, GemmRingConfig(128, 128, 128, 1, 3, 1)),
    (130, 200, 1024, GemmRingConfig(128, 64, 128, 1, 3, 1)),
    (200, 1024, 1280, GemmRingConfig(128, 64, 256, 1, 2, 1)),
]
"""The same for rows in FP8, of tiles with eight warps."""

FEW = [
    (1, 72, 256, GemmRingSmallMConfig(8, 32, 1, 1, 2, 1, 1)),
    (8, 136, 328, GemmRingSmallMConfig(8, 16, 2, 2, 1, 1, 2)),
    (5, 200, 1000, GemmRingSmallMConfig(8, 64, 4, 2, 2, 2, 4)),
    (3, 40, 1160, GemmRingSmallMConfig(8, 32, 2, 1, 3, 2, 1)),
    (7, 256, 640, GemmRingSmallMConfig(8, 128, 4, 1, 1, 4, 1)),
    # A program has two of the three groups.
    (4, 72, 1536, GemmRingSmallMConfig(8, 32, 4, 2, 2, 1, 1)),
]
"""rows, outputs, inputs, config of the kernel for few rows"""

Config = GemmRingConfig | GemmRingSmallMConfig


def check(case: tuple[int, int, int, Config], kind: str, dtype: torch.dtype, device: torch.device) -> None:
    rows, outputs, inputs, config = case
    # In the kernel for few rows, a step has columns of one group, or a group for each 128 columns.
    wide = 128 * config.units if isinstance(config, GemmRingSmallMConfig) else 256
    group = 128 if "zeros" in kind else wide

    def made(*, pairs: bool = False) -> GroupedCase:
        return GroupedCase(rows, outputs, inputs, dtype, device, group=group, kind=kind, pairs=pairs)

    check_products(
        made, config, poisoned(device), gated=isinstance(config, GemmRingSmallMConfig) or config.block_n == 64
    )


@pytest.fixture
def threads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("the kernel itself is tried here")
    for module, name in ((ring, "_gemm_ring_kernel"), (few_ring, "_gemm_ring_small_m_kernel")):
        monkeypatch.setattr(module, name, gluon_on_threads.launcher(module, name))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["int4 interleaved", "int4 interleaved with zeros"])
@pytest.mark.parametrize("case", [*SIZES, *FEW])
def test_on_threads(case: tuple[int, int, int, Config], kind: str, device: torch.device) -> None:
    check(case, kind, torch.float16, device)


def check_fp8(case: tuple[int, int, int, GemmRingConfig], dtype: torch.dtype, device: torch.device) -> None:
    """Check products of rows and weights in FP8, with a scale for each row and each output."""
    rows, outputs, inputs, config = case
    outputs, inputs = outputs // 16 * 16, inputs // 16 * 16
    plan = ProductPlan(config, fp8_rows=True)
    scratch = scratch_of(rows, outputs, inputs, dtype, device)
    assert scratch.scaled is not None

    def wanted(made: GroupedCase) -> torch.Tensor:
        values, scales = scratch.scaled.rows(*made.x.shape)
        return made.product(values.double() * scales.double(), bias=True)

    def made(*, pairs: bool = False) -> GroupedCase:
        return GroupedCase(rows, outputs, inputs, dtype, device, group=inputs, kind="fp8", pairs=pairs)

    plain, added, gated = made(), made(), made(pairs=True)
    added.out.copy_(added.residual)
    for mode, one in ((STORE, plain), (ADD, added), (SILU, gated)):
        assert run(plan, Product(one.x, one.grouped, one.bias, one.out, mode), scratch) is None
        product = wanted(one)
        one.check(silu_of(product) if mode == SILU else product + one.residual.double() * (mode == ADD))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", SIZES)
def test_fp8_on_threads(case: tuple[int, int, int, GemmRingConfig], device: torch.device) -> None:
    check_fp8(case, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*SIZES, *LARGE])
def test_fp8_on_the_gpu(case: tuple[int, int, int, GemmRingConfig], dtype: torch.dtype, device: torch.device) -> None:
    check_fp8(case, dtype, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int4 interleaved", "int4 interleaved with zeros"])
@pytest.mark.parametrize("case", [*SIZES, *FEW])
def test_on_the_gpu(case: tuple[int, int, int, Config], kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(case, kind, dtype, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("seed", range(20))
def test_random_sizes_on_the_gpu(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    rows = rng.choice([16, 32, 64, 128])
    config = GemmRingConfig(rows, 64, rng.choice([64, 128]), rng.choice([1, 2, 3, 4]), rng.randint(1, 4))
    inputs = rng.randint(config.splits * config.block_k // 8, 200) * 8
    kind = "int4 interleaved" + (" with zeros" if seed % 2 else "")
    check((rng.randint(1, 2 * rows), rng.randint(1, 60) * 8, inputs, config), kind, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("seed", range(20))
def test_random_sizes_of_few_rows_on_the_gpu(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    config, inputs = random_tiles(rng, functools.partial(GemmRingSmallMConfig, 8))
    kind = "int4 interleaved" + (" with zeros" if seed % 2 else "")
    check((rng.randint(1, 8), rng.randint(1, 60) * 8, inputs, config), kind, torch.bfloat16, device)
