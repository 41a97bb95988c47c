"""Experts' weights in MXFP4: codes of 4 bits (e2m1) with a power of two (e8m0) for each 32 inputs.

A module has `blocks` uint8 [outputs, groups, 16], two codes a byte with the lower half first, and `scales` uint8
[outputs, groups]. The file has the experts of a layer in one tensor; `QuantizedModule` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phonograph.errors import UnsupportedModelError, WeightError
from phonograph.kernels.torch import fp4
from phonograph.kernels.torch.grouped import Grouped, dequantize
from phonograph.kernels.triton.gemm.product_plan import WeightFormat
from phonograph.models.quantization.grouped_weight import GroupedWeight, allocate_by_group, slices
from phonograph.models.quantization.scheme import Allocate, LinearWeight, Stored

_BYTES = fp4.GROUP // 2
"""Bytes of a group's codes."""
_LARGEST_FINITE = 252
"""Largest exponent whose weights are all finite in bfloat16 and float32: 6 * 2^125."""


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """Weights in MXFP4."""

    @property
    def name(self) -> str:
        return f"MXFP4, groups of {fp4.GROUP}"

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        if inputs % fp4.GROUP:
            raise UnsupportedModelError(
                f"MXFP4 has a scale for each {fp4.GROUP} inputs, and {inputs} is not a multiple of {fp4.GROUP}"
            )
        groups = inputs // fp4.GROUP
        return {
            "blocks": Stored((outputs, groups, _BYTES), (torch.uint8,)),
            "scales": Stored((outputs, groups), (torch.uint8,)),
        }

    def allocate(self, outputs: int, inputs: int, allocate: Allocate) -> GroupedWeight:
        packed = allocate(outputs, inputs // 8, dtype=torch.int32)
        words = fp4.num_exponent_words(inputs // fp4.GROUP)
        exponents = allocate_by_group(allocate, outputs, words, packed.device, torch.int32)
        values = Grouped(packed, exponents, None, 4, fp4.GROUP, interleaved=_in_order_of_gpu(packed.device))
        if values.interleaved and (outputs % fp4.ROWS_OF_BLOCK or packed.shape[1] % fp4.WORDS_OF_BLOCK):
            raise UnsupportedModelError(
                f"a GPU multiplies MXFP4 whose outputs are a multiple of {fp4.ROWS_OF_BLOCK} and whose inputs of "
                f"{8 * fp4.WORDS_OF_BLOCK}, not {outputs} and {inputs}; use device cpu"
            )
        return GroupedWeight(values, inputs)

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        blocks_OGB, exponents_OG, values = tensors["blocks"], tensors["scales"], weight.values
        largest = int(exponents_OG.amax())
        if largest == fp4.NOT_A_NUMBER:
            raise WeightError(f"{module} has scales that are not a number ({largest}); download the file again")
        if values.interleaved and largest > fp4.LARGEST:
            raise WeightError(
                f"{module} has scales up to 2^{largest - fp4.OFFSET}; a GPU multiplies scales up to "
                f"2^{fp4.LARGEST - fp4.OFFSET}, and device cpu larger ones"
            )
        for outputs in slices(blocks_OGB.shape[0], weight.inputs):
            rows = slice(first + outputs.start, first + outputs.stop)
            exponents = exponents_OG[outputs] + (fp4.BIAS if values.interleaved else 0)
            values.scales_OG[rows].copy_(fp4.exponent_words(exponents))
            weight.write_bytes(rows.start, blocks_OGB[outputs].flatten(1))
            if largest > _LARGEST_FINITE and bool(dequantize(values.rows(rows.start, rows.stop)).isinf().any()):
                raise WeightError(f"{module} has weights that are infinite; download the file again")

    def nbytes(self, outputs: int, inputs: int, element: int) -> int:
        return outputs * (inputs // 2 + 4 * fp4.num_exponent_words(inputs // fp4.GROUP))

    def weight_format(self, inputs: int, dtype: str) -> WeightFormat:
        # Words of integers in such groups are not interleaved, so that no other format is equal.
        return WeightFormat(dtype, 4, fp4.GROUP, interleaved=True)


def tensors_of_gguf(rows_OB: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a module's tensors from rows of blocks of a GGUF file, uint8 [outputs, bytes].

    A block is a scale and 16 bytes. The lower halves of the bytes are the codes of its first 16 inputs, and the upper
    halves are the others.
    """
    blocks = rows_OB.unflatten(1, (-1, 1 + _BYTES))
    halves = blocks[..., 1:]
    codes = torch.cat([halves & 15, halves >> 4], -1)
    return {"blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": blocks[..., 0]}


def _in_order_of_gpu(device: torch.device) -> bool:
    """Return True if words and exponents are in the order of a GPU's kernels."""
    return device.type != "cpu"
