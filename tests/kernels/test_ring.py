"""Products through a ring in shared memory, against torch in float64."""

from __future__ import annotations

import random

import gluon_on_threads
import pytest
import torch
from product_problem import Case, check_linear, linear, poisoned, random_tensor

from phonograph.kernels.triton.gemm.product_plan import GemmRingConfig
from phonograph.kernels.triton.gemm.run_product import GemmScratch

ring = pytest.importorskip("phonograph.kernels.triton.gemm.hopper.gemm_ring")

SIZES = [
    (9, 128, 256, GemmRingConfig(16, 64, 64, 1, 2)),
    (16, 72, 328, GemmRingConfig(16, 64, 64, 3, 2)),
    (13, 200, 136, GemmRingConfig(16, 128, 64, 1, 6)),
    (30, 64, 1000, GemmRingConfig(32, 64, 128, 2, 4)),
    (32, 136, 520, GemmRingConfig(32, 64, 128, 4, 2)),
    (17, 40, 96, GemmRingConfig(32, 64, 128, 1, 1)),
    (61, 264, 384, GemmRingConfig(64, 64, 128, 2, 3)),
    (64, 136, 700, GemmRingConfig(64, 64, 64, 1, 3, lag=1)),
    (100, 72, 1000, GemmRingConfig(32, 64, 128, 3, 2, lag=1)),
    (50, 72, 256, GemmRingConfig(32, 64, 64, 2, 3)),
    (64, 64, 8, GemmRingConfig(16, 64, 128, 1, 1)),
]
"""rows, outputs, inputs, config"""


@pytest.fixture
def threads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("the kernel itself is tried here")
    monkeypatch.setattr(ring, "_gemm_ring_kernel", gluon_on_threads.launcher(ring, "_gemm_ring_kernel"))


def random_case(seed: int) -> tuple[int, int, int, GemmRingConfig]:
    rng = random.Random(seed)
    rows = rng.choice([16, 32, 64])
    lag = rng.randint(0, 1)
    config = GemmRingConfig(rows, 64, rng.choice([64, 128]), rng.choice([1, 2, 3, 4]), rng.randint(1 + lag, 4), lag)
    inputs = rng.randint(config.splits * config.block_k // 8, 90) * 8
    return rng.randint(1, rng.choice([1, 2]) * rows), rng.randint(1, 30) * 8, inputs, config


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "config"), SIZES)
def test_on_threads(
    rows: int, outputs: int, inputs: int, config: GemmRingConfig, bias: bool, device: torch.device
) -> None:
    check_linear(rows, outputs, inputs, torch.float16, device, bias, config, poisoned(device))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", range(12))
def test_random_sizes_on_threads(seed: int, device: torch.device) -> None:
    rows, outputs, inputs, config = random_case(seed)
    check_linear(rows, outputs, inputs, torch.float16, device, seed % 2 == 0, config, poisoned(device))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("broken", ["expect", "wait"])
def test_threads_detect_missing_barriers(broken: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that no barrier expects, and a tile that is read before it has arrived."""
    monkeypatch.setattr(gluon_on_threads, "_PATIENCE", 2.0)
    # Whatever the machine does beside: what is not waited for is not there.
    monkeypatch.setattr(gluon_on_threads, "_DELAY", (0.05, 0.06))
    monkeypatch.setattr(gluon_on_threads._Mbarrier, broken, lambda *_, **__: None)
    case = Case(20, 64, 512, torch.float16, device)
    with pytest.raises((AssertionError, gluon_on_threads._Stuck)):
        linear(case.x, case.weight, None, case.out, config=GemmRingConfig(32, 64, 64, 1, 2))
        case.check(case.product(case.x, bias=False))


def test_rows_that_begin_at_odd_addresses(device: torch.device) -> None:
    """The copy engine cannot fetch them, so the other kernel has its sizes."""
    for inputs, shift in ((203, 0), (264, 4)):
        case = Case(20, 72, inputs, torch.float16, device)
        x = torch.full((20, inputs + 8), float("nan"), dtype=torch.float16, device=device)
        x[:, shift : inputs + shift] = case.x
        linear(
            x[:, shift : inputs + shift], case.weight, case.bias, case.out, scratch=poisoned(device),
            config=GemmRingConfig(32, 64, 64, 2, 6),
        )  # fmt: skip
        case.check(case.product(case.x, bias=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "config"), SIZES)
def test_on_the_gpu(
    rows: int, outputs: int, inputs: int, config: GemmRingConfig, dtype: torch.dtype, device: torch.device
) -> None:
    check_linear(rows, outputs, inputs, dtype, device, True, config, poisoned(device))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("seed", range(20))
def test_random_sizes_on_the_gpu(seed: int, device: torch.device) -> None:
    rows, outputs, inputs, config = random_case(seed + 100)
    check_linear(rows, outputs, inputs, torch.bfloat16, device, seed % 2 == 0, config, poisoned(device))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("rows", [10, 33])
def test_wider_matrices_on_the_gpu(rows: int, device: torch.device) -> None:
    """Rows of the input and of the weights are further apart than they are long, and what lies between is not read."""
    case = Case(rows, 136, 264, torch.bfloat16, device)
    x, weight = (
        torch.full((len(one), 288), float("nan"), dtype=one.dtype, device=device) for one in (case.x, case.weight)
    )
    x[:, 8:272], weight[:, 16:280] = case.x, case.weight
    config = GemmRingConfig(16 if rows < 16 else 64, 64, 128, 2, 3)
    linear(x[:, 8:272], weight[:, 16:280], None, case.out, scratch=poisoned(device), config=config)
    case.check(case.product(case.x, bias=False))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("rows", "config"), [(12, GemmRingConfig(16, 64, 128, 4, 6)), (40, GemmRingConfig(64, 64, 128, 3, 4))]
)
def test_the_same_result_each_time(rows: int, config: GemmRingConfig, device: torch.device) -> None:
    """Programs arrive in varying order; the order of the sum must not vary."""
    scratch = GemmScratch.make(device)
    x, weight = (random_tensor(n, 8192, dtype=torch.bfloat16, device=device, seed=n) for n in (rows, 2048))
    outs = [torch.empty(rows, 2048, dtype=torch.bfloat16, device=device) for _ in range(30)]
    for out in outs:
        linear(x, weight, None, out, scratch=scratch, config=config)
    assert all(torch.equal(out, outs[0]) for out in outs)
