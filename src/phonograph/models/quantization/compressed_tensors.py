"""Checkpoints of compressed-tensors with integer weights: "pack-quantized" and "int-quantized".

A module of "pack-quantized" (4 or 8 bits, activations in 16 bits) has `weight_packed` int32 [outputs, inputs packed],
lowest bits first, of numbers shifted to be positive; `weight_scale` [outputs, groups]; `weight_shape` int64 [2]; for
asymmetric weights `weight_zero_point` int32 [outputs packed, groups], shifted likewise; and for an order of activation
`weight_g_idx` int32 [inputs].

A module of "int-quantized" (W8A8) has `weight` int8 [outputs, inputs]; `weight_scale` [outputs, groups], or [1] for the
matrix; and for asymmetric weights `weight_zero_point` int8 of the same shape. Files may have `input_scale` and
`input_zero_point` for activations in int8. Activations stay in the model's type here, which is more accurate, so these
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phonograph.errors import UnsupportedModelError, WeightError
from phonograph.models.quantization.grouped_weight import SCALE_DTYPES, GroupedScheme, GroupedWeight, slices, unpack
from phonograph.models.quantization.scheme import LinearWeight, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class PackQuantized(GroupedScheme):
    """Packed integers of compressed-tensors."""

    @property
    def name(self) -> str:
        return self.describe("compressed-tensors")

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        packed = 32 // self.bits
        groups = self.num_groups(inputs)
        if self.zeros and outputs % packed:
            raise UnsupportedModelError(f"{outputs} outputs are not a multiple of {packed}, by which zeros are packed")
        stored = {
            "weight_packed": Stored((outputs, -(-inputs // packed)), (torch.int32,)),
            "weight_scale": Stored((outputs, groups), SCALE_DTYPES),
            "weight_shape": Stored((2,), (torch.int64, torch.int32), required=False),
        }
        if self.zeros:
            stored["weight_zero_point"] = Stored((outputs // packed, groups), (torch.int32,))
        if self.ordered:
            stored["weight_g_idx"] = Stored((inputs,), (torch.int32,))
        return stored

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        packed_OW = tensors["weight_packed"]
        expected = [packed_OW.shape[0], weight.inputs]
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != expected:
            raise WeightError(f"{module}.weight_shape is {tensors['weight_shape'].tolist()}; expected {expected}")
        weight.write_scales(module, first, tensors["weight_scale"])
        if self.zeros:
            weight.write_zeros(first, unpack(tensors["weight_zero_point"], self.bits, 0))
        order_I = weight.write_order(module, tensors["weight_g_idx"]) if self.ordered else None
        for outputs in slices(packed_OW.shape[0], weight.inputs):
            if order_I is None:
                weight.write_packed(first + outputs.start, packed_OW[outputs])
            else:
                values_OI = unpack(packed_OW[outputs], self.bits, 1)
                weight.write_values(first + outputs.start, values_OI[:, order_I])


@dataclass(frozen=True, slots=True, kw_only=True)
class IntQuantized(GroupedScheme):
    """Integers of compressed-tensors, one a byte. With `one_scale`, a matrix has one scale and one zero."""

    one_scale: bool = False

    @property
    def name(self) -> str:
        return self.describe("compressed-tensors int8") + (", one scale a matrix" if self.one_scale else "")

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        scales = (1,) if self.one_scale else (outputs, self.num_groups(inputs))
        return {
            "weight": Stored((outputs, inputs), (torch.int8,)),
            "weight_scale": Stored(scales, SCALE_DTYPES),
            "weight_zero_point": Stored(scales, (torch.int8,), required=self.zeros),
            "input_scale": Stored((1,), SCALE_DTYPES, required=False),
            "input_zero_point": Stored((1,), (torch.int8,), required=False),
        }

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        values_OI = tensors["weight"]
        shape_OG = values_OI.shape[0], weight.values.scales_OG.shape[1]
        weight.write_scales(module, first, tensors["weight_scale"].view(-1, shape_OG[1]).expand(shape_OG))
        if self.zeros:
            zeros_OG = _shifted(tensors["weight_zero_point"])
            weight.write_zeros(first, zeros_OG.view(-1, shape_OG[1]).expand(shape_OG))
        elif "weight_zero_point" in tensors and bool(tensors["weight_zero_point"].any()):
            raise WeightError(f"{module}.weight_zero_point is not zero, and the configuration says symmetric=true")
        for outputs in slices(shape_OG[0], weight.inputs):
            weight.write_values(first + outputs.start, _shifted(values_OI[outputs]))


def _shifted(values: torch.Tensor) -> torch.Tensor:
    """Return int8 values plus 128, uint8."""
    return values.view(torch.uint8) ^ 128
