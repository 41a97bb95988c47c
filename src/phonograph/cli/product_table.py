"""Weights of a model by kind of layer: their format, their bytes, and the kernels that multiply them.

Nothing here needs a GPU or Triton, so that it can be printed for any device. The kernels are those of `choose`, by
which products run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phonograph.core.device import DeviceSpec
from phonograph.kernels.torch.grouped import MAX_GROUPED_ROWS
from phonograph.kernels.triton.gemm.choose import choose
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import DTYPE_BYTES, ModelSpec

_ROWS = 1, 8, 16, 32, 64, 128, 256, 512
"""Rows classes; the last one stands for more rows."""

Kernels = tuple[tuple[int | None, str], ...]
"""Kernels by the largest number of rows that they multiply; None for any."""
_EXPERTS: Kernels = ((None, "expert_products"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """Matrices of a kind of layer that have one size and one format.

    Attributes:
        layer: kind of layer.
        count: number of matrices; each expert has one.
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


def product_rows(
    model: ModelSpec, dtype: str, device: DeviceSpec, cpu_products: CpuProducts | None = None
) -> list[ProductRow]:
    """Return the weights of all matrices but the embedding, which is not multiplied unless it is the head too.

    torch multiplies the matrices of a module of transformers, which are not listed.
    """
    if isinstance(model, ModuleSpec):
        return []
    found: dict[tuple[str, str, int, int], ProductRow] = {}
    matrices = [matrix for layer in model.layers for matrix in layer.matrices]
    head = () if model.pooler else (model.head,)
    experts = [one for layer in model.kinds if isinstance(one := layer.feed_forward, LayerExperts)]
    joint = {matrix for one in experts if one.shared and one.gpu_routing.shared for matrix in one.shared.matrices}
    for matrix in (*matrices, *head):
        one = _weights(matrix, dtype, device, cpu_products)
        if matrix in joint and device.kind != "cpu":
            one = replace(one, kernels=_EXPERTS)
        key = one.layer, one.format, one.outputs, one.inputs
        before = found.get(key)
        count, nbytes = (0, 0) if before is None else (before.count, before.nbytes)
        found[key] = replace(one, count=count + one.count, nbytes=nbytes + one.nbytes)
    order = [*dict.fromkeys(matrix.name for matrix in (*matrices, *head))]
    return sorted(found.values(), key=lambda one: order.index(one.layer))


def _weights(matrix: LayerMatrix, dtype: str, device: DeviceSpec, cpu_products: CpuProducts | None) -> ProductRow:
    element, scheme, inputs = DTYPE_BYTES[dtype], matrix.scheme, matrix.num_inputs
    nbytes, count = matrix.nbytes(element), matrix.num_experts or 1
    if scheme is not None and cpu_products is not None:
        nbytes = count * sum(cpu_products.nbytes(scheme, part.num_outputs, inputs, element) for part in matrix.parts)
    return ProductRow(
        layer=matrix.name,
        count=count,
        outputs=matrix.expert_outputs,
        inputs=inputs,
        format=dtype if scheme is None else scheme.name,
        nbytes=nbytes,
        kernels=product_kernels(matrix, dtype, device, cpu_products),
    )


def product_kernels(
    matrix: LayerMatrix, dtype: str, device: DeviceSpec, cpu_products: CpuProducts | None = None
) -> Kernels:
    """Return what multiplies a matrix on a device, by the largest number of rows."""
    if device.kind == "cpu":
        return _cpu_kernels(matrix.scheme, matrix.num_inputs, dtype, cpu_products)
    if matrix.num_experts is not None:
        return _EXPERTS
    if matrix.name == "router":
        return ((None, "route"),)
    weights, gemm_device = matrix.weight_format(dtype), GemmDevice.of(device)
    names: dict[int | None, str] = {}
    for rows in _ROWS:
        plan = choose(matrix.shape, weights, rows, gemm_device)
        writes_out = plan.kernel is None and not plan.fp8_rows and matrix.scheme is not None
        name = plan.name + (", on weights written out" if writes_out else "")
        if names and [*names.values()][-1] == name:
            names.popitem()
        names[rows if rows <= MAX_GROUPED_ROWS else None] = name
    return tuple(names.items())


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
