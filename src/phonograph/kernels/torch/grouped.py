"""Products with weights of 4 or 8 bits that have a scale for each group of inputs, in torch's operators.

Weights are unpacked tile by tile, so that a second copy of a matrix never exists. This is the reference of the GPU's
kernels. A CPU packs or dequantizes weights at load, and runs this where memory allows neither.

Shapes: T tokens, I inputs, O outputs, G groups of inputs, W words of 32 bits of an output's weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.torch.fp4 import BIAS, ROWS_OF_BLOCK, dequantize_fp4, from_blocks, gather

TILE = 1 << 19
"""Weights that are unpacked at once: 2 MiB in float32, which stay in a core's cache until they are multiplied."""
MAX_GROUPED_ROWS = 256
"""Most rows for which a GPU multiplies grouped weights by kernels of their own. For more it dequantizes the matrix."""


class Grouped(NamedTuple):
    """Weights: (value - zero) * scale + offset of integers, or value * scale of FP8 and FP4.

    Attributes:
        packed_OW: int32, values along the inputs, lowest bits first, with whole groups, so that I is rounded up; or
            [O, I] in float8_e4m3fn, which has no zeros.
        scales_OG: in the type of the products; of FP8 with one scale an output in float32; of FP4 int32, four exponents
            of groups a word (`fp4`).
        zeros_OG: uint8, or None for 2 ** (bits - 1) everywhere.
        bits: 4 or 8 of a value.
        group: inputs of a group.
        order_I: int64, the input of x that each column multiplies; None if they are in order.
        offsets_OG: in the type of the scales; None for 0 everywhere.
        interleaved: the values of four words are in the order of `interleave`. Values of FP4 are then in the order
            of `fp4.spread` and words in that of `fp4.in_blocks`, and exponents have `fp4.BIAS`.
    """

    packed_OW: torch.Tensor
    scales_OG: torch.Tensor
    zeros_OG: torch.Tensor | None
    bits: int
    group: int
    order_I: torch.Tensor | None = None
    offsets_OG: torch.Tensor | None = None
    interleaved: bool = False

    def columns(self) -> int:
        """Return the columns of the packed values, whole groups included."""
        return self.packed_OW.shape[1] * self.packed_OW.element_size() * 8 // self.bits

    def has_equal_strides(self) -> bool:
        """Return True if zeros and offsets have the strides of the scales, as kernels require."""
        others = (self.zeros_OG, self.offsets_OG)
        return all(other is None or other.stride() == self.scales_OG.stride() for other in others)

    def is_fp8(self) -> bool:
        """Return True for weights in FP8, False for integers."""
        return self.packed_OW.dtype == torch.float8_e4m3fn

    def is_fp4(self) -> bool:
        """Return True for weights in FP4."""
        return self.scales_OG.dtype == torch.int32

    def is_int8(self) -> bool:
        """Return True for integers of 8 bits."""
        return self.bits == 8 and not self.is_fp8()

    def has_output_scales(self) -> bool:
        """Return True for FP8 with one scale an output, in float32."""
        return self.is_fp8() and self.scales_OG.shape[1] == 1 and self.scales_OG.dtype == torch.float32

    def rows(self, first: int, last: int) -> Grouped:
        """Return the outputs from `first` up to `last`, as views. On a GPU, FP4 has whole blocks of them (`fp4`)."""
        return self._replace(
            packed_OW=self.packed_OW[first:last],
            scales_OG=self.scales_OG[first:last],
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[first:last],
            offsets_OG=None if self.offsets_OG is None else self.offsets_OG[first:last],
        )

    def tiles(self) -> list[tuple[int, int]]:
        """Return the first and the last output, exclusive, of each tile of about `TILE` weights."""
        outputs = self.scales_OG.shape[0]
        step = max(1, TILE // self.columns() // ROWS_OF_BLOCK) * ROWS_OF_BLOCK
        return [(first, min(first + step, outputs)) for first in range(0, outputs, step)]


def dequantize(weight: Grouped) -> torch.Tensor:
    """Return the weights, [O, G * group] or for FP8 [O, I], in the order of the groups.

    They are in the type of the scales, or in bfloat16 for FP4.
    """
    outputs, groups = weight.scales_OG.shape
    if weight.is_fp8():
        return _dequantize_fp8(weight)
    packed_OW = weight.packed_OW
    if weight.interleaved:
        packed_OW = deinterleave(gather(from_blocks(packed_OW)) if weight.is_fp4() else packed_OW)
    if weight.is_fp4():
        return dequantize_fp4(packed_OW, weight.scales_OG, BIAS if weight.interleaved else 0)
    bytes_OB = packed_OW.view(torch.uint8)
    width = bytes_OB.shape[1] * 8 // weight.bits
    values = torch.empty(outputs, width, dtype=weight.scales_OG.dtype, device=weight.scales_OG.device)
    if weight.bits == 8:
        values.copy_(bytes_OB)
    else:
        pairs = values.view(outputs, -1, 2)
        pairs[..., 0].copy_(bytes_OB & 15)
        pairs[..., 1].copy_(bytes_OB >> 4)
    values = values[:, : groups * weight.group]
    grouped = values.unflatten(1, (groups, weight.group))
    if weight.zeros_OG is None:
        grouped.sub_(1 << (weight.bits - 1))
    else:
        grouped.sub_(weight.zeros_OG.unsqueeze(-1))
    grouped.mul_(weight.scales_OG.unsqueeze(-1))
    if weight.offsets_OG is not None:
        grouped.add_(weight.offsets_OG.unsqueeze(-1))
    return values


def interleave(packed_OW: torch.Tensor) -> torch.Tensor:
    """Return words of 4-bit values in the order of Hopper's tensor cores.

    Word w of four gets columns 8 p + 2 w and 8 p + 2 w + 1 of their 32 columns in its lower and upper half, for p from
    0 to 3: the part of a tile of weights that one of four threads holds.

    Args:
        packed_OW: words with the lowest bits first, a multiple of four of each output.
    """
    words_OB4 = packed_OW.unflatten(1, (-1, 4))
    found = torch.zeros_like(words_OB4)
    for w in range(4):
        for p in range(4):
            pair = words_OB4[..., p] >> (8 * w)
            found[..., w] |= ((pair & 15) << (4 * p)) | (((pair >> 4) & 15) << (4 * p + 16))
    return found.flatten(1)


def deinterleave(packed_OW: torch.Tensor) -> torch.Tensor:
    """Return words with the lowest bits first from the result of `interleave`."""
    words_OB4 = packed_OW.unflatten(1, (-1, 4))
    found = torch.zeros_like(words_OB4)
    for w in range(4):
        for p in range(4):
            low, high = words_OB4[..., w] >> (4 * p), words_OB4[..., w] >> (4 * p + 16)
            found[..., p] |= ((low & 15) | ((high & 15) << 4)) << (8 * w)
    return found.flatten(1)


def _dequantize_fp8(weight: Grouped) -> torch.Tensor:
    """Convert by bits: an e4m3 number is 256 times the float16 that has its bits at the head of exponent and mantissa.

    A CPU has no instruction for this type, and torch converts one number after another.
    """
    bits = weight.packed_OW.view(torch.int8).to(torch.int16)
    halves = ((bits & 0x7F) << 7).bitwise_or_(bits & -0x8000).view(torch.float16)
    values = halves.to(weight.scales_OG.dtype).mul_(256)
    groups, whole = weight.scales_OG.shape[1], values.shape[1] // weight.group
    values[:, : whole * weight.group].unflatten(1, (whole, weight.group)).mul_(weight.scales_OG[:, :whole, None])
    if whole < groups:
        values[:, whole * weight.group :].mul_(weight.scales_OG[:, whole:])
    return values


def product(x_TI: torch.Tensor, weight: Grouped, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight^T + bias, [T, O]."""
    x_TI = _ordered(x_TI, weight)
    out_TO = x_TI.new_empty(x_TI.shape[0], weight.scales_OG.shape[0])
    for first, last in weight.tiles():
        tile = dequantize(weight.rows(first, last))[:, : x_TI.shape[1]]
        torch.mm(x_TI, tile.t().to(x_TI.dtype), out=out_TO[:, first:last])
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def add_product(x_TI: torch.Tensor, weight: Grouped, bias_O: torch.Tensor | None, hidden_TO: torch.Tensor) -> None:
    """Add x @ weight^T + bias to `hidden`, in place."""
    x_TI = _ordered(x_TI, weight)
    for first, last in weight.tiles():
        tile = dequantize(weight.rows(first, last))[:, : x_TI.shape[1]]
        hidden_TO[:, first:last].addmm_(x_TI, tile.t().to(x_TI.dtype))
    if bias_O is not None:
        hidden_TO.add_(bias_O)


def _ordered(x_TI: torch.Tensor, weight: Grouped) -> torch.Tensor:
    return x_TI if weight.order_I is None else x_TI.index_select(1, weight.order_I)
