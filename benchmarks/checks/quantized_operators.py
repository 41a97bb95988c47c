"""Products of quantized weights by different systems with one interface: ours, vLLM's CUDA operators, and torch's.

An operator is built from plain weights, which it packs in its own order, as many copies as are wanted.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checks.random_weights import DTYPE, FP8, GROUP, marlin_scales, round_to_fp8
from phonograph.kernels.fp8_activations import ScaledScratch
from phonograph.kernels.torch.grouped import Grouped, interleave
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.kernels.triton.gemm.choose import MAX_16_BIT_ROWS
from phonograph.kernels.triton.gemm.product import format_of
from phonograph.kernels.triton.gemm.product_plan import GemmDevice, ProductShape
from phonograph.kernels.triton.gemm.run_product import GemmScratch

OURS, MARLIN, MACHETE, CUTLASS, TORCH = "Phonograph", "Marlin", "Machete", "CUTLASS", "torch._scaled_mm"
UINT4_LESS_8 = (1 << 50) | (8 << 17) | (4 << 8)
"""vLLM's number of the type of GPTQ's weights, `scalar_types.uint4b8.id`."""
LIBRARY = "_C_stable_libtorch*.so"
ROUNDED_IN_16_BITS, ROUNDED_TO_FP8 = 1e-2, 5e-2
"""Largest error of a row: norm of the difference over norm of the row."""

Run = Callable[[int], torch.Tensor]
"""Computes rows @ weight^T with the copy of the weights that has this number."""
Operator = Callable[[torch.Tensor], Run]
"""Prepares the product of rows [M, K], and returns it."""


def ours(weight: Grouped, copies: int) -> Operator:
    outputs, inputs = weight.packed_OW.shape[0], weight.columns()
    device = weight.packed_OW.device
    if weight.bits == 4:
        weight = weight._replace(packed_OW=interleave(weight.packed_OW), interleaved=True)
    held = [
        weight._replace(packed_OW=words, scales_OG=scales.t())
        for words, scales in _copies(copies, weight.packed_OW, weight.scales_OG.t())
    ]
    scratch = GemmScratch.make(device)._replace(dequantized=torch.empty(outputs * inputs, dtype=DTYPE, device=device))

    def operator(x_MK: torch.Tensor) -> Run:
        num_rows = len(x_MK)
        out_MN = x_MK.new_empty(num_rows, outputs)
        scaled = ScaledScratch(
            torch.empty(x_MK.numel(), dtype=FP8, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty_like(out_MN).view(-1),
        )
        shape, room = ProductShape(outputs, inputs), scratch._replace(scaled=scaled)
        products = [
            BoundProduct(one, None, shape, format_of(one, x_MK.dtype), device=_this_gpu(), scratch=room) for one in held
        ]

        def run(copy: int) -> torch.Tensor:
            products[copy].store(x_MK, out_MN)
            return out_MN

        return run

    return operator


def marlin(weight: Grouped, copies: int) -> Operator:
    """vLLM's `marlin_gemm` as its GPTQ layers call it: sums of split inputs in float32, no order, no zeros."""
    ops, device = vllm_operators(), weight.packed_OW.device
    outputs, inputs = weight.packed_OW.shape[0], weight.columns()
    empty = torch.empty(0, dtype=torch.int32, device=device)
    packed = ops.gptq_marlin_repack(weight.packed_OW.t().contiguous(), empty, inputs, outputs, 4, False)
    held = _copies(copies, packed, marlin_scales(weight.scales_OG))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    locks = torch.zeros(num_sms, dtype=torch.int32, device=device)

    def operator(x_MK: torch.Tensor) -> Run:
        sizes = len(x_MK), outputs, inputs
        # Inputs complete on this GPU, no sums by atomics, sums in float32, zeros as integers.
        options = True, False, True, False

        def run(copy: int) -> torch.Tensor:
            words, scales = held[copy]
            before, after = (x_MK, None, words, None, scales, None, None), (empty, empty, empty, locks)
            return ops.marlin_gemm(*before, *after, UINT4_LESS_8, *sizes, *options)

        return run

    return operator


def machete(weight: Grouped, copies: int) -> Operator:
    """vLLM's `machete_mm` with the schedule that it chooses itself."""
    ops = vllm_operators()
    # The words of an output lie side by side, as the operator wants them.
    packed = ops.machete_prepack_B(weight.packed_OW.t(), DTYPE, UINT4_LESS_8, DTYPE)
    held = _copies(copies, packed, weight.scales_OG.t().contiguous())

    def operator(x_MK: torch.Tensor) -> Run:
        def run(copy: int) -> torch.Tensor:
            words, scales = held[copy]
            return ops.machete_mm(x_MK, words, UINT4_LESS_8, None, scales, None, GROUP, None, None, None)

        return run

    return operator


def cutlass(weight: Grouped, copies: int) -> Operator:
    """vLLM's `cutlass_scaled_mm`, behind its operator that rounds each row to FP8."""
    ops = vllm_operators()
    held = _copies(copies, weight.packed_OW, weight.scales_OG.contiguous())

    def operator(x_MK: torch.Tensor) -> Run:
        rounded_MK = torch.empty_like(x_MK, dtype=FP8)
        scales_M1 = torch.empty(len(x_MK), 1, dtype=torch.float32, device=x_MK.device)
        out_MN = x_MK.new_empty(len(x_MK), weight.packed_OW.shape[0])

        def run(copy: int) -> torch.Tensor:
            values_NK, scales_N1 = held[copy]
            ops.dynamic_per_token_scaled_fp8_quant(rounded_MK, x_MK, scales_M1, None)
            ops.cutlass_scaled_mm(out_MN, rounded_MK, values_NK.t(), scales_M1, scales_N1, None)
            return out_MN

        return run

    return operator


def torch_alone(weight: Grouped, copies: int) -> Operator:
    held = _copies(copies, weight.packed_OW, weight.scales_OG)

    def operator(x_MK: torch.Tensor) -> Run:
        rounded_MK, scales_M1 = round_to_fp8(x_MK)
        out_MN = x_MK.new_empty(len(x_MK), weight.packed_OW.shape[0])

        def run(copy: int) -> torch.Tensor:
            values_NK, scales_N1 = held[copy]
            return torch._scaled_mm(
                rounded_MK,
                values_NK.t(),
                scales_M1,
                scales_N1.t(),
                out_dtype=out_MN.dtype,
                use_fast_accum=True,
                out=out_MN,
            )

        return run

    return operator


BUILDERS: dict[int, dict[str, Callable[[Grouped, int], Operator]]] = {
    4: {OURS: ours, MARLIN: marlin, MACHETE: machete},
    8: {OURS: ours, CUTLASS: cutlass, TORCH: torch_alone},
}
"""Operators by bits of a weight and by name."""


@functools.cache
def vllm_operators() -> Any:
    """Load vLLM's library of operators, without its Python, and return their namespace.

    Raises:
        ModuleNotFoundError: there is no vLLM, or none with this library.
    """
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob(LIBRARY)]
    if not files:
        raise ModuleNotFoundError(f"no vllm/{LIBRARY} in PYTHONPATH")
    torch.ops.load_library(str(files[0]))
    return torch.ops._C


def bound_of(name: str, bits: int, num_rows: int) -> float:
    """Return the largest error that an operator may have."""
    in_16_bits = bits == 4 or (name == OURS and num_rows <= MAX_16_BIT_ROWS and not _this_gpu().has_gluon)
    return ROUNDED_IN_16_BITS if in_16_bits else ROUNDED_TO_FP8


def _this_gpu() -> GemmDevice:
    """Return the GPU in use; without one a GPU on which activations stay in 16 bits."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    return GemmDevice.with_capability(capability)


def _copies(count: int, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return [tensors, *(tuple(one.clone() for one in tensors) for _ in range(count - 1))]
