"""Matrix products in Triton against torch in float64: odd sizes, poisoned outputs, nothing written beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from product_problem import EPS, Case, check_linear, gelu_of, linear, linear_add, poisoned, random_tensor, silu_of
from triton.runtime.jit import JITFunction

from phonograph.kernels.triton.gemm import gemm_small_m, gemv
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.kernels.triton.gemm.choose import EXCEPTIONS, ExceptionKey, choose
from phonograph.kernels.triton.gemm.product import ADD, GELU, SILU, STORE, DeferredNorm, NextNorm, Norm, Product
from phonograph.kernels.triton.gemm.product_plan import (
    HEAD,
    GemmDevice,
    GemmGroupedSmallMConfig,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    GemvConfig,
    KernelConfig,
    ProductShape,
    WeightFormat,
    rows_class,
)
from phonograph.kernels.triton.gemm.run_product import MAX_PARTIALS, GemmScratch
from phonograph.kernels.triton.launch.precompile import compile_only

BFLOAT16 = WeightFormat("bfloat16")
FP8 = WeightFormat("bfloat16", bits=8, group=1 << 20, is_fp8=True)
HOPPER = GemmDevice((9, 0), 227 << 10, has_gluon=True)
OTHER = HOPPER._replace(has_gluon=False)
"""Its memory, without kernels for Hopper."""
Exceptions = dict[ExceptionKey, tuple[KernelConfig | None, str]]
LARGE = [
    *((torch.bfloat16, *sizes) for sizes in [(4096, 6144), (1024, 4096), (14336, 4096), (18944, 3584), (2501, 300)]),
    *((torch.bfloat16, *sizes) for sizes in [(1024, 6144), (2048, 1024), (3072, 1024), (1024, 3072)]),
    *((torch.bfloat16, *sizes) for sizes in [(2048, 2048), (2048, 8192), (8192, 2048)]),
    (torch.float16, 4096, 1001),
]
"""dtype, inputs, outputs. A row of 2501 begins at odd addresses."""


def one_row(case: Case, *, bias: bool = False, mode: int = STORE, norm: bool = False) -> None:
    """Compute a product of one row by its kernel, with the tiles that are chosen."""
    shape = ProductShape(case.out.shape[1], case.x.shape[1], gated=mode >= SILU)
    config = choose(shape, BFLOAT16, 1, OTHER).kernel
    assert isinstance(config, GemvConfig)
    product = Product(case.x, case.weight, case.bias if bias else None, case.out, mode)
    gemv.launch(product._replace(norm=Norm(case.norm, EPS) if norm else None), config)


def _check_gemv(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
    case = Case(1, outputs, inputs, dtype, device)
    one_row(case, bias=bias)
    case.check(case.product(case.x, bias=bias))

    case = Case(1, outputs, inputs, dtype, device)
    one_row(case, bias=bias, norm=True)
    case.check(case.product(case.normed(), bias=bias))

    case = Case(1, outputs, inputs, dtype, device)
    case.out.copy_(case.residual)
    one_row(case, bias=bias, mode=ADD)
    case.check(case.product(case.x, bias=bias) + case.residual.double())

    case = Case(1, outputs, inputs, dtype, device, pairs=True)
    one_row(case, bias=bias, mode=SILU, norm=True)
    case.check(silu_of(case.product(case.normed(), bias=bias)))
    case = Case(1, outputs, inputs, dtype, device, pairs=True)
    one_row(case, bias=bias, mode=GELU)
    case.check(gelu_of(case.product(case.x, bias=bias)))


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
    [
        (1, gemv._gemv_kernel, gemv._large_gemv, 3),
        (5, gemm_small_m._gemm_small_m_kernel, gemm_small_m._large_gemm_small_m, 7),
    ],
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
    case.weight = wide[:, :inputs]
    one_row(case)
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


@pytest.fixture
def exceptions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exceptions]:
    """A table of exceptions that the test fills before it chooses."""
    table: Exceptions = {}
    monkeypatch.setattr("phonograph.kernels.triton.gemm.choose.EXCEPTIONS", table)
    choose.cache_clear()
    yield table
    choose.cache_clear()


@pytest.mark.parametrize("rows", [3, 12])
def test_norms_deferred_from_either_kernel_to_the_other(
    rows: int, device: torch.device, exceptions: Exceptions
) -> None:
    """Chosen by size, as in a model: from one with tiles of 8 outputs to one with tiles of 32, and back."""
    # In the interpreter, which multiplies bfloat16 wrongly, by the plans of bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    padded, scratch = rows_class(rows), poisoned(device)
    few, other = GemmSmallMConfig(padded, 8, 64, 2, 1, 2, 1), _config(padded, 3)
    for sizes, config in {
        (48, 200): few,
        (64, 48): other,
        (48, 208): other,
        (72, 48): few,
        (36, 48, True): few,
    }.items():
        exceptions[ExceptionKey(0, padded, ProductShape(*sizes))] = config, "a test"

    def bound(case: Case, *, gated: bool = False) -> BoundProduct:
        shape = ProductShape(case.out.shape[1], case.x.shape[1], gated)
        return BoundProduct(case.weight, case.bias, shape, BFLOAT16, device=OTHER, scratch=scratch)

    for first_inputs, second_outputs in ((200, 64), (208, 72), (200, 72)):
        case = Case(rows, 48, first_inputs, dtype, device)
        hidden, normed = case.residual.clone(), torch.full_like(case.residual, float("nan"))
        norm = random_tensor(48, dtype=dtype, device=device, seed=7) * 0.1 + 1
        first = bound(case)
        squares = first.deferred_norm(rows, EPS)
        assert squares is not None
        assert first.add(case.x, hidden, NextNorm(norm, normed, squares)) is None
        case.out.copy_(hidden)
        case.check(case.product(case.x, bias=True) + case.residual.double())
        taker = Case(rows, second_outputs, 48, dtype, device)
        wanted = hidden.double() * torch.rsqrt(hidden.double().square().mean(-1, keepdim=True) + EPS) * norm.double()
        second = bound(taker)
        assert second.plan(rows).defers_norms and second.plan(rows).kernel in (few, other)
        second.store(normed, taker.out, squares)
        taker.check(taker.product(wanted, bias=True))
        taker = Case(rows, 36, 48, dtype, device, pairs=True)
        bound(taker, gated=True).store(normed, taker.out, squares)
        taker.check(silu_of(taker.product(wanted, bias=True)))


def test_norms_that_are_not_deferred(device: torch.device, exceptions: Exceptions) -> None:
    """One row, more than 16, more tiles or rows than the sums of squares have room for, and types but bfloat16."""
    exceptions[ExceptionKey(0, 16, ProductShape(64, 64))] = _config(8, 1), "a test"
    scratch = poisoned(device)

    def memory(rows: int, outputs: int = 4096, weights: WeightFormat = BFLOAT16) -> DeferredNorm | None:
        shape = ProductShape(outputs, 64)
        unused = torch.empty(0, device=device)
        return BoundProduct(unused, None, shape, weights, device=OTHER, scratch=scratch).deferred_norm(rows, EPS)

    assert [rows for rows in (1, 2, 8, 9, 16, 17, 64) if memory(rows) is not None] == [2, 8, 9, 16]
    # Tiles of 32 outputs, of which there may be 256.
    assert memory(4, 32 * 256) is not None and memory(4, 32 * 257) is None
    assert memory(8, 64) is not None and memory(9, 64) is None
    assert memory(4, weights=WeightFormat("float16")) is None and memory(4, weights=WeightFormat("float32")) is None
    assert memory(4, weights=WeightFormat("bfloat16", bits=4, group=64)) is None


SMALLEST_LAYERS = [(1024, 3072), (40, 96)]
SMALL_LAYERS, LARGE_LAYERS = [(3072, 2048), *SMALLEST_LAYERS], [(6144, 4096), (4096, 14336), (4608, 3584)]


def kernel_of(rows: int, *sizes: int, gated: bool = False, device: GemmDevice = OTHER) -> KernelConfig | None:
    """Return the kernel of a matrix in bfloat16; None: torch, or the activation as a kernel of its own."""
    plan = choose(ProductShape(*sizes, gated), BFLOAT16, rows, device)
    return None if plan.gates_apart else plan.kernel


@pytest.mark.parametrize("gpu", [HOPPER, OTHER], ids=["hopper", "other"])
def test_one_row_has_a_kernel_of_its_own(gpu: GemmDevice) -> None:
    """It norms its row. A language model's head has more outputs than it is good for."""
    for gated in (False, True):
        for shape in SMALL_LAYERS + LARGE_LAYERS:
            plan = choose(ProductShape(*shape, gated), BFLOAT16, 1, gpu)
            assert isinstance(plan.kernel, GemvConfig) and plan.norms_inside and not plan.defers_norms
        assert not choose(ProductShape(HEAD, 1024, gated), BFLOAT16, 1, gpu).norms_inside
    assert kernel_of(1, HEAD, 1024, device=gpu) == kernel_of(8, HEAD, 1024, device=gpu)


@pytest.mark.parametrize("gpu", [HOPPER, OTHER], ids=["hopper", "other"])
def test_weights_go_through_registers_where_that_was_measured(gpu: GemmDevice) -> None:
    """Up to 8 rows all layers but a head, up to 16 the smallest."""
    for rows, shapes in ((8, SMALL_LAYERS + LARGE_LAYERS), (16, SMALLEST_LAYERS)):
        assert all(isinstance(kernel_of(rows, *shape, device=gpu), GemmSmallMConfig) for shape in shapes)
    for rows, shapes in ((8, [(14336, 4096), (2048, 2048), (40, 96)]), (16, [(1024, 1024), (40, 96)])):
        assert all(isinstance(kernel_of(rows, *shape, gated=True, device=gpu), GemmSmallMConfig) for shape in shapes)
    assert not isinstance(kernel_of(16, 6144, 4096, device=gpu), GemmSmallMConfig)
    for rows in (8, 16, 32):
        assert not isinstance(kernel_of(rows, 151936, 1024, device=gpu), GemmSmallMConfig)
        for shape in (ProductShape(4096, 1024), ProductShape(6144, 4096)):
            assert choose(shape, BFLOAT16, rows, gpu).defers_norms == (rows <= 16)
            assert not choose(shape, WeightFormat("float16"), rows, gpu).defers_norms


def test_a_ring_is_chosen_where_that_was_measured() -> None:
    """Rings serve 9 to 64 rows, of the smallest layers from 17 on, of small ones up to 128, aligned to 16 bytes,
    no head, and exceptions. They fit the shared memory of a program and the scratch."""
    chosen = [
        (config, key.rows, key.shape) for key, (config, _) in EXCEPTIONS.items() if isinstance(config, GemmRingConfig)
    ]
    assert chosen and all(choose(shape, BFLOAT16, rows, HOPPER).kernel == config for config, rows, shape in chosen)
    for rows in (8, 16, 32, 64, 128):
        for outputs, inputs in [*SMALL_LAYERS, *LARGE_LAYERS, (40960, 2048)]:
            for gated in (False, True):
                shape = ProductShape(outputs, inputs, gated)
                config = kernel_of(rows, outputs, inputs, gated=gated, device=HOPPER)
                expected = {8: False, 16: shape.num_weights >= 1 << 22, 128: shape.num_weights < 1 << 23}.get(
                    rows, True
                )
                assert isinstance(config, GemmRingConfig) == expected
                if isinstance(config, GemmRingConfig):
                    chosen.append((config, rows, shape))
                    lags = shape.num_weights < 1 << 23 and (rows > 16 or not gated) and inputs > 128
                    assert config.lag == int(lags)
    for config, rows, (outputs, inputs, gated) in chosen:
        assert config.rows in (16, 32, 64, 128, rows) and config.rows <= rows
        assert config.stages > config.lag
        taken = 2 * config.block_k * (config.block_n * (1 + gated) + config.rows) * config.stages
        assert taken + 1024 <= 227 << 10
        tiles = -(-outputs // config.block_n) * -(-rows // config.rows)
        assert config.splits == 1 or (not gated and tiles * config.splits <= 140)
        assert tiles * config.splits * config.block_n * config.rows <= MAX_PARTIALS or config.splits == 1
        assert 1 <= config.stages <= -(-inputs // config.block_k)
    for sizes in ((8, 4096, 4096), (16, 1024, 3072), (256, 3072, 2048), (32, 151936, 1024), (32, 4096, 2501)):
        assert not isinstance(kernel_of(*sizes, device=HOPPER), GemmRingConfig)


def test_exceptions_from_the_rules(exceptions: Exceptions) -> None:
    """Each gains more than 2%, is not what the rule says, and leaves the rule to devices that it does not run on."""

    def chosen(key: ExceptionKey, gpu: GemmDevice) -> KernelConfig | None:
        plan = choose(key.shape, FP8 if key.bits else BFLOAT16, key.rows, gpu)
        return plan.kernel

    rules = {key: [chosen(key, gpu) for gpu in (HOPPER, OTHER)] for key in EXCEPTIONS}
    exceptions.update(EXCEPTIONS)
    choose.cache_clear()
    assert exceptions
    for key, (config, gain) in exceptions.items():
        assert float(gain.split("%")[0]) > 2, gain
        on_hopper, on_other = rules[key]
        assert key.rows == rows_class(key.rows) and chosen(key, HOPPER) == config != on_hopper
        assert chosen(key, OTHER) == (on_other if isinstance(config, GemmRingConfig) else config)


def test_exceptions_of_each_format(exceptions: Exceptions) -> None:
    """Exceptions in a ring count where it runs; the rule counts elsewhere."""
    ring, small = GemmRingConfig(32, 64, 128, 1, 3), GemmGroupedSmallMConfig(32, 16, 8, 2, 1, 8)
    int4 = WeightFormat("bfloat16", bits=4, group=128, interleaved=True)
    cases: list[tuple[WeightFormat, ProductShape, KernelConfig]] = [
        (BFLOAT16, ProductShape(4096, 4096), ring),
        (FP8, ProductShape(4096, 4096), ring),
        (int4, ProductShape(4096, 4096), GemmRingSmallMConfig(32, 32, 4, 1, 2, 1, 2)),
        (FP8._replace(group=128), ProductShape(4096, 2048), small),
    ]
    rules = [[choose(shape, weights, 32, gpu) for gpu in (HOPPER, OTHER)] for weights, shape, _ in cases]
    exceptions.update({ExceptionKey(one.bits, 32, shape): (config, "a test") for one, shape, config in cases})
    choose.cache_clear()
    for (weights, shape, config), (on_hopper, on_other) in zip(cases, rules, strict=True):
        assert choose(shape, weights, 32, HOPPER) == on_hopper._replace(kernel=config) != on_hopper
        elsewhere = on_other._replace(kernel=config) if config == small else on_other
        assert choose(shape, weights, 32, OTHER) == elsewhere
        assert choose(shape, weights, 64, HOPPER).kernel != config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_chosen_kernels(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    check_linear(rows, 40, 96, dtype, device, True, None, None)


def test_one_row_in_tiles(device: torch.device) -> None:
    """As of a language model's head."""
    case = Case(1, 40, 96, torch.float16, device)
    config = kernel_of(1, HEAD, 96)
    assert isinstance(config, GemmTiledConfig)
    linear(case.x, case.weight, None, case.out, config=config)
    case.check(case.product(case.x, bias=False))


@pytest.mark.parametrize("gpu", [HOPPER, OTHER], ids=["hopper", "other"])
def test_chosen_configurations_fit_the_scratch(gpu: GemmDevice) -> None:
    shapes = [(4096, 14336), (6144, 4096), (151936, 1024), (256, 256), (3584, 18944), (1024, 3072), (6144, 1024)]
    sizes = [(rows, *shape) for rows in (8, 16, 32, 64, 128, 256) for shape in shapes]
    for rows, outputs, inputs in [*sizes, *((key.rows, *key.shape[:2]) for key in EXCEPTIONS)]:
        config = kernel_of(rows, outputs, inputs, device=gpu)
        if isinstance(config, GemmRingConfig | GemvConfig):
            continue  # rings have a test of their own, above; one row has no parts
        if isinstance(config, GemmSmallMConfig):
            assert config.rows == rows and config.block_k % (32 * config.num_warps * config.sums) == 0
        elif config is not None:
            assert isinstance(config, GemmTiledConfig)
            assert config.rows == rows or (config.rows in (32, 64) and config.rows < rows)
            partials = -(-outputs // config.block_n) * config.block_n * rows * config.splits
            assert config.splits == 1 or partials <= MAX_PARTIALS
            assert -(-inputs // config.block_k) >= config.splits


def test_as_many_programs_as_processors() -> None:
    """Layers of 17 to 128 rows with no more tiles than processors run one program each."""
    for rows in (32, 64, 128):
        for outputs, inputs in [(3072, 2048), (2048, 2048), (4096, 4096), (4608, 3584), (3584, 18944), (512, 1536)]:
            config = kernel_of(rows, outputs, inputs)
            if config is None:
                assert rows == 128 and outputs * inputs > 1 << 23
                continue
            assert isinstance(config, GemmTiledConfig)
            programs = -(-outputs // config.block_n) * -(-rows // config.rows) * config.splits
            assert programs <= 140 and (programs > 66 or config.splits in (6, 8))


@pytest.mark.parametrize(("capability", "served"), [((9, 0), {32, 64, 128}), ((8, 0), {32, 64, 128}), ((8, 9), {64})])
def test_torch_computes_products_without_room_in_shared_memory(capability: tuple[int, int], served: set[int]) -> None:
    """Products with the gated activation on an H200 without rings, an A100 and an RTX 4090; those without fit all
    three, if with fewer steps under way."""
    gpu = GemmDevice.with_capability(capability)._replace(has_gluon=False)
    assert {rows for rows in (32, 64, 128) if kernel_of(rows, 14336, 4096, gated=True, device=gpu)} == served
    assert all(kernel_of(rows, 28672, 4096, device=gpu) for rows in (16, 32, 64))
    narrow = kernel_of(64, 4096, 14336, device=gpu)
    assert isinstance(narrow, GemmTiledConfig) and narrow.num_stages == min(6, gpu.shared_bytes // (32 << 10))


def test_an_entry_whose_tiles_have_fewer_rows_than_its_class(device: torch.device, exceptions: Exceptions) -> None:
    """Chosen by size, as in a model."""
    exceptions[ExceptionKey(0, 32, ProductShape(56, 104))] = _config(16, 3), "a test"
    assert kernel_of(32, 56, 104) == _config(16, 3)
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
    scratch = GemmScratch.make(device)
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
