"""AWQ checkpoints of AutoAWQ in its "gemm" layout: integers of 4 bits with a scale and a zero for each group.

A module has `qweight` int32 [inputs, outputs packed], `qzeros` int32 [groups, outputs packed] and `scales` [groups,
outputs]. A word holds the outputs 0 2 4 6 1 3 5 7 of eight, from the lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phonograph.errors import UnsupportedModelError
from phonograph.models.quantization.grouped_weight import SCALE_DTYPES, GroupedScheme, GroupedWeight, slices, unpack
from phonograph.models.quantization.scheme import LinearWeight, Stored

_PACKED = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in its word of each of eight outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(GroupedScheme):
    """AWQ of 4 bits. With `zeros_required` False, a file without `qzeros` has zeros in the middle of the range."""

    zeros_required: bool = True

    @property
    def name(self) -> str:
        return self.describe("AWQ")

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        if outputs % _PACKED:
            raise UnsupportedModelError(f"AWQ packs 8 outputs into a word, and {outputs} is not a multiple of 8")
        groups = self.num_groups(inputs)
        return {
            "qweight": Stored((inputs, outputs // _PACKED), (torch.int32,)),
            "qzeros": Stored((groups, outputs // _PACKED), (torch.int32,), required=self.zeros_required),
            "scales": Stored((groups, outputs), SCALE_DTYPES),
        }

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        qweight = tensors["qweight"]
        weight.write_scales(module, first, tensors["scales"].t())
        middle_OG = torch.full_like(tensors["scales"].t(), 8, dtype=torch.uint8)
        weight.write_zeros(first, _outputs_first(tensors["qzeros"]) if "qzeros" in tensors else middle_OG)
        for outputs in slices(qweight.shape[1] * _PACKED, weight.inputs):
            words = qweight[:, outputs.start // _PACKED : outputs.stop // _PACKED]
            weight.write_values(first + outputs.start, _outputs_first(words))


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """Return the integers [outputs, n] of words [n, outputs packed]."""
    values = unpack(words, 4, 1).unflatten(1, (-1, _PACKED))
    return values[:, :, _PLACES].flatten(1).t()
