"""Types of GGUF files: rows of blocks, each with integers and their scales.

In memory they are integers of 4 or 8 bits in groups of 32 or 16 inputs, with a scale and for some types an offset. That
holds every type exactly, so that one matrix may have parts of several types. The layouts are those of llama.cpp's
`ggml-common.h`.

Shapes: O outputs, B blocks of an output, G groups of an output, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from phonograph.errors import UnsupportedModelError, WeightError
from phonograph.kernels.torch import fp4
from phonograph.models.quantization.grouped_weight import GroupedScheme, GroupedWeight, slices
from phonograph.models.quantization.scheme import LinearWeight, Stored

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""


class Numbers(NamedTuple):
    """Numbers of some rows: (value - 2 ** (bits - 1)) * scale + offset.

    Attributes:
        values_OI: uint8.
        scales_OG: float32.
        offsets_OG: float32, or None for 0.
    """

    values_OI: torch.Tensor
    scales_OG: torch.Tensor
    offsets_OG: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A type of blocks.

    Attributes:
        inputs: numbers of a block.
        nbytes: bytes of a block.
        bits: 4 or 8, as its numbers are held in memory.
        group: numbers that share a scale.
        offsets: each group has an offset.
        unpack: function that reads blocks, uint8 [O, B, nbytes].
    """

    inputs: int
    nbytes: int
    bits: int
    group: int
    offsets: bool
    unpack: Callable[[torch.Tensor], Numbers]

    def read(self, rows_OB: torch.Tensor) -> Numbers:
        """Return the numbers of rows of bytes."""
        return self.unpack(rows_OB.unflatten(1, (-1, self.nbytes)))

    def dequantize(self, rows_OB: torch.Tensor) -> torch.Tensor:
        """Return the numbers [O, I] of rows of bytes, in float32."""
        numbers = self.read(rows_OB)
        grouped = numbers.values_OI.float().sub_(1 << (self.bits - 1)).unflatten(1, (-1, self.group))
        grouped.mul_(numbers.scales_OG.unsqueeze(-1))
        if numbers.offsets_OG is not None:
            grouped.add_(numbers.offsets_OG.unsqueeze(-1))
        return grouped.flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufBlocks(GroupedScheme):
    """Blocks of a GGUF file. Bits, groups and offsets in memory may be those of other parts of a fused matrix.

    Attributes:
        kind: type, by its name in `BLOCK_TYPES`.
    """

    kind: str

    @property
    def name(self) -> str:
        offsets = " with offsets" if self.offsets else ""
        return f"{self.kind} ({self.bits} bits in groups of {self.group_size}{offsets})"

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        block = BLOCK_TYPES[self.kind]
        if inputs % block.inputs:
            raise UnsupportedModelError(
                f"{inputs} inputs are not a multiple of {block.inputs}, the block of {self.kind}"
            )
        return {"weight": Stored((outputs, inputs // block.inputs * block.nbytes), (torch.uint8,))}

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        assert isinstance(weight, GroupedWeight)
        block, rows_OB = BLOCK_TYPES[self.kind], tensors["weight"]
        repeats = block.group // self.group_size
        for outputs in slices(rows_OB.shape[0], weight.inputs):
            values_OI, scales_OG, offsets_OG = block.read(rows_OB[outputs])
            if block.bits < self.bits:
                values_OI = values_OI + ((1 << (self.bits - 1)) - (1 << (block.bits - 1)))
            start = first + outputs.start
            weight.write_values(start, values_OI)
            weight.write_scales(module, start, scales_OG.repeat_interleave(repeats, 1))
            if self.offsets:
                offsets_OG = torch.zeros_like(scales_OG) if offsets_OG is None else offsets_OG
                weight.write_offsets(module, start, offsets_OG.repeat_interleave(repeats, 1))


def fused_schemes(kinds: Iterable[str]) -> dict[str, GgufBlocks]:
    """Return the scheme of each type of one fused matrix, all with the same layout in memory."""
    names = list(dict.fromkeys(kinds))
    blocks = [BLOCK_TYPES[kind] for kind in names]
    bits, group = max(block.bits for block in blocks), min(block.group for block in blocks)
    offsets = any(block.offsets for block in blocks)
    return {kind: GgufBlocks(kind=kind, bits=bits, group_size=group, offsets=offsets) for kind in names}


def check_kind(name: str, kind: str) -> None:
    """Check that the type of the tensor `name` is supported.

    Raises:
        UnsupportedModelError: it is not; the message lists the supported types.
    """
    if kind not in FLOATS and kind not in BLOCK_TYPES:
        raise UnsupportedModelError(
            f"tensor {name} has the type {kind}, which is not supported; supported are "
            f"{', '.join([*BLOCK_TYPES, *FLOATS])}"
        )


@torch.inference_mode()
def dequantize_rows(name: str, kind: str, rows_OB: torch.Tensor, destination_OI: torch.Tensor) -> None:
    """Write the numbers of rows in blocks in the destination's type, a few rows at a time.

    Raises:
        WeightError: numbers are infinite or not a number, in the file or in the destination's type.
    """
    for rows in slices(rows_OB.shape[0], destination_OI.shape[1]):
        into = destination_OI[rows]
        into.copy_(BLOCK_TYPES[kind].dequantize(rows_OB[rows].to(destination_OI.device)))
        if not bool(into.isfinite().all()):
            raise WeightError(f"tensor {name} has numbers that are infinite or not a number; download the file again")


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at a byte of each block as float32, [O, B]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low nibbles of bytes along the last dimension, then the high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the 32 bits at a byte of each block, as 0 or 16."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[..., start : start + 4].unsqueeze(-1) >> places) & 1).flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[..., 2:]).flatten(1), _half(blocks, 0), None)


def _q4_1(blocks: torch.Tensor) -> Numbers:
    scales = _half(blocks, 0)
    return Numbers(_nibbles(blocks[..., 4:]).flatten(1), scales, _half(blocks, 2) + 8 * scales)


def _q5_0(blocks: torch.Tensor) -> Numbers:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return Numbers(values.flatten(1) + (128 - 16), _half(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> Numbers:
    scales, values = _half(blocks, 0), _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return Numbers(values.flatten(1) + (128 - 16), scales, _half(blocks, 2) + 16 * scales)


def _q8_0(blocks: torch.Tensor) -> Numbers:
    # A signed byte with its sign bit flipped is the byte that is larger by 128.
    return Numbers((blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0), None)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima [O, G] of Q4_K and Q5_K: each 6 bits of 8, in 12 bytes, times a float16."""
    low, middle, high = blocks[..., 4:16].split(4, -1)
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    return (
        (_half(blocks, 0).unsqueeze(-1) * scales).flatten(1),
        (_half(blocks, 2).unsqueeze(-1) * minima).flatten(1),
    )


def _q4_k(blocks: torch.Tensor) -> Numbers:
    scales, minima = _scales_and_minima(blocks)
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return Numbers(values.flatten(1), scales, 8 * scales - minima)


def _q5_k(blocks: torch.Tensor) -> Numbers:
    scales, minima = _scales_and_minima(blocks)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    # [O, B, 8, 32]: each of the 32 bytes has one bit for each group.
    fifth = ((blocks[..., None, 16:48] >> places[:, None]) & 1) << 4
    values = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2) | fifth
    return Numbers(values.flatten(1) + (128 - 16), scales, 16 * scales - minima)


def _q6_k(blocks: torch.Tensor) -> Numbers:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places[:, None]) & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Numbers((low | high).flatten(1) + (128 - 32), (_half(blocks, 208).unsqueeze(-1) * scales).flatten(1), None)


def _mxfp4(blocks: torch.Tensor) -> Numbers:
    exponents = blocks[..., 0].float()
    # Values are twice the numbers of the codes.
    scales = torch.exp2(exponents - (fp4.OFFSET + 1)).masked_fill_(exponents == fp4.NOT_A_NUMBER, torch.nan)
    values = torch.tensor([128 + int(2 * code) for code in fp4.CODES], dtype=torch.uint8, device=blocks.device)
    return Numbers(values[_nibbles(blocks[..., 1:]).int()].flatten(1), scales, None)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(inputs=32, nbytes=18, bits=4, group=32, offsets=False, unpack=_q4_0),
    "Q4_1": BlockType(inputs=32, nbytes=20, bits=4, group=32, offsets=True, unpack=_q4_1),
    "Q5_0": BlockType(inputs=32, nbytes=22, bits=8, group=32, offsets=False, unpack=_q5_0),
    "Q5_1": BlockType(inputs=32, nbytes=24, bits=8, group=32, offsets=True, unpack=_q5_1),
    "Q8_0": BlockType(inputs=32, nbytes=34, bits=8, group=32, offsets=False, unpack=_q8_0),
    "Q4_K": BlockType(inputs=256, nbytes=144, bits=4, group=32, offsets=True, unpack=_q4_k),
    "Q5_K": BlockType(inputs=256, nbytes=176, bits=8, group=32, offsets=True, unpack=_q5_k),
    "Q6_K": BlockType(inputs=256, nbytes=210, bits=8, group=16, offsets=False, unpack=_q6_k),
    "MXFP4": BlockType(inputs=32, nbytes=17, bits=8, group=32, offsets=False, unpack=_mxfp4),
}
"""Supported types of blocks, by ggml's names. Experts in MXFP4 alone are an `Mxfp4Scheme` in place of it."""
