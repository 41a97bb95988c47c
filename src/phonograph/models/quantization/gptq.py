"""GPTQ checkpoints of AutoGPTQ, GPTQModel and transformers: integers of 4 or 8 bits with a scale for each group.

A module has `qweight` int32 [inputs packed, outputs], `qzeros` int32 [groups, outputs packed], `scales` [groups,
outputs] and `g_idx` int32 [inputs], lowest bits first. Version 1 of the format stores zeros less one: tools subtract
0x11111111 (8 bits: 0x01010101) from the word, so that a zero of 0 borrows from the next number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from phonograph.errors import UnsupportedModelError
from phonograph.models.quantization.grouped_weight import SCALE_DTYPES, GroupedScheme, GroupedWeight, slices, unpack
from phonograph.models.quantization.scheme import LinearWeight, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(GroupedScheme):
    """GPTQ. `version` is 1 or 2 of the format. Without `zeros`, all zeros are the middle of the range."""

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

    def with_tensor(self, end: str, tensor: torch.Tensor) -> Gptq:
        """Return the format with the zeros or the order that a tensor of the file has, whatever the configuration says.

        Args:
            end: end of the tensor's name.
            tensor: the tensor.
        """
        if end == "qzeros" and not self.zeros:
            # Tools write symmetric weights in both versions with 7 or with 8 of 4 bits.
            middle = [_each(value, self.bits) for value in ((1 << (self.bits - 1)) - 1, 1 << (self.bits - 1))]
            return replace(self, zeros=not any(bool((tensor == word).all()) for word in middle))
        if end == "g_idx" and not self.ordered:
            in_order = torch.arange(tensor.numel(), dtype=torch.int32) // self.group(tensor.numel())
            return replace(self, ordered=not torch.equal(tensor.flatten().int(), in_order))
        return self

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        qweight, inputs, order_I = tensors["qweight"], weight.inputs, None
        if self.ordered:
            order_I = weight.write_order(module, tensors["g_idx"])
        weight.write_scales(module, first, tensors["scales"].t())
        if self.zeros:
            words = tensors["qzeros"] + _each(1, self.bits) if self.version == 1 else tensors["qzeros"]
            weight.write_zeros(first, unpack(words, self.bits, 1).t())
        for outputs in slices(qweight.shape[1], inputs):
            if order_I is None:
                weight.write_packed(first + outputs.start, qweight[:, outputs].t())
            else:
                values_IO = unpack(qweight[:, outputs], self.bits, 0)
                weight.write_values(first + outputs.start, values_IO[order_I].t())


def _each(value: int, bits: int) -> int:
    """Return the word, as int32, that has `value` in each of its numbers."""
    word = sum(value << place for place in range(0, 32, bits))
    return word - (1 << 32) if word >> 31 else word
