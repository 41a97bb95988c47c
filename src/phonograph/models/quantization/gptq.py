"""GPTQ checkpoints of AutoGPTQ, GPTQModel and transformers: integers of 4 or 8 bits with a scale for each group.

A module has `qweight` int32 [inputs packed, outputs], `qzeros` int32 [groups, outputs packed], `scales` [groups,
outputs] and `g_idx` int32 [inputs], lowest bits first. The first version of the format stores zeros less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phonograph.errors import UnsupportedModelError, WeightError
from phonograph.models.quantization.grouped_weight import SCALE_DTYPES, GroupedScheme, GroupedWeight, slices, unpack
from phonograph.models.quantization.scheme import LinearWeight, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(GroupedScheme):
    """GPTQ. `version` is 1 or 2 of the format. Without `zeros`, `qzeros` of the file are not read."""

    version: int

    @property
    def name(self) -> str:
        return self.describe("GPTQ")

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        packed = 32 // self.bits
        if inputs % packed or outputs % packed:
            raise UnsupportedModelError(
                f"GPTQ of {self.bits} bits packs {packed} numbers into a word, of which {inputs} inputs or "
                f"{outputs} outputs are not a multiple"
            )
        groups = self.num_groups(inputs)
        return {
            "qweight": Stored((inputs // packed, outputs), (torch.int32,)),
            "qzeros": Stored((groups, outputs // packed), (torch.int32,)),
            "scales": Stored((groups, outputs), SCALE_DTYPES),
            "g_idx": Stored((inputs,), (torch.int32,), required=self.ordered),
        }

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        qweight, inputs, order_I = tensors["qweight"], weight.inputs, None
        if self.ordered:
            order_I = weight.write_order(module, tensors["g_idx"])
        elif "g_idx" in tensors:
            expected = torch.arange(inputs, dtype=torch.int32, device=weight.device) // self.group(inputs)
            if not torch.equal(tensors["g_idx"], expected):
                raise WeightError(f"{module}.g_idx is not in order, and the configuration says desc_act=false")
        weight.write_scales(module, first, tensors["scales"].t())
        if self.zeros:
            weight.write_zeros(first, unpack(tensors["qzeros"], self.bits, 1).t() + (self.version == 1))
        for outputs in slices(qweight.shape[1], inputs):
            if order_I is None:
                weight.write_packed(first + outputs.start, qweight[:, outputs].t())
            else:
                values_IO = unpack(qweight[:, outputs], self.bits, 0)
                weight.write_values(first + outputs.start, values_IO[order_I].t())
