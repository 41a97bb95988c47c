"""Products of integer weights on a CPU, by torch's operator for weights packed in 4 bits.

The operator multiplies one to about eight rows in a third of the time of float32 weights, because it reads an eighth of
their bytes. It takes bfloat16 and returns bfloat16; its sums are float32. More rows multiply tiles of unpacked weights.

Weights of 8 bits are pairs of columns of 4 bits: u = 16 high + low. The columns of 16 inputs have the high halves, then
the low ones, and multiply 16 x and x, so that both have one scale.

The packed layout depends on the CPU, so weights are packed at load and never stored. Both operators are private; tests
pin their arithmetic and their layout.

Shapes: T tokens, I inputs, O outputs, P outputs rounded up to whole blocks, K columns of 4 bits, G groups of columns.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from phonograph.kernels.torch.grouped import TILE, Grouped

_aten = torch.ops.aten
BLOCK = 64
"""Outputs of a block of the layout: 64 with AVX-512, 32 with AVX2. A tail of fewer outputs has another layout."""
GROUPS = 256, 128, 64, 32
"""Columns that may share a scale."""
_PAIR = 16
"""Inputs whose high halves are neighbours."""
_LOW_BITS, _FOUR = torch.tensor(15, dtype=torch.uint8), torch.tensor(4, dtype=torch.uint8)
_AVERAGED_ROWS = 2
_FACTORS_211 = torch.tensor([1.0, 2**0.5]).view(2, 1, 1)
_WEIGHTS_12 = torch.tensor([[0.5, 0.5**1.5]])
_PAIR_FACTORS = torch.tensor([[16.0], [1.0]])


class Int4Packed(NamedTuple):
    """Packed weights: (value - 8) * scale + offset of each column.

    Attributes:
        packed_PW: uint8, two values a byte, in the operator's layout.
        scales_GP2: bfloat16, scale and offset.
        group: columns of a group.
        pairs: inputs have two columns each, for weights of 8 bits.
        outputs: O.
        operator_rows: rows up to which the operator multiplies.
        tile_dtype: type of unpacked tiles.
        averaged: one or two rows are multiplied twice, the second time scaled by sqrt(2), so that rounding differs, and
            the results are averaged. Two rows take a quarter longer than one, because they share the unpacking.
    """

    packed_PW: torch.Tensor
    scales_GP2: torch.Tensor
    group: int
    pairs: bool
    outputs: int
    operator_rows: int
    tile_dtype: torch.dtype
    averaged: bool

    @property
    def nbytes(self) -> int:
        return self.packed_PW.nbytes + self.scales_GP2.nbytes


def column_group(bits: int, group: int) -> int | None:
    """Return the columns that share a scale in the packed form of groups of inputs, or None without a packed form.

    Args:
        bits: 4 or 8.
        group: inputs of a group.
    """
    columns = group * bits // 4
    return next((size for size in GROUPS if columns % size == 0), None)


def packed_bytes(outputs: int, inputs: int, bits: int, group: int) -> int:
    """Return the bytes of `pack`'s tensors for weights with a packed form."""
    columns, size = -(-inputs // group) * group * bits // 4, column_group(bits, group)
    assert size is not None
    return -(-outputs // BLOCK) * BLOCK * (columns // 2 + columns // size * 4)


def pack(weight: Grouped, operator_rows: int, tile_dtype: torch.dtype, *, averaged: bool = False) -> Int4Packed:
    """Pack weights that have a packed form; their scales and offsets are rounded to bfloat16.

    Args:
        weight: integers on the CPU.
        operator_rows: rows up to which the operator multiplies.
        tile_dtype: type of unpacked tiles.
        averaged: as in `Int4Packed`.
    """
    group = column_group(weight.bits, weight.group)
    assert group is not None and not weight.interleaved
    outputs, groups = weight.scales_OG.shape
    padded, columns = -(-outputs // BLOCK) * BLOCK, groups * weight.group * weight.bits // 4
    packed_PW = torch.empty(padded, columns // 2, dtype=torch.uint8)
    scales_GP2 = torch.zeros(columns // group, padded, 2, dtype=torch.bfloat16)
    repeats = columns // group // groups
    # The operator's input has 4 bytes a value, so it is made for some outputs at a time.
    step = max(BLOCK, TILE * 4 // columns // BLOCK * BLOCK)
    for first in range(0, padded, step):
        rows = weight.rows(first, min(first + step, outputs))
        columns_OK, offsets_OG = _columns(rows)
        filled_PK = torch.full((min(step, padded - first), columns), 8, dtype=torch.int32)
        filled_PK[: columns_OK.shape[0]] = columns_OK
        packed = _aten._convert_weight_to_int4pack_for_cpu(filled_PK, 2)
        packed_PW[first : first + step] = packed.view(-1, columns // 2)
        scales_O2G = torch.stack([rows.scales_OG.float(), offsets_OG], 1).repeat_interleave(repeats, 2)
        scales_GP2[:, first : first + len(scales_O2G)] = scales_O2G.permute(2, 0, 1)
    return Int4Packed(packed_PW, scales_GP2, group, weight.bits == 8, outputs, operator_rows, tile_dtype, averaged)


def _columns(weight: Grouped) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of each column, uint8 [O, K], and the offset of each group of inputs, float32 [O, G]."""
    groups = weight.scales_OG.shape[1]
    bytes_OB = weight.packed_OW.contiguous().view(torch.uint8)[:, : groups * weight.group * weight.bits // 8]
    zeros = 1 << (weight.bits - 1) if weight.zeros_OG is None else weight.zeros_OG.float()
    if weight.bits == 4:
        columns_OK, shifts, factor = torch.stack([bytes_OB & 15, bytes_OB >> 4], -1), 8 - zeros, 1
    else:
        # A pair means (16 (high - 8) + low - 8) * scale + 17 * offset. Groups of small values get 8 more, so that
        # values around 128 need no offset, which would be rounded.
        bytes_OGI = bytes_OB.unflatten(1, (groups, -1))
        more_OG = (bytes_OGI.amax(2) < 256 - 8).to(torch.uint8) * 8
        halves = (bytes_OGI + more_OG.unsqueeze(2)).view(len(bytes_OB), -1, _PAIR)
        columns_OK, shifts, factor = torch.stack([halves >> 4, halves & 15], 2), 136 - zeros - more_OG.float(), 17
    offsets_OG = shifts * weight.scales_OG.float()
    if weight.offsets_OG is not None:
        offsets_OG += weight.offsets_OG.float()
    return columns_OK.flatten(1), offsets_OG / factor


def blocks(weight: Int4Packed, first: int, last: int) -> Int4Packed:
    """Return the blocks that have the outputs from `first` up to `last`, cut after `last`: a view with its own scales.

    The operator takes scales without gaps.
    """
    start, end = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
    scales_GP2 = weight.scales_GP2[:, start:end].contiguous()
    return weight._replace(packed_PW=weight.packed_PW[start:end], scales_GP2=scales_GP2, outputs=last - start)


def unpack(weight: Int4Packed) -> torch.Tensor:
    """Return the weights, float32 [inputs, outputs]."""
    tiles = _Tiles(weight, weight.packed_PW.shape[0])
    return tiles.unpack(0, weight.packed_PW.shape[0])[:, : weight.outputs]


class _Tiles:
    """Scratch memory for tiles of up to `step` outputs. New pages take as long as the unpacking."""

    def __init__(self, weight: Int4Packed, step: int) -> None:
        self._weight = weight
        columns = weight.packed_PW.shape[1] * 2
        self._bytes = torch.empty(step * columns // 2, dtype=torch.uint8)
        inputs = columns // 2 if weight.pairs else columns
        self._high = torch.empty(step * inputs // 2 if weight.pairs else 0, dtype=torch.uint8)
        self._values = torch.empty(step * inputs)

    def unpack(self, first: int, last: int) -> torch.Tensor:
        """Return outputs from `first` to `last`, multiples of `BLOCK`, as float32 [inputs, outputs] in scratch."""
        weight, block, outputs = self._weight, _layout_block(), last - first
        packed_PW = weight.packed_PW[first:last]
        columns, blocks = packed_PW.shape[1] * 2, outputs // block
        bytes_NKH = packed_PW.view(blocks, columns, block // 2)
        scratch_NKH = self._bytes[: packed_PW.numel()].view(bytes_NKH.shape)
        inputs = columns // 2 if weight.pairs else columns
        values_IP = self._values[: inputs * outputs].view(inputs, outputs)
        values_IN2H = values_IP.view(inputs, blocks, 2, block // 2)
        for half in range(2):
            if half:
                torch.bitwise_right_shift(bytes_NKH, _FOUR, out=scratch_NKH)
            else:
                torch.bitwise_and(bytes_NKH, _LOW_BITS, out=scratch_NKH)
            whole_NIH = self._join(scratch_NKH) if weight.pairs else scratch_NKH
            values_IN2H[:, :, half].copy_(whole_NIH.transpose(0, 1))
        # (value - centre) * scale + factor * offset
        centre, factor = (136, 17) if weight.pairs else (8, 1)
        pairs_2GP = weight.scales_GP2[:, first:last].permute(2, 0, 1)
        scales_GP, offsets_GP = torch.empty(pairs_2GP.shape).copy_(pairs_2GP)
        shifts_G1P = offsets_GP.mul_(factor).sub_(scales_GP, alpha=centre).unsqueeze(1)
        grouped = values_IP.view(scales_GP.shape[0], -1, outputs)
        torch.addcmul(shifts_G1P, grouped, scales_GP.unsqueeze(1), out=grouped)
        return values_IP

    def _join(self, halves_NKH: torch.Tensor) -> torch.Tensor:
        """Return values of 8 bits, in scratch."""
        high, low = halves_NKH.unflatten(1, (-1, 2, _PAIR)).unbind(2)
        joined = self._high[: high.numel()].view(high.shape)
        torch.bitwise_left_shift(high, _FOUR, out=joined).bitwise_or_(low)
        return joined.flatten(1, 2)


@cache
def missing() -> str | None:
    """Return what this torch lacks for packed weights, or None."""
    names = "_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu"
    absent = [name for name in names if not hasattr(_aten, name)]
    if absent:
        return f"torch {torch.__version__} has no operator {absent[0]}"
    return None if _layout_block() else f"torch {torch.__version__} packs weights in an unknown layout"


@cache
def _layout_block() -> int:
    """Return the outputs of a block of this CPU's layout, 0 for an unknown one."""
    values = (torch.arange(BLOCK * 32, dtype=torch.int32).view(BLOCK, 32) * 2654435 >> 13) & 15
    packed = _aten._convert_weight_to_int4pack_for_cpu(values, 2).view(-1)
    for block in (64, 32):
        bytes_NKH = packed.view(BLOCK // block, 32, block // 2)
        unpacked = torch.cat([bytes_NKH & 15, bytes_NKH >> 4], -1).transpose(1, 2).reshape(BLOCK, 32)
        if torch.equal(unpacked.int(), values):
            return block
    return 0


def _multiply(
    x_TI: torch.Tensor,
    packed_PW: torch.Tensor,
    scales_GP2: torch.Tensor,
    group: int,
    pairs: bool,
    outputs: int,
    operator_rows: int,
    tile_dtype: torch.dtype,
    averaged: bool,
    out_TO: torch.Tensor,
    add: bool,
) -> None:
    columns = packed_PW.shape[1] if pairs else packed_PW.shape[1] * 2
    if x_TI.shape[1] < columns:
        x_TI = torch.nn.functional.pad(x_TI, (0, columns - x_TI.shape[1]))
    if x_TI.shape[0] > operator_rows:
        weight = Int4Packed(packed_PW, scales_GP2, group, pairs, outputs, operator_rows, tile_dtype, averaged)
        _multiply_tiles(x_TI.to(tile_dtype), weight, out_TO, add)
        return
    averaged = averaged and x_TI.shape[0] <= _AVERAGED_ROWS
    if averaged:
        x_TI = (x_TI.float() * _FACTORS_211).flatten(0, 1)
    if pairs:
        x_T2I = x_TI.float().unflatten(1, (-1, 1, _PAIR)) * _PAIR_FACTORS
        x_TK = x_T2I.bfloat16().flatten(1)
    else:
        x_TK = x_TI.bfloat16()
    found_TP = _aten._weight_int4pack_mm_for_cpu(x_TK, packed_PW, group, scales_GP2)
    if averaged:
        found_TP = torch.mm(_WEIGHTS_12, found_TP.float().view(2, -1)).view(-1, packed_PW.shape[0])
    if outputs < packed_PW.shape[0]:
        found_TP = found_TP[:, :outputs]
    if add:
        out_TO.add_(found_TP)
    else:
        out_TO.copy_(found_TP)


def _multiply_tiles(x_TI: torch.Tensor, weight: Int4Packed, out_TO: torch.Tensor, add: bool) -> None:
    padded = weight.packed_PW.shape[0]
    step = min(max(BLOCK, TILE // x_TI.shape[1] // BLOCK * BLOCK), padded)
    tiles = _Tiles(weight, step)
    converted = torch.empty(0 if x_TI.dtype is torch.float32 else step * x_TI.shape[1], dtype=x_TI.dtype)
    for first in range(0, padded, step):
        tile_IO = tiles.unpack(first, min(first + step, padded))
        if len(converted):
            tile_IO = converted[: tile_IO.numel()].view(tile_IO.shape).copy_(tile_IO)
        out = out_TO[:, first : first + step]
        found = torch.mm(x_TI, tile_IO[:, : out.shape[1]])
        if add:
            out.add_(found)
        else:
            out.copy_(found)


_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "int4_product(Tensor x, Tensor packed, Tensor scales, int group, bool pairs, int outputs, int operator_rows, "
    "ScalarType tile_dtype, bool averaged, Tensor(a!) out, bool add) -> ()"
)
_library.impl("int4_product", _multiply, "CPU")
_int4_product = torch.ops.phonograph.int4_product.default
# The tape's replay calls the function without torch's dispatch.
_int4_product.python_function = _multiply  # pyright: ignore[reportAttributeAccessIssue]


def product(x_TI: torch.Tensor, weight: Int4Packed) -> torch.Tensor:
    """Return x @ weights, [T, O], rounded to bfloat16, in the type of x."""
    out_TO = x_TI.new_empty(x_TI.shape[0], weight.outputs)
    _int4_product(x_TI, *weight, out_TO, False)
    return out_TO


def add_product(x_TI: torch.Tensor, weight: Int4Packed, hidden_TO: torch.Tensor) -> None:
    """Add x @ weights, rounded to bfloat16, to `hidden`, in place."""
    _int4_product(x_TI, *weight, hidden_TO, True)
