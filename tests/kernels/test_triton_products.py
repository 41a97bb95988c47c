"""Matrix products in Triton against torch in float64: odd sizes, poisoned outputs, nothing written beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from product_problem import EPS, Case, check_linear, poisoned, random_tensor, silu_of
from triton.runtime.jit import JITFunction

from phonograph.kernels.triton.gemm import gemm_small_m as few_rows
from phonograph.kernels.triton.gemm import gemv
from phonograph.kernels.triton.gemm import tuning as products
from phonograph.kernels.triton.gemm.gemm_dispatch import (
    MAX_PARTIALS,
    linear,
    linear_add,
    linear_add_norm,
    linear_silu,
    make_scratch,
    takes_squares,
)
from phonograph.kernels.triton.gemm.gemm_small_m import GemmSmallMConfig
from phonograph.kernels.triton.gemm.gemm_tiled import GemmTiledConfig
from phonograph.kernels.triton.gemm.product import ADD, SILU
from phonograph.kernels.triton.gemm.tuning import GemmRingConfig, choose, choose_silu, rows_class
from phonograph.kernels.triton.launch.precompile import compile_only

DENSE = torch.empty(0)
"""Stands for a matrix that is not quantized."""
LARGE = [
    *((torch.bfloat16, *sizes) for sizes in [(4096, 6144), (1024, 4096), (14336, 4096), (18944, 3584), (2501, 300)]),
    *((torch.bfloat16, *sizes) for sizes in [(1024, 6144), (2048, 1024), (3072, 1024), (1024, 3072)]),
    *((torch.bfloat16, *sizes) for sizes in [(2048, 2048), (2048, 8192), (8192, 2048)]),
    (torch.float16, 4096, 1001),
]
"""dtype, inputs, outputs. A row of 2501 begins at odd addresses."""


def _check_gemv(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
    case = Case(1, outputs, inputs, dtype, device)
    bias_N = case.bias if bias else None
    gemv.gemv(case.x, case.weight, bias_N, case.out)
    case.check(case.product(case.x, bias=bias))

    case = Case(1, outputs, inputs, dtype, device)
    gemv.gemv(case.x, case.weight, bias_N, case.out, norm_K=case.norm, eps=EPS)
    case.check(case.product(case.normed(), bias=bias))

    case = Case(1, outputs, inputs, dtype, device)
    case.out.copy_(case.residual)
    gemv.gemv(case.x, case.weight, bias_N, case.out, mode=ADD)
    case.check(case.product(case.x, bias=bias) + case.residual.double())

    case = Case(1, outputs, inputs, dtype, device, pairs=True)
    bias_2N = case.bias if bias else None
    gemv.gemv(case.x, case.weight, bias_2N, case.out, mode=SILU, norm_K=case.norm, eps=EPS)
    case.check(silu_of(case.product(case.normed(), bias=bias)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(13, 200), (8, 1100), (6, 96), (5, 2500)])
def test_one_row_with_every_epilogue(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    _check_gemv(outputs, inputs, dtype, device, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "inputs", "outputs"), LARGE)
def test_one_row_of_real_sizes(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
    _check_gemv(outputs, inputs, dtype, device, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "small", "large", "percent"),
    [(1, gemv._gemv_kernel, gemv._large_gemv, 3), (5, few_rows._gemm_small_m_kernel, few_rows._large_gemm_small_m, 7)],
    ids=["one", "few"],
)
def test_large_layers_of_few_rows_keep_the_l1_cache(
    rows: int, small: JITFunction[Any], large: JITFunction[Any], percent: int, device: torch.device
) -> None:
    """The driver is told so for them alone."""
    sizes = ((64, 1024), (4100, 2048))
    cases = [Case(rows, outputs, inputs, torch.bfloat16, device) for outputs, inputs in sizes]
    for function in (small, large):
        # Kernels that another test of this process compiled by a launch were not loaded by `compile_only`.
        function.device_caches[torch.cuda.current_device()][0].clear()
    with compile_only():
        for case in cases:
            linear(case.x, case.weight, None, case.out)
    driver, carveouts = ctypes.CDLL("libcuda.so.1"), []
    for function in (small, large):
        for kernel in function.device_caches[torch.cuda.current_device()][0].values():
            value = ctypes.c_int()
            assert driver.cuFuncGetAttribute(ctypes.byref(value), 9, ctypes.c_void_p(kernel.function)) == 0
            carveouts.append((function is large, value.value))
    assert {is_large for is_large, _ in carveouts} == {False, True}
    assert all(value == (percent if is_large else -1) for is_large, value in carveouts)
    for case in cases:
        linear(case.x, case.weight, None, case.out)
        case.check(case.product(case.x, bias=False))


@pytest.mark.parametrize("inputs", [64, 2500])
def test_a_weight_in_the_middle_of_a_larger_matrix(inputs: int, device: torch.device) -> None:
    """Its rows are then further apart than they are long. A row of 2500 takes several steps."""
    case = Case(1, 10, inputs, torch.float16, device)
    wide = torch.full((10, inputs + 16), float("nan"), dtype=torch.float16, device=device)
    wide[:, :inputs] = case.weight
    gemv.gemv(case.x, wide[:, :inputs], None, case.out)
    case.check(case.product(case.x, bias=False))


def _config(rows: int, splits: int, *, block_n: int = 32, block_k: int = 64) -> GemmTiledConfig:
    return GemmTiledConfig(
        rows=rows, block_n=block_n, block_k=block_k, splits=splits, num_warps=4, num_stages=3, prefetch=128
    )


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "padded"),
    [(3, 45, 320, 8), (16, 33, 200, 16), (16, 33, 203, 16), (21, 32, 256, 16), (5, 31, 263, 8)],
)
def test_tiles_of_rows(rows: int, outputs: int, inputs: int, padded: int, splits: int, device: torch.device) -> None:
    """Rows of 203 and 263 begin at odd addresses, where the copy engine cannot fetch them."""
    scratch = poisoned(device) if splits > 1 else None
    config = _config(padded, splits)
    check_linear(rows, outputs, inputs, torch.float16, device, splits == 1, config, scratch)


@pytest.mark.parametrize("inputs", [72, 80, 112])
def test_tiles_of_wider_matrices(inputs: int, device: torch.device) -> None:
    """Memory between the rows of the input is not read, whatever part of a step the last columns are."""
    case = Case(5, 24, inputs, torch.float16, device)
    x = torch.full((5, inputs + 64), float("nan"), dtype=torch.float16, device=device)
    x[:, :inputs] = case.x
    linear(x[:, :inputs], case.weight, None, case.out, config=_config(8, 1))
    case.check(case.product(case.x, bias=False))


FEW_ROWS = [
    (2, 45, 320, GemmSmallMConfig(8, 8, 128, 3, 1, 2, 2)),
    (13, 40, 264, GemmSmallMConfig(16, 8, 128, 1, 1, 4, 1, together=True)),
    (16, 61, 500, GemmSmallMConfig(16, 16, 256, 2, 2, 2, 2, together=True)),
    (30, 33, 203, GemmSmallMConfig(32, 32, 64, 4, 2, 2, 1)),
    (3, 33, 203, GemmSmallMConfig(8, 16, 64, 1, 1, 1, 2)),
    (9, 45, 264, GemmSmallMConfig(16, 8, 256, 1, 1, 4, 2)),
    (1, 8, 33, GemmSmallMConfig(8, 8, 64, 4, 4, 2, 1)),
    (8, 64, 1000, GemmSmallMConfig(8, 32, 128, 6, 3, 4, 1, programs=2)),
    (32, 24, 136, GemmSmallMConfig(32, 8, 64, 2, 1, 2, 1, together=True)),
]
"""rows, outputs, inputs, config"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "config"), FEW_ROWS)
def test_few_rows(
    rows: int, outputs: int, inputs: int, config: GemmSmallMConfig, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check_linear(rows, outputs, inputs, dtype, device, bias, config, poisoned(device))


def test_few_rows_of_wider_matrices(device: torch.device) -> None:
    """Rows of the input and of the weights are further apart than they are long, and what lies between is not read."""
    case = Case(5, 24, 72, torch.float16, device)
    x, weight = (
        torch.full((len(one), 100), float("nan"), dtype=one.dtype, device=device) for one in (case.x, case.weight)
    )
    x[:, 4:76], weight[:, 8:80] = case.x, case.weight
    linear(x[:, 4:76], weight[:, 8:80], None, case.out, config=GemmSmallMConfig(8, 8, 64, 2, 2, 2, 1))
    case.check(case.product(case.x, bias=False))


@pytest.mark.parametrize("rows", [3, 12])
def test_norms_deferred_from_either_kernel_to_the_other(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen by size, as in a model: from one with tiles of 8 outputs to one with tiles of 32, and back."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    padded, scratch = rows_class(rows), poisoned(device)
    few, other = GemmSmallMConfig(padded, 8, 64, 2, 1, 2, 1), _config(padded, 3)
    for shape, config in {(48, 200): few, (64, 48): other, (48, 208): other, (72, 48): few}.items():
        monkeypatch.setitem(products.MEASURED, (padded, *shape), config)
    monkeypatch.setitem(products.MEASURED_SILU, (padded, 36, 48), few)
    assert takes_squares(rows, 72, 48, DENSE, torch.bfloat16)
    for first_inputs, second_outputs in ((200, 64), (208, 72), (200, 72)):
        case = Case(rows, 48, first_inputs, dtype, device)
        hidden, normed = case.residual.clone(), torch.full_like(case.residual, float("nan"))
        norm = random_tensor(48, dtype=dtype, device=device, seed=7) * 0.1 + 1
        squares = linear_add_norm(
            case.x, case.weight, case.bias, hidden, norm, EPS, normed, defer=True, scratch=scratch
        )  # fmt: skip
        assert squares is not None
        case.out.copy_(hidden)
        case.check(case.product(case.x, bias=True) + case.residual.double())
        taker = Case(rows, second_outputs, 48, dtype, device)
        wanted = hidden.double() * torch.rsqrt(hidden.double().square().mean(-1, keepdim=True) + EPS) * norm.double()
        linear(normed, taker.weight, taker.bias, taker.out, squares=squares, scratch=scratch)
        taker.check(taker.product(wanted, bias=True))
        taker = Case(rows, 36, 48, dtype, device, pairs=True)
        assert linear_silu(normed, taker.weight, taker.bias, taker.out, squares=squares, scratch=scratch)
        taker.check(silu_of(taker.product(wanted, bias=True)))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes decide as they do there."""
    monkeypatch.setattr(products, "gluon_usable", lambda: True)
    with chosen_anew():
        yield


@contextmanager
def chosen_anew() -> Iterator[None]:
    choosers = products.choose, products.choose_silu
    for chooser in choosers:
        chooser.cache_clear()
    try:
        yield
    finally:
        for chooser in choosers:
            chooser.cache_clear()


SMALLEST_LAYERS = [(1024, 3072), (40, 96)]
SMALL_LAYERS, LARGE_LAYERS = [(3072, 2048), *SMALLEST_LAYERS], [(6144, 4096), (4096, 14336), (4608, 3584)]


def test_weights_go_through_registers_where_that_was_measured() -> None:
    """Up to 8 rows all layers but a head, up to 16 the smallest."""
    for rows, shapes in ((8, SMALL_LAYERS + LARGE_LAYERS), (16, SMALLEST_LAYERS)):
        assert all(isinstance(choose(rows, *shape), GemmSmallMConfig) for shape in shapes)
    for rows, shapes in ((8, [(14336, 4096), (2048, 2048), (40, 96)]), (16, [(1024, 1024), (40, 96)])):
        assert all(isinstance(choose_silu(rows, *shape), GemmSmallMConfig) for shape in shapes)
    assert not isinstance(choose(16, 6144, 4096), GemmSmallMConfig)
    for rows in (8, 16, 32):
        assert not isinstance(choose(rows, 151936, 1024), GemmSmallMConfig)
        assert takes_squares(rows, 4096, 1024, DENSE, torch.bfloat16) == (rows <= 16)
        assert not takes_squares(rows, 4096, 1024, DENSE, torch.float16)


@pytest.mark.usefixtures("on_hopper")
def test_a_ring_is_chosen_where_that_was_measured() -> None:
    """Rings serve 9 to 64 rows, of the smallest layers from 17 on, of small ones up to 128, aligned to 16 bytes,
    no head, and exceptions. They fit the shared memory of a program and the scratch."""
    chosen = [
        (config, *sizes, False) for sizes, config in products.MEASURED.items() if isinstance(config, GemmRingConfig)
    ]
    assert chosen and all(choose(*sizes) == config for config, *sizes, _ in chosen)
    for rows in (8, 16, 32, 64, 128):
        for outputs, inputs in [*SMALL_LAYERS, *LARGE_LAYERS, (40960, 2048)]:
            for pairs in (False, True):
                weights = outputs * inputs * (1 + pairs)
                config = (choose_silu if pairs else choose)(rows, outputs, inputs)
                expected = {8: False, 16: weights >= 1 << 22, 128: weights < 1 << 23}.get(rows, True)
                assert isinstance(config, GemmRingConfig) == expected
                if isinstance(config, GemmRingConfig):
                    chosen.append((config, rows, outputs, inputs, pairs))
                    lags = weights < 1 << 23 and (rows > 16 or not pairs) and inputs > 128
                    assert config.lag == int(lags)
    for config, rows, outputs, inputs, pairs in chosen:
        assert config.rows in (16, 32, 64, 128, rows) and config.rows <= rows
        assert config.stages > config.lag
        taken = 2 * config.block_k * (config.block_n * (1 + pairs) + config.rows) * config.stages
        assert taken + 1024 <= 227 << 10
        tiles = -(-outputs // config.block_n) * -(-rows // config.rows)
        assert config.splits == 1 or (not pairs and tiles * config.splits <= 140)
        assert tiles * config.splits * config.block_n * config.rows <= MAX_PARTIALS or config.splits == 1
        assert 1 <= config.stages <= -(-inputs // config.block_k)
    for rows, outputs, inputs in ((8, 4096, 4096), (16, 1024, 3072), (256, 3072, 2048), (32, 151936, 1024)):
        assert not isinstance(choose(rows, outputs, inputs), GemmRingConfig)
    assert not isinstance(choose(32, 4096, 2501), GemmRingConfig)
    assert takes_squares(16, 6144, 4096, DENSE, torch.bfloat16) and not takes_squares(
        32, 6144, 4096, DENSE, torch.bfloat16
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_chosen_kernels(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    check_linear(rows, 40, 96, dtype, device, True, None, None)


def test_one_row_of_a_language_models_head(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has more outputs than the kernel for one row is good for."""
    case = Case(1, 40, 96, torch.float16, device)
    monkeypatch.setattr("phonograph.kernels.triton.gemm.gemm_dispatch.HEAD", 40)
    monkeypatch.delattr(gemv, "gemv")
    linear(case.x, case.weight, None, case.out)
    case.check(case.product(case.x, bias=False))


def test_chosen_configurations_fit_the_scratch() -> None:
    shapes = [(4096, 14336), (6144, 4096), (151936, 1024), (256, 256), (3584, 18944), (1024, 3072), (6144, 1024)]
    sizes = [(rows, *shape) for rows in (8, 16, 32, 64, 128, 256) for shape in shapes]
    for rows, outputs, inputs in [*sizes, *products.MEASURED]:
        config = choose(rows, outputs, inputs)
        if isinstance(config, GemmRingConfig):
            continue  # a test of their own, above
        if isinstance(config, GemmSmallMConfig):
            assert config.rows == rows and config.block_k % (32 * config.num_warps * config.sums) == 0
        elif config is not None:
            assert config.rows == rows or (config.rows in (32, 64) and config.rows < rows)
            partials = -(-outputs // config.block_n) * config.block_n * rows * config.splits
            assert config.splits == 1 or partials <= make_scratch(torch.device("meta")).partials.numel()
            assert -(-inputs // config.block_k) >= config.splits


def test_as_many_programs_as_processors() -> None:
    """Layers of 17 to 128 rows with no more tiles than processors run one program each."""
    for rows in (32, 64, 128):
        for outputs, inputs in [(3072, 2048), (2048, 2048), (4096, 4096), (4608, 3584), (3584, 18944), (512, 1536)]:
            config = choose(rows, outputs, inputs)
            if isinstance(config, GemmRingConfig):
                continue  # a test of their own, above
            if config is None:
                assert rows == 128 and outputs * inputs > 1 << 23
                continue
            assert isinstance(config, GemmTiledConfig)
            programs = -(-outputs // config.block_n) * -(-rows // config.rows) * config.splits
            assert programs <= 140 and (programs > 66 or config.splits in (6, 8))


@pytest.mark.parametrize(("kilobytes", "served"), [(227, {32, 64, 128}), (163, {32, 64, 128}), (99, {64})])
def test_torch_computes_products_without_room_in_shared_memory(
    kilobytes: int, served: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products with the gated activation on an H200, an A100 and an RTX 4090; those without fit all three, if with
    fewer steps under way."""
    monkeypatch.setattr(products, "shared_memory", lambda: kilobytes << 10)
    monkeypatch.setattr(products, "gluon_usable", lambda: False)
    with chosen_anew():
        assert {rows for rows in (32, 64, 128) if products.choose_silu(rows, 14336, 4096) is not None} == served
        assert all(choose(rows, 28672, 4096) is not None for rows in (16, 32, 64))
        narrow = choose(64, 4096, 14336)
        assert isinstance(narrow, GemmTiledConfig) and narrow.num_stages == min(6, kilobytes // 32)


def test_an_entry_whose_tiles_have_fewer_rows_than_its_class(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen by size, as in a model."""
    monkeypatch.setitem(products.MEASURED, (32, 56, 104), _config(16, 3))
    assert choose(32, 56, 104) == _config(16, 3)
    for rows in (17, 32):
        check_linear(rows, 56, 104, torch.float16, device, True, None, poisoned(device))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "inputs", "outputs"), LARGE)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 23, 64, 100, 200, 256])
def test_rows_of_real_sizes(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
    check_linear(rows, outputs, inputs, dtype, device, True, None, poisoned(device))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 40])
def test_the_same_result_each_time(rows: int, device: torch.device) -> None:
    """Programs arrive in varying order; the order of the sum must not vary."""
    scratch = poisoned(device)
    case = Case(rows, 4096, 14336, torch.bfloat16, device)
    outs = [torch.empty(rows, 4096, dtype=torch.bfloat16, device=device) for _ in range(20)]
    config = _config(rows_class(rows), 6, block_n=64, block_k=128)
    for out in outs:
        linear(case.x, case.weight, None, out, scratch=scratch, config=config)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 11, 29, 40])
def test_a_chain_replayed_with_other_contents(rows: int, device: torch.device) -> None:
    """Each kernel starts before the one before has ended: it must not read what is not written yet."""
    scratch = make_scratch(device)
    weights = [random_tensor(2048, 2048, dtype=torch.bfloat16, device=device, seed=i) / 2048**0.5 for i in range(8)]
    x = torch.empty(rows, 2048, dtype=torch.bfloat16, device=device)
    buffers = [torch.empty_like(x) for _ in weights]
    hidden = torch.empty_like(x)

    def chain() -> None:
        before = x
        for weight, buffer in zip(weights, buffers, strict=True):
            linear(before, weight, None, buffer, scratch=scratch)
            linear_add(buffer, weight, None, hidden, scratch=scratch)
            before = buffer

    hidden.zero_()
    x.zero_()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for seed in range(10):
        x.copy_(random_tensor(rows, 2048, dtype=torch.bfloat16, device=device, seed=seed))
        hidden.zero_()
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        before, total = x.double(), torch.zeros(rows, 2048, dtype=torch.float64, device=device)
        for weight, buffer in zip(weights, buffers, strict=True):
            assert (buffer.double() - before @ weight.double().t()).norm() <= 1e-2 * buffer.double().norm()
            before = buffer.double()
            total += before @ weight.double().t()
        assert (hidden.double() - total).norm() <= 2e-2 * total.norm()
