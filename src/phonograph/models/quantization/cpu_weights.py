"""Forms of quantized weights on a CPU: packed in 4 bits, dequantized, or as the file's groups.

Weights are loaded in groups and converted afterwards, one matrix after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from phonograph.kernels.torch import int4pack
from phonograph.kernels.torch.grouped import Grouped, dequantize
from phonograph.kernels.torch.int4pack import Int4Packed
from phonograph.models.quantization.gguf_blocks import GgufBlocks
from phonograph.models.quantization.grouped_weight import GroupedScheme, GroupedWeight
from phonograph.models.quantization.scheme import LinearWeight, Scheme
from phonograph.models.quantization.unquantized import DenseWeight
from phonograph.models.spec import DTYPE_BYTES, ModelSpec

Form = Literal["int4", "dequantized", "groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuProducts:
    """Products of quantized weights on a CPU.

    Attributes:
        int4: weights that have a packed form are packed.
        dequantize: other weights are dequantized at load, else multiplied by tiles.
        operator_rows: rows up to which torch's operator multiplies packed weights; more multiply unpacked tiles.
        tile_dtype: type of unpacked tiles, as torch names it.
        reason: source of the choice, with measured times.
    """

    int4: bool
    dequantize: bool
    operator_rows: int = 0
    tile_dtype: str = "float32"
    reason: str

    def form(self, scheme: Scheme, inputs: int) -> Form:
        """Return the form of weights of a format."""
        if self.int4 and has_packed_form(scheme, inputs):
            return "int4"
        return "dequantized" if self.dequantize else "groups"

    def nbytes(self, scheme: Scheme, outputs: int, inputs: int, element: int) -> int:
        """Return the bytes of a weight; `element` is the size of the model's type."""
        form = self.form(scheme, inputs)
        if form == "int4":
            assert isinstance(scheme, GroupedScheme)
            order = 8 * inputs if scheme.ordered else 0
            return int4pack.packed_bytes(outputs, inputs, scheme.bits, scheme.group(inputs)) + order
        return outputs * inputs * element if form == "dequantized" else scheme.nbytes(outputs, inputs, element)

    def with_head(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the head in the blocks of its GGUF file, if they are packed."""
        blocks = None if model.quantization is None else model.quantization.head
        if blocks is None or self.form(blocks, model.hidden_size) != "int4":
            return model
        return model.with_head_scheme(blocks)

    def weight_bytes(self, model: ModelSpec, dtype: str) -> int:
        """Return the bytes of all weights of a model."""
        element, total = DTYPE_BYTES[dtype], model.weight_bytes(dtype)
        for scheme, outputs, inputs in model.quantized_matrices():
            total += self.nbytes(scheme, outputs, inputs, element) - scheme.nbytes(outputs, inputs, element)
        head = model.head.scheme
        if model.tie_word_embeddings and isinstance(head, GgufBlocks):
            # The embedding stays in the file's blocks.
            row_bytes = head.stored(model.vocab_size, model.hidden_size)["weight"].shape[1]
            total += model.vocab_size * (row_bytes - model.hidden_size * element)
        return total

    def convert(self, weight: LinearWeight, is_head: bool, dtype: torch.dtype) -> LinearWeight:
        """Return a loaded weight in its form.

        Args:
            weight: the weight.
            is_head: the weight is that of the head, whose products are averaged: logits of 20 would be multiples of
                1/8 in bfloat16.
            dtype: the model's type.
        """
        if not isinstance(weight, GroupedWeight):
            return weight
        values = weight.values
        if self.int4 and not (values.is_fp8() or values.is_fp4()) and _packs(values.bits, values.group):
            packed = int4pack.pack(values, self.operator_rows, getattr(torch, self.tile_dtype), averaged=is_head)
            return Int4Weight(packed, weight.inputs, values.order_I)
        return DenseWeight(dequantized(weight, dtype)) if self.dequantize else weight


def has_packed_form(scheme: Scheme, inputs: int) -> bool:
    """Return True for integers that torch's operator can take; FP8 and MXFP4 are none."""
    weights = scheme.weight_format(inputs, "float32")
    return isinstance(scheme, GroupedScheme) and not weights.is_fp8 and _packs(weights.bits, weights.group)


def _packs(bits: int, group: int) -> bool:
    return int4pack.column_group(bits, group) is not None


def dequantized(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return [inputs, outputs], some outputs at a time."""
    inputs, outputs = weight.shape
    matrix_IO = torch.empty(inputs, outputs, dtype=dtype)
    order_I = weight.values.order_I
    for first, last in weight.values.tiles():
        tile_IO = dequantize(weight.values.rows(first, last))[:, :inputs].t()
        if order_I is None:
            matrix_IO[:, first:last] = tile_IO
        else:
            matrix_IO[order_I, first:last] = tile_IO.to(dtype)
    return matrix_IO


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Weights packed in 4 bits, for products in bfloat16.

    Attributes:
        packed: the weights.
        inputs: inputs of the product.
        order_I: int64, the input of x that each column multiplies; None if they are in order.
        before: outputs of the first block that are not part of the weight.
    """

    packed: Int4Packed
    inputs: int
    order_I: torch.Tensor | None
    before: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.inputs, self.packed.outputs - self.before

    @property
    def device(self) -> torch.device:
        return self.packed.packed_PW.device

    @property
    def operand(self) -> Grouped:
        raise NotImplementedError("kernels of a GPU do not take weights packed for a CPU")

    def product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        out_TO = int4pack.product(self._ordered(x_TI), self.packed)[:, self.before :]
        return out_TO if bias_O is None else out_TO.add_(bias_O)

    def add_product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, hidden_TO: torch.Tensor) -> None:
        assert not self.before
        int4pack.add_product(self._ordered(x_TI), self.packed, hidden_TO)
        if bias_O is not None:
            hidden_TO.add_(bias_O)

    def rows(self, first: int, last: int) -> Int4Weight:
        return Int4Weight(int4pack.blocks(self.packed, first, last), self.inputs, self.order_I, first % int4pack.BLOCK)

    def draw(self, std: float, generator: torch.Generator) -> None:
        raise NotImplementedError("weights are packed after they are drawn")

    def _ordered(self, x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI if self.order_I is None else x_TI.index_select(1, self.order_I)
