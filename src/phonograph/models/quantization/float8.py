"""Weights in FP8 (e4m3): of compressed-tensors ("float-quantized") and of Hugging Face's `fp8` configurations.

A module has `weight` [outputs, inputs] in e4m3 and a scale: one for the matrix, one for each output, or one for each
block. It is named `weight_scale` or `weight_scale_inv`, and multiplies the numbers under both names. Files may have
`input_scale` or `activation_scale` for activations in FP8. They are not read: activations stay in the model's type, or
are rounded with a scale for each row, which is more accurate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phonograph.errors import UnsupportedModelError, WeightError
from phonograph.kernels.torch.grouped import Grouped, dequantize
from phonograph.kernels.triton.gemm.product_plan import WeightFormat
from phonograph.models.quantization.grouped_weight import SCALE_DTYPES, GroupedWeight, allocate_by_group, slices
from phonograph.models.quantization.scheme import Allocate, LinearWeight, Stored

log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
_SCALE_ENDS = ("weight_scale", "weight_scale_inv")
_LARGEST, _SMALLEST_SCALE = 448.0, 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Weights in FP8.

    Attributes:
        origin: name of the format, for people.
        scales: "tensor", "channel" or "block".
        block: outputs and inputs of a block; not used for other scales.
        inverse: numbers are divided by the scales of the file.
    """

    origin: str
    scales: str
    block: tuple[int, int] = (0, 0)
    inverse: bool = False

    @property
    def name(self) -> str:
        of = {"tensor": "one scale a matrix", "channel": "a scale an output"}
        return f"{self.origin}, " + of.get(self.scales, f"blocks of {self.block[0]} by {self.block[1]}")

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        rows, columns = self.block
        shape = {"tensor": (1,), "channel": (outputs, 1)}
        scales = shape[self.scales] if self.scales in shape else (-(-outputs // rows), -(-inputs // columns))
        return {
            "weight": Stored((outputs, inputs), (FP8,)),
            **{end: Stored(scales, SCALE_DTYPES, required=False) for end in _SCALE_ENDS},
            "input_scale": Stored((1,), SCALE_DTYPES, required=False),
            "activation_scale": Stored((1,), SCALE_DTYPES, required=False),
        }

    def allocate(self, outputs: int, inputs: int, allocate: Allocate) -> LinearWeight:
        group = self._group(inputs)
        values = allocate(outputs, inputs, dtype=FP8)
        # Products with FP8 activations take one scale an output in float32.
        dtype = torch.float32 if group >= inputs else None
        scales = allocate_by_group(allocate, outputs, -(-inputs // group), values.device, dtype)
        return GroupedWeight(Grouped(values, scales, None, 8, group), inputs)

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        values_OI = tensors["weight"]
        outputs = values_OI.shape[0]
        into = weight.values.packed_OW[first : first + outputs]
        into.view(torch.uint8).copy_(values_OI.view(torch.uint8))
        if bool((into.view(torch.uint8) & 127 == 127).any()):
            raise WeightError(f"{module}.weight has numbers that are not a number; download the file again")
        ends = [end for end in _SCALE_ENDS if end in tensors]
        if len(ends) != 1:
            problem = "no scale" if not ends else "two scales"
            raise WeightError(f"{module} has {problem}; expected {' or '.join(_SCALE_ENDS)}")
        scales = tensors[ends[0]].to(torch.float32)
        scales = scales.reciprocal() if self.inverse else scales
        if self.scales == "block":
            scales = scales.repeat_interleave(self.block[0], 0)[:outputs]
        weight.write_scales(module, first, scales.reshape(-1, weight.values.scales_OG.shape[1]).expand(outputs, -1))

    def nbytes(self, outputs: int, inputs: int, element: int) -> int:
        scales = 4 if self._group(inputs) >= inputs else -(-inputs // self._group(inputs)) * element
        return outputs * (inputs + scales)

    def weight_format(self, inputs: int, dtype: str) -> WeightFormat:
        return WeightFormat(dtype, 8, self._group(inputs), is_fp8=True)

    def _group(self, inputs: int) -> int:
        return self.block[1] if self.scales == "block" else inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8AtLoad(Fp8):
    """Weights in 16 or 32 bits, rounded to FP8 with a scale an output while they are loaded."""

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        return {"weight": Stored((outputs, inputs), SCALE_DTYPES)}

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        for outputs in slices(tensors["weight"].shape[0], weight.inputs):
            values_OI = tensors["weight"][outputs].float()
            # An output of zeros may have any scale.
            scales = (values_OI.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)
            weight.write_scales(module, first + outputs.start, scales)
            rows = slice(first + outputs.start, first + outputs.stop)
            scaled = values_OI / weight.values.scales_OG[rows].float()
            weight.values.packed_OW[rows].copy_(scaled.clamp(-_LARGEST, _LARGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Head(Fp8AtLoad):
    """A language model's head in 16 or 32 bits, rounded to FP8 at load, with the error in the log."""

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        Fp8AtLoad.load(self, module, tensors, weight, first)
        assert isinstance(weight, GroupedWeight)
        values_OI, wrong, whole = tensors["weight"], 0.0, 0.0
        for outputs in slices(values_OI.shape[0], weight.inputs):
            exact = values_OI[outputs].float()
            wrong += float((dequantize(weight.values.rows(outputs.start, outputs.stop)) - exact).square().sum())
            whole += float(exact.square().sum())
        log.info("%s is in FP8; relative error of its weights %.4f", module, (wrong / whole) ** 0.5 if whole else 0.0)


def check_block(block: object) -> tuple[int, int]:
    """Return the sizes of a block.

    Raises:
        UnsupportedModelError: they are not two positive integers.
    """
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise UnsupportedModelError(f"blocks of FP8 weights are {block!r}; supported are two positive integers")
