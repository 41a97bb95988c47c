"""Choice of the products of quantized weights on a CPU, by a measurement of some milliseconds.

Flags of a CPU do not tell whether torch's operator for packed weights is fast: some builds have only its scalar code,
which takes thirteen times as long as float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from phonograph.core.host_resources import available_memory
from phonograph.engine.memory import gib
from phonograph.errors import ConfigError
from phonograph.kernels.torch import int4pack
from phonograph.kernels.torch.grouped import Grouped
from phonograph.models.quantization.cpu_weights import CpuProducts, has_packed_form
from phonograph.models.spec import ModelSpec

_INPUTS, _OUTPUTS = 576, 1536
_COPIES = 16
"""Matrices that single rows take turns with: 57 MB in float32, since a model's weights do not stay in caches either."""
_TILE_ROWS = 64
_ROWS = 4, 8, 16, 32, 64
"""Numbers of rows that the operator is measured with; blocks of four rows share the unpacking."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one row in each way, and what multiplies more rows."""

    int4: float
    float32: float
    operator_rows: int
    tile_dtype: str


def plan_cpu_products(setting: str, model: ModelSpec, dtype: str) -> CpuProducts | None:
    """Return the products of a model's quantized weights, or None if it has none.

    Raises:
        ConfigError: "int4" has no operator here.
    """
    schemes = [scheme for scheme, _, _ in model.quantized_matrices()]
    if not schemes:
        return None
    if setting == "float32":
        reason = f"cpu_products=float32; weights are dequantized to {dtype} at load"
        return CpuProducts(int4=False, dequantize=True, reason=reason)
    missing = None
    if not any(has_packed_form(scheme, inputs) for scheme, _, inputs in model.quantized_matrices()):
        missing = "the formats of the weights have no packed form"
    else:
        missing = int4pack.missing()
    if missing is not None:
        if setting == "int4":
            raise ConfigError("cpu_products", setting, f"{missing}; float32 works")
        return _with_rest(model, dtype, CpuProducts(int4=False, dequantize=True, reason=missing))
    measured = measure()
    times = (
        f"one row of {_OUTPUTS} x {_INPUTS} takes {measured.int4:.0f} us packed in 4 bits, in bfloat16, and "
        f"{measured.float32:.0f} us in float32"
    )
    if setting == "auto" and measured.float32 <= measured.int4:
        return _with_rest(model, dtype, CpuProducts(int4=False, dequantize=True, reason=times))
    chosen = CpuProducts(
        int4=True,
        dequantize=True,
        operator_rows=measured.operator_rows,
        tile_dtype=measured.tile_dtype,
        reason=f"{times}; cpu_products=float32 is exact",
    )
    return _with_rest(model, dtype, chosen)


def _with_rest(model: ModelSpec, dtype: str, products: CpuProducts) -> CpuProducts:
    """Return the products with weights that are not packed in groups, if they would not fit when dequantized."""
    model = products.with_head(model)
    needed, half = products.weight_bytes(model, dtype), available_memory() // 2
    if needed <= half:
        return products
    reason = (
        f"{products.reason}; dequantized at load they would take {gib(needed)}, more than half of the free "
        "memory, so that each step unpacks them"
    )
    grouped = replace(products, dequantize=False, reason=reason)
    return products if grouped.weight_bytes(model, dtype) == needed else grouped


@cache
def measure() -> Measured:
    """Measure products with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _measure_products()
    finally:
        torch.set_num_threads(threads)


def _measure_products() -> Measured:
    words = torch.full((_OUTPUTS, _INPUTS // 8), 0x12345678, dtype=torch.int32)
    grouped = Grouped(words, torch.ones(_OUTPUTS, _INPUTS // 32), None, 4, 32)
    by_operator = int4pack.pack(grouped, max(_ROWS), torch.float32)
    by_tiles = {
        name: by_operator._replace(operator_rows=0, tile_dtype=getattr(torch, name)) for name in ("bfloat16", "float32")
    }

    def of(rows: int, weight: int4pack.Int4Packed) -> float:
        x_TI = torch.ones(rows, _INPUTS)
        return _microseconds(lambda: int4pack.product(x_TI, weight))

    tile_dtype = min(by_tiles, key=lambda name: of(_TILE_ROWS, by_tiles[name]))
    operator_rows = 1
    for rows in _ROWS:
        if of(rows, by_operator) > of(rows, by_tiles[tile_dtype]):
            break
        operator_rows = rows
    x_1I = torch.ones(1, _INPUTS)
    copies = [by_operator._replace(packed_PW=by_operator.packed_PW.clone()) for _ in range(_COPIES)]
    int4 = _microseconds(lambda: [int4pack.product(x_1I, weight) for weight in copies]) / _COPIES
    dense_CIO = torch.ones(_COPIES, _INPUTS, _OUTPUTS)
    float32 = _microseconds(lambda: [torch.mm(x_1I, dense_IO) for dense_IO in dense_CIO]) / _COPIES
    return Measured(int4, float32, operator_rows, tile_dtype)


def _microseconds(run: Callable[[], object]) -> float:
    """Return the least of some runs."""
    taken: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return 1e6 * min(taken)
