"""Checkpoints of compressed-tensors in the format "pack-quantized": integers of 4 or 8 bits, activations in 16.

A module has `weight_packed` int32 [outputs, inputs packed], lowest bits first, of numbers shifted to be positive;
`weight_scale` [outputs, groups]; `weight_shape` int64 [2]; for asymmetric weights `weight_zero_point` int32 [outputs
packed, groups], shifted likewise; and for an order of activation `weight_g_idx` int32 [inputs].
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
