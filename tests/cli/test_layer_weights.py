"""Kernels that are named for a model's matrices, and those that products choose."""

from __future__ import annotations

from typing import Any

import pytest

from phonograph.cli.layer_weights import layer_weights, product_kernels
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import KNOWN_DEVICES
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import read_configured_model

pytest.importorskip("triton")
from phonograph.kernels.triton.gemm import tuning, tuning_grouped
from phonograph.kernels.triton.gemm.gemm_tiled import GemmTiledConfig

KERNELS = {
    "GemmGroupedSmallMConfig": "gemm_grouped_small_m",
    "GemmRingSmallMConfig": "gemm_ring_small_m",
    "GemvIntegerConfig": "gemv_integer",
    "GemmRingConfig": "gemm_ring",
    "GemmTiledConfig": "gemm_tiled",
}
SHAPES = [
    (4608, 3584, False),
    (3584, 3584, False),
    (18944, 3584, True),
    (3584, 18944, False),
    (896, 896, False),
    (896, 4864, False),
    (152064, 3584, False),
]
"""outputs, inputs, and whether the weights are of gates and ups"""


def gptq(bits: int, group: int) -> Gptq:
    return Gptq(bits=bits, group_size=group, zeros=False, ordered=False, offsets=False, version=1)


def named(scheme: Scheme, outputs: int, inputs: int, device: str, rows: int) -> str:
    kernels = product_kernels(scheme, outputs, inputs, "bfloat16", KNOWN_DEVICES[device])
    return next(kernel for most, kernel in kernels if most is None or rows <= most)


@pytest.fixture(params=["h200", "rtx5090"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (tuning, tuning_grouped):
        monkeypatch.setattr(module, "gluon_usable", lambda: request.param == "h200")
    return request.param


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 64), (4, 32), (8, 128), (8, -1)])
def test_integers(bits: int, group: int, rows: int, device: str) -> None:
    scheme = gptq(bits, group)
    for outputs, inputs, pairs in SHAPES:
        columns = scheme.group(inputs)
        interleaved = bits == 4 and columns % 128 == 0
        row_class = 1 if rows == 1 else tuning.rows_class(rows)
        config = tuning_grouped.choose_grouped(
            row_class, outputs, inputs, bits, columns, pairs, interleaved=interleaved
        )
        wanted = "torch, on weights written out" if config is None else KERNELS[type(config).__name__]
        assert wanted in named(scheme, outputs * (1 + pairs), inputs, device, rows)


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 256, 512])
def test_fp8(rows: int, device: str) -> None:
    scheme = Fp8(origin="fp8", scales="channel")
    for outputs, inputs, pairs in SHAPES:
        found = named(scheme, outputs * (1 + pairs), inputs, device, rows)
        if device != "h200" and rows <= 16:
            assert found == "gemm_grouped_small_m"
            continue
        config = tuning.choose_scaled(tuning.rows_class(rows), outputs, inputs, pairs)
        assert ("torch._scaled_mm" if config is None else "gemm_ring") in found


def test_unquantized_weights_and_cpus() -> None:
    kernels = product_kernels(None, 4096, 4096, "bfloat16", KNOWN_DEVICES["h200"])
    for rows in (8, 16, 64, 256):
        config: Any = tuning.choose(tuning.rows_class(rows), 4096, 4096)
        name = "torch" if config is None else "gemm_tiled" if isinstance(config, GemmTiledConfig) else "gemm_"
        assert name in next(kernel for most, kernel in kernels if most is None or rows <= most)
    assert product_kernels(None, 64, 64, "float32", KNOWN_DEVICES["cpu"]) == ((None, "torch"),)
    assert product_kernels(gptq(4, 128), 64, 128, "float32", KNOWN_DEVICES["h200"])[-1] == (
        None,
        "torch, on weights written out",
    )


def test_bytes_are_those_of_the_plan() -> None:
    """All but the embedding and norms of the demo model, which are of the model's type."""
    model = read_configured_model(EngineConfig(model="demo"), config_only=True)
    found = layer_weights(model, "float16", KNOWN_DEVICES["h200"])
    assert [one.layer for one in found] == ["qkv", "output", "gate and up", "down", "lm_head"]
    assert all(one.count == model.num_layers for one in found[:-1]) and found[-1].count == 1
    norms = 2 * model.hidden_size * (2 * model.num_layers + 1)
    # The embedding is the head.
    assert sum(one.nbytes for one in found) + norms == model.weight_bytes("float16")
