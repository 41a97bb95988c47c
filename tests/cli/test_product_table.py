"""Kernels that are named for a model's matrices, and those that products choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phonograph.cli.product_table import Kernels, product_kernels, product_rows
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import KNOWN_DEVICES
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.kernels.triton.gemm.choose import choose
from phonograph.kernels.triton.gemm.product_plan import GemmDevice, rows_class
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.scheme import Scheme

SHAPES = [
    (4608, 3584, False),
    (3584, 3584, False),
    (2 * 18944, 3584, True),
    (3584, 18944, False),
    (896, 896, False),
    (152064, 3584, False),
]
"""outputs, inputs, and whether the weights are of gates and ups"""
SCHEMES: dict[str, Scheme | None] = {
    "dense": None,
    "fp8": Fp8(origin="fp8", scales="channel"),
    "fp8 blocks": Fp8(origin="fp8", scales="block", block=(128, 128)),
    **{
        f"{bits} bits, {group}": Gptq(bits=bits, group_size=group, version=1)
        for bits, group in ((4, 128), (4, 64), (4, 32), (8, 128), (8, -1))
    },
}


def matrix(outputs: int, inputs: int, scheme: Scheme | None, *, gated: bool = False) -> LayerMatrix:
    return LayerMatrix("name", "", (MatrixPart("part", outputs, scheme),), inputs, gated=gated)


def named(kernels: Kernels, rows: int) -> str:
    return next(kernel for most, kernel in kernels if most is None or rows <= most)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("device", ["h200", "a100-40gb", "rtx4090", "rtx5090"])
def test_names_are_those_of_the_plans(device: str, name: str) -> None:
    """For each number of rows, at both ends of each class."""
    scheme, dtype, several = SCHEMES[name], "bfloat16", 0
    for outputs, inputs, gated in SHAPES:
        one = matrix(outputs, inputs, scheme, gated=gated)
        kernels = product_kernels(one, dtype, KNOWN_DEVICES[device])
        several += len(kernels) > 1
        for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1000):
            weights = one.weight_format(dtype)
            plan = choose(one.shape, weights, rows_class(rows), GemmDevice.of(KNOWN_DEVICES[device]))
            shown = named(kernels, rows)
            assert shown.partition(",")[0] == plan.name
            written_out = scheme is not None and plan.kernel is None and not plan.fp8_rows
            assert shown.endswith("on weights written out") == written_out
    assert several == len(SHAPES)


def test_kernels_of_each_format_on_hopper() -> None:
    found = {
        name: product_kernels(matrix(4608, 3584, one), "bfloat16", KNOWN_DEVICES["h200"])
        for name, one in SCHEMES.items()
    }
    assert found["dense"] == ((1, "gemv"), (8, "gemm_small_m"), (64, "gemm_ring"), (None, "torch"))
    assert found["fp8"] == ((256, "gemm_ring"), (None, "torch._scaled_mm"))
    assert found["4 bits, 128"] == (
        (1, "gemv_integer"),
        (8, "gemm_ring_small_m"),
        (256, "gemm_ring"),
        (None, "torch, on weights written out"),
    )


def test_cpus_and_float32() -> None:
    assert product_kernels(matrix(64, 64, None), "float32", KNOWN_DEVICES["cpu"]) == ((None, "torch"),)
    written_out = ((None, "torch, on weights written out"),)
    assert product_kernels(matrix(64, 128, SCHEMES["4 bits, 128"]), "float32", KNOWN_DEVICES["h200"]) == written_out


def test_bytes_are_those_of_the_plan() -> None:
    """All but the embedding and norms of the demo model, which are of the model's type."""
    model = read_configured_model(EngineConfig(model="demo"), config_only=True)
    found = product_rows(model, "float16", KNOWN_DEVICES["h200"])
    assert [one.layer for one in found] == ["qkv", "output", "gate and up", "down", "lm_head"]
    assert all(one.count == model.num_layers for one in found[:-1]) and found[-1].count == 1
    norms = 2 * model.hidden_size * (2 * model.num_layers + 1)
    # The embedding is the head.
    assert sum(one.nbytes for one in found) + norms == model.weight_bytes("float16")


def test_matrices_that_are_in_16_bits_in_every_file() -> None:
    """Matrices of encoders have the kernels of others, and routers one of their own."""
    one, device = matrix(4096, 1024, None), KNOWN_DEVICES["h200"]
    kept = replace(one, quantizable=False)
    assert product_kernels(kept, "bfloat16", device) == product_kernels(one, "bfloat16", device)
    assert product_kernels(replace(kept, name="router"), "bfloat16", device) == ((None, "route"),)
