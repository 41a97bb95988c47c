"""Integer weights with a scale for each group of inputs: what GPTQ, AWQ and compressed-tensors become in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

import torch

from phonograph.errors import WeightError
from phonograph.kernels.torch import fp4
from phonograph.kernels.torch.grouped import Grouped, add_product, interleave, product
from phonograph.kernels.triton.gemm.product_plan import WeightFormat
from phonograph.models.quantization.scheme import Allocate

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ordering = Lock()


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weights in groups of inputs.

    Attributes:
        values: the weights.
        inputs: inputs of the product.
    """

    values: Grouped
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.inputs, self.values.scales_OG.shape[0]

    @property
    def device(self) -> torch.device:
        return self.values.packed_OW.device

    @property
    def operand(self) -> Grouped:
        return self.values

    def product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        return product(x_TI, self.values, bias_O)

    def add_product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, hidden_TO: torch.Tensor) -> None:
        add_product(x_TI, self.values, bias_O, hidden_TO)

    def rows(self, first: int, last: int) -> GroupedWeight:
        return GroupedWeight(self.values.rows(first, last), self.inputs)

    def draw(self, std: float, generator: torch.Generator) -> None:
        values = self.values
        if values.is_fp8():
            drawn = torch.empty(values.packed_OW.shape, dtype=torch.float16, device=self.device)
            values.packed_OW.copy_(drawn.normal_(generator=generator))
            values.scales_OG.fill_(std)
            return
        values.packed_OW.random_(-(2**31), 2**31, generator=generator)
        if values.is_fp4():
            deviation = math.sqrt(sum(code * code for code in fp4.CODES) / len(fp4.CODES))
            exponent = round(math.log2(std / deviation)) + fp4.OFFSET + (fp4.BIAS if values.interleaved else 0)
            values.scales_OG.fill_(int.from_bytes(bytes([exponent] * 4), "little", signed=True))
            return
        _centre(values.packed_OW, values.bits)
        # Standard deviation of values that are uniform over all integers of this number of bits.
        values.scales_OG.fill_(std / ((1 << values.bits) / math.sqrt(12)))
        if values.zeros_OG is not None:
            values.zeros_OG.fill_(1 << (values.bits - 1))
        if values.order_I is not None:
            values.order_I.copy_(torch.arange(self.inputs))
        if values.offsets_OG is not None:
            values.offsets_OG.zero_()

    def write_scales(self, module: str, first: int, scales_OG: torch.Tensor) -> None:
        """Fill the scales of outputs from `first` on. The weights of a group with a scale of 0 are 0.

        Raises:
            WeightError: a scale is infinite or not a number, or the model's type makes it 0 or infinite.
        """
        into = self.values.scales_OG[first : first + scales_OG.shape[0]]
        into.copy_(scales_OG)
        if not bool((into.isfinite() & ((into != 0) | (scales_OG == 0))).all()):
            raise WeightError(f"{module} has scales that are {_fault(scales_OG, into)}")

    def write_offsets(self, module: str, first: int, offsets_OG: torch.Tensor) -> None:
        """Fill the offsets of outputs from `first` on.

        Raises:
            WeightError: an offset is infinite or not a number, in the file or in the model's type.
        """
        assert self.values.offsets_OG is not None
        into = self.values.offsets_OG[first : first + offsets_OG.shape[0]]
        into.copy_(offsets_OG)
        if not bool(into.isfinite().all()):
            raise WeightError(f"{module} has offsets that are {_fault(offsets_OG, into)}")

    def write_zeros(self, first: int, zeros_OG: torch.Tensor) -> None:
        """Fill the zeros of outputs from `first` on with integers of any type."""
        assert self.values.zeros_OG is not None
        self.values.zeros_OG[first : first + zeros_OG.shape[0]].copy_(zeros_OG)

    def write_packed(self, first: int, packed_OW: torch.Tensor) -> None:
        """Fill outputs from `first` on with words that have the lowest bits first."""
        into = self.values.packed_OW[first : first + packed_OW.shape[0]]
        into[:, : packed_OW.shape[1]].copy_(packed_OW)
        self._order_words(into)

    def write_bytes(self, first: int, packed_OB: torch.Tensor) -> None:
        """Fill outputs from `first` on with the bytes of words that have the lowest bits first."""
        into = self.values.packed_OW[first : first + packed_OB.shape[0]]
        into.view(torch.uint8).copy_(packed_OB)
        self._order_words(into)

    def write_values(self, first: int, values_OI: torch.Tensor) -> None:
        """Fill outputs from `first` on with unpacked integers, uint8."""
        into = self.values.packed_OW[first : first + values_OI.shape[0]]
        packed_OB = into.view(torch.uint8)
        if self.values.bits == 8:
            packed_OB[:, : values_OI.shape[1]] = values_OI
        else:
            packed_OB[:, : -(-values_OI.shape[1] // 2)] = values_OI[:, 0::2]
            packed_OB[:, : values_OI.shape[1] // 2] |= values_OI[:, 1::2] << 4
        self._order_words(into)

    def _order_words(self, packed_OW: torch.Tensor) -> None:
        """Put words with the lowest bits first into the order of the weight, in place."""
        if self.values.interleaved:
            words = interleave(packed_OW)
            packed_OW.copy_(fp4.in_blocks(fp4.spread(words)) if self.values.is_fp4() else words)

    def write_order(self, module: str, group_I: torch.Tensor) -> torch.Tensor:
        """Set the order of the inputs from the group of each input, and return it.

        Raises:
            WeightError: a group has another number of inputs than the format says, or does not exist; or another part
                of the fused matrix has its inputs in another order.
        """
        ordered = self.values.order_I
        assert ordered is not None
        order_I = torch.argsort(group_I, stable=True)
        expected = torch.arange(self.inputs, device=order_I.device) // self.values.group
        if not torch.equal(group_I[order_I].long(), expected):
            raise WeightError(
                f"{module}.g_idx does not put {self.values.group} inputs into each of {int(expected[-1]) + 1} groups; "
                "the file is damaged, or made with another group_size than its configuration says"
            )
        # On a GPU threads load the parts of a fused matrix side by side.
        with _ordering:
            if bool(ordered[0] >= 0) and not torch.equal(ordered, order_I):
                raise WeightError(
                    f"{module}.g_idx orders the inputs unlike the projections that are fused with it, which is not "
                    "supported; quantize the model without desc_act (actorder)"
                )
            ordered.copy_(order_I)
        return order_I


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedScheme:
    """Base of formats that become a `GroupedWeight`.

    Attributes:
        bits: 4 or 8.
        group_size: inputs of a group, -1 for all.
        zeros: each group has a zero; else it is in the middle of the range.
        ordered: the inputs of a group are spread over the matrix (desc_act, actorder).
        offsets: each group has an offset in the type of the scales.
    """

    bits: int
    group_size: int
    zeros: bool = False
    ordered: bool = False
    offsets: bool = False

    def group(self, inputs: int) -> int:
        return inputs if self.group_size < 0 else self.group_size

    def num_groups(self, inputs: int) -> int:
        return -(-inputs // self.group(inputs))

    def allocate(self, outputs: int, inputs: int, allocate: Allocate) -> GroupedWeight:
        groups, group = self.num_groups(inputs), self.group(inputs)
        packed = allocate(outputs, self._num_words(inputs), dtype=torch.int32)
        # Padding of the last group stays zero; pages of the rest are taken while they are filled.
        packed[:, inputs * self.bits // 32 :] = 0
        scales = allocate_by_group(allocate, outputs, groups, packed.device)
        zeros = allocate_by_group(allocate, outputs, groups, packed.device, torch.uint8) if self.zeros else None
        order = allocate(inputs, dtype=torch.int64).fill_(-1) if self.ordered else None
        offsets = allocate_by_group(allocate, outputs, groups, packed.device) if self.offsets else None
        interleaved = packed.device.type != "cpu" and self.weight_format(inputs, "").interleaved
        values = Grouped(packed, scales, zeros, self.bits, group, order, offsets, interleaved)
        return GroupedWeight(values, inputs)

    def nbytes(self, outputs: int, inputs: int, element: int) -> int:
        per_group = element * (1 + self.offsets) + self.zeros
        per_output = 4 * self._num_words(inputs) + self.num_groups(inputs) * per_group
        return outputs * per_output + (8 * inputs if self.ordered else 0)

    def weight_format(self, inputs: int, dtype: str) -> WeightFormat:
        """Return the layout of the weights on a GPU, whose kernels take whole groups of 128 inputs in 4 bits."""
        group = self.group(inputs)
        return WeightFormat(dtype, self.bits, group, interleaved=self.bits == 4 and group % 128 == 0)

    def describe(self, format_name: str) -> str:
        """Return the format's name with bits and groups."""
        group = "one group" if self.group_size < 0 else f"groups of {self.group_size}"
        zeros = "with zeros" if self.zeros else "symmetric"
        return f"{format_name}, {self.bits} bits, {group}, {zeros}" + (", inputs reordered" if self.ordered else "")

    def _num_words(self, inputs: int) -> int:
        return -(-self.num_groups(inputs) * self.group(inputs) * self.bits // 32)


def allocate_by_group(
    allocate: Allocate, outputs: int, groups: int, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return [outputs, groups] without contents.

    On a GPU the outputs of a group lie side by side, since a program needs one group of many outputs at a time; a CPU
    unpacks all groups of an output together.
    """
    if device.type == "cpu":
        return allocate(outputs, groups, dtype=dtype)
    return allocate(groups, outputs, dtype=dtype).t()


def slices(count: int, width: int) -> Iterator[slice]:
    """Yield slices of `count` outputs in multiples of 8, each of at most 4 Mi numbers of `width` an output."""
    step = max(8, (1 << 22) // width // 8 * 8)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the integers, uint8, of words of 32 bits along `dim` (0 or 1), lowest bits first."""
    words = packed if dim == 1 else packed.t()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    values = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)
    return values if dim == 1 else values.t()


def _centre(packed_OW: torch.Tensor, bits: int) -> None:
    """Replace values of 0 by the middle of the range, in place, so that random values are 0 on average.

    Weights with another mean add the same number to each output, and the sum grows with each layer beyond float16.
    """
    ones = sum(1 << place for place in range(0, 31, bits))
    for words in packed_OW.split(max(1, (1 << 24) // max(1, packed_OW.shape[1]))):
        # The lowest bit of each value becomes the disjunction of its bits.
        bits_set = words | (words >> 1)
        bits_set |= bits_set >> 2
        if bits == 8:
            bits_set |= bits_set >> 4
        words.bitwise_or_((~bits_set & ones) << (bits - 1))


def _fault(stored: torch.Tensor, converted: torch.Tensor) -> str:
    """Return what is wrong with numbers of a file that do not fit the model's type, and what would work."""
    if not bool(stored.isfinite().all()):
        return "infinite or not a number in the file; download it again"
    sizes, dtype = stored.abs(), str(converted.dtype).removeprefix("torch.")
    if bool(converted.isfinite().all()):
        return f"0 in {dtype} (the smallest of the file is {float(sizes[sizes > 0].amin()):g}); dtype float32 works"
    return f"infinite in {dtype} (the largest of the file is {float(sizes.amax()):g}); dtype float32 works"
