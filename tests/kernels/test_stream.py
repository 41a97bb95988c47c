"""Products cut into equal ranges of steps, against torch in float64: odd sizes, poisoned scratch and outputs."""

from __future__ import annotations

import pytest
import torch
from product_problem import Case, check_products, poisoned

from phonograph.kernels.triton import linear as products
from phonograph.kernels.triton.linear import LinearScratch, linear, linear_add_norm, linear_silu
from phonograph.kernels.triton.stream import StreamConfig, num_partials

# Tiles whole and cut, in two and in many; programs with several tiles; fewer steps than programs.
CUTS = [(4, 2), (4, 7), (4, 64), (1, 3), (1, 1), (3, 5)]


def _config(rows: int, programs: int, *, block_n: int = 32, block_k: int = 64, warps: int = 4) -> StreamConfig:
    return StreamConfig(rows, block_n, block_k, programs, num_warps=warps, num_stages=3, prefetch=128)


def _check(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    config: StreamConfig,
    scratch: LinearScratch,
    *,
    bias: bool,
) -> None:
    half = config._replace(block_n=config.block_n // 2)
    check_products(
        rows, outputs, inputs, dtype, device, bias=bias, config=config, pairs_config=half, scratch=scratch
    )  # fmt: skip


@pytest.mark.parametrize(("tiles", "programs"), CUTS)
@pytest.mark.parametrize(("rows", "padded", "inputs"), [(16, 16, 256), (11, 16, 328), (47, 48, 256), (31, 48, 200)])
def test_every_cut(tiles: int, programs: int, rows: int, padded: int, inputs: int, device: torch.device) -> None:
    outputs, bias = 32 * tiles - 8 * (rows == 11), rows % 2 == 0
    _check(rows, outputs, inputs, torch.float16, device, _config(padded, programs), poisoned(device), bias=bias)


def test_an_entry_chosen_by_size(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model: where there is scratch, with a kernel for the norm behind it."""
    monkeypatch.setitem(products.MEASURED, (16, 64, 128), _config(16, 3))
    monkeypatch.setitem(products.MEASURED_SILU, (16, 64, 128), _config(16, 5))
    products.choose.cache_clear()
    products.choose_silu.cache_clear()
    try:
        assert not products.takes_squares(13, 64, 128, torch.bfloat16)
        for scratch in (poisoned(device), None):
            case = Case(13, 64, 128, torch.float16, device)
            linear(case.x, case.weight, case.bias, case.out, scratch=scratch)
            case.check(case.product(case.x, bias=True))
            pairs = Case(13, 64, 128, torch.float16, device, pairs=True)
            assert linear_silu(pairs.x, pairs.weight, None, pairs.out, scratch=scratch) == (scratch is not None)
            hidden, normed, weight = case.residual.clone(), torch.empty_like(case.residual), torch.ones_like(case.bias)
            given = linear_add_norm(
                case.x, case.weight, None, hidden, weight, 1e-5, normed, defer=True, scratch=scratch
            )  # fmt: skip
            wanted = case.product(case.x, bias=False) + case.residual.double()
            assert given is None and (hidden.double() - wanted).norm() <= 2e-3 * wanted.norm()
            wanted = torch.nn.functional.rms_norm(hidden.double(), (64,), eps=1e-5)
            assert (normed.double() - wanted).norm() <= 2e-3 * wanted.norm()
    finally:
        products.choose.cache_clear()
        products.choose_silu.cache_clear()


REAL = [
    (128, _config(128, 132, block_n=256, warps=8), (4096, 28672)),
    (128, _config(128, 128, block_n=128, warps=8), (14336, 4096)),
    (77, _config(128, 132, block_n=64, block_k=128), (4096, 6144)),
    (256, _config(256, 132, block_n=128, warps=8), (4096, 28672)),
    (200, _config(256, 96, block_n=128, warps=8), (4096, 4096)),
    (256, _config(256, 132, block_n=128, warps=8), (1000, 2000)),
    (190, _config(192, 132, block_n=128, warps=8), (4096, 28672)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "config", "sizes"), REAL)
def test_real_sizes(rows: int, config: StreamConfig, sizes: tuple[int, int], device: torch.device) -> None:
    inputs, outputs = sizes
    scratch = poisoned(device)
    assert num_partials(config, pairs=False) <= scratch.partials.numel()
    _check(rows, outputs, inputs, torch.bfloat16, device, config, scratch, bias=True)


@pytest.mark.gpu
def test_the_same_result_each_time_in_a_graph(device: torch.device) -> None:
    """Launches follow one another on one scratch, each starting before the one before has ended."""
    scratch, config = poisoned(device), _config(128, 132, block_n=128, warps=8)
    case = Case(100, 4096, 4096, torch.bfloat16, device)
    outs = [torch.empty(100, 4096, dtype=torch.bfloat16, device=device) for _ in range(20)]

    def run() -> None:
        for out in outs:
            linear(case.x, case.weight, None, out, scratch=scratch, config=config)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(5):
        case.x.copy_(Case(100, 4096, 4096, torch.bfloat16, device).x * (seed + 1))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        wanted = case.product(case.x, bias=False)
        assert (outs[0].double() - wanted).norm() <= 1e-2 * wanted.norm()
        assert all(torch.equal(out, outs[0]) for out in outs)
    assert not scratch.arrived.any()
