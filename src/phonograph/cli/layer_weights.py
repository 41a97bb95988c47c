"""Weights of a model by kind of layer: their format, their bytes, and the kernels that multiply them.

Nothing here needs a GPU or Triton, so that it can be told about any device. A test compares the kernels with those that
products choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from phonograph.core.device import DeviceSpec
from phonograph.kernels.scaled_products import device_has_scaled_products, max_16_bit_rows, takes_scaled_product
from phonograph.kernels.torch.grouped import MAX_GROUPED_ROWS
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.quantization.grouped_weight import GroupedScheme
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import DTYPE_BYTES, ModelSpec

_NAMES = "qkv", "output", "gate and up", "down"
"""Names of a layer's matrices, in the order of `ModelSpec.matrices`."""

Kernels = tuple[tuple[int | None, str], ...]
"""Kernels by the largest number of rows that they multiply; None for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Matrices of a kind of layer that have one format.

    Attributes:
        layer: kind of layer.
        count: number of matrices.
        outputs: of a matrix.
        inputs: of a matrix.
        format: format of the weights.
        nbytes: bytes of all of them.
        kernels: what multiplies them.
    """

    layer: str
    count: int
    outputs: int
    inputs: int
    format: str
    nbytes: int
    kernels: Kernels


def layer_weights(
    model: ModelSpec, dtype: str, device: DeviceSpec, cpu_products: CpuProducts | None = None
) -> list[LayerWeights]:
    """Return the weights of all matrices but the embedding, which is not multiplied unless it is the head too."""
    make = partial(_weights, dtype=dtype, device=device, cpu_products=cpu_products)
    found: dict[tuple[int, str], LayerWeights] = {}
    for layer in range(model.num_layers):
        for place, matrix in enumerate(model.matrices(layer)):
            parts = tuple(matrix.parts.values())
            one = make(_NAMES[place], model.matrix_scheme(matrix), parts, matrix.inputs)
            before = found.get((place, one.format))
            count, nbytes = (0, 0) if before is None else (before.count, before.nbytes)
            found[place, one.format] = replace(one, count=count + 1, nbytes=nbytes + one.nbytes)
    head = make("lm_head", model.lm_head_scheme, (model.vocab_size,), model.hidden_size)
    return [found[key] for key in sorted(found, key=lambda key: key[0])] + [head]


def _weights(
    layer: str,
    scheme: Scheme | None,
    parts: Sequence[int],
    inputs: int,
    *,
    dtype: str,
    device: DeviceSpec,
    cpu_products: CpuProducts | None,
) -> LayerWeights:
    element, outputs = DTYPE_BYTES[dtype], sum(parts)

    def nbytes(part: int) -> int:
        if scheme is None:
            return part * inputs * element
        if cpu_products is None:
            return scheme.nbytes(part, inputs, element)
        return cpu_products.nbytes(scheme, part, inputs, element)

    return LayerWeights(
        layer=layer,
        count=1,
        outputs=outputs,
        inputs=inputs,
        format=dtype if scheme is None else scheme.name,
        nbytes=sum(map(nbytes, parts)),
        kernels=product_kernels(scheme, outputs, inputs, dtype, device, cpu_products),
    )


def product_kernels(
    scheme: Scheme | None,
    outputs: int,
    inputs: int,
    dtype: str,
    device: DeviceSpec,
    cpu_products: CpuProducts | None = None,
) -> Kernels:
    """Return what multiplies a matrix on a device. Several kernels for one number of rows are chosen by the sizes."""
    if device.kind == "cpu":
        return _cpu_kernels(scheme, inputs, dtype, cpu_products)
    hopper, has_kernels = device.capability[0] == 9, dtype != "float32"
    if scheme is None:
        ring = "gemm_ring, " if hopper else ""
        own = ((1, "gemv"), (MAX_GROUPED_ROWS, f"gemm_small_m, {ring}gemm_tiled or torch"))
        return (*(own if has_kernels else ()), (None, "torch"))
    written_out = (None, "torch, on weights written out")
    if not has_kernels:
        return (written_out,)
    has_fp8_rows = scheme.has_output_scales(inputs) and takes_scaled_product(outputs, inputs)
    if has_fp8_rows and device_has_scaled_products(device.capability, dtype):
        few = max_16_bit_rows(hopper)
        own = (few, "gemm_grouped_small_m") if few else (MAX_GROUPED_ROWS, "gemm_ring or torch._scaled_mm")
        return own, (None, "torch._scaled_mm")
    if isinstance(scheme, GroupedScheme):
        group = scheme.group(inputs)
        if hopper and scheme.bits == 4 and group % 128 == 0:
            few = "gemm_ring_small_m or gemm_grouped_small_m"
            return (1, f"gemv_integer, {few}"), (8, few), (MAX_GROUPED_ROWS, "gemm_ring"), written_out
        fits = group == 32 or group % (128 if scheme.bits == 4 and group != 64 else 64) == 0
        if not fits and not (scheme.bits == 8 and group >= inputs):
            return (written_out,)
    return (32, "gemm_grouped_small_m"), (MAX_GROUPED_ROWS, "gemm_tiled"), written_out


def _cpu_kernels(scheme: Scheme | None, inputs: int, dtype: str, cpu_products: CpuProducts | None) -> Kernels:
    if scheme is None or cpu_products is None:
        return ((None, "torch"),)
    match cpu_products.form(scheme, inputs):
        case "int4":
            operator = "torch._weight_int4pack_mm_for_cpu, packed in 4 bits, in bfloat16"
            tiles = f"torch, unpacked in tiles of {cpu_products.tile_dtype}"
            return (cpu_products.operator_rows, operator), (None, tiles)
        case "dequantized":
            return ((None, f"torch, dequantized to {dtype} at load"),)
        case _:
            return ((None, "torch, dequantized in tiles"),)
