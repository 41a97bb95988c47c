"""Matrix of a layer as a plain value: its projections, and their names and shapes in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from phonograph.kernels.triton.gemm.product_plan import ProductShape, WeightFormat
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.weights.expert_tensors import ExpertTensors


class MatrixPart(NamedTuple):
    """A projection of a checkpoint, fused with others of the same input.

    Attributes:
        name: last component of its name in a checkpoint.
        num_outputs: its outputs.
        scheme: its weight format; None for the model's type.
        bias: False for a part without a bias in a matrix that has one.
    """

    name: str
    num_outputs: int
    scheme: Scheme | None = None
    bias: bool = True


@dataclass(frozen=True)
class LayerMatrix:
    """A matrix, in which projections of the same input are fused. Their weights have one layout in memory.

    Attributes:
        name: name for people.
        module: components of the projections' names before the last, such as "self_attn"; empty for the head.
        parts: the projections, in the order of the matrix.
        num_inputs: inputs of the product.
        bias: True if the projections have a bias.
        gated: the product is activation(first half) * second half.
        num_experts: experts that have a matrix of these parts each, one after another; None for a matrix of its own.
            Their names have the number of the expert between `module` and the part.
        fused: layout of a checkpoint's tensors that have the single part of all experts, and no number in their names;
            None if each expert has its tensors.
        quantizable: False for weights that are in the model's type in every file.
        partial: the inputs are those of one rank, so that the output is the sum of the products of all ranks.
    """

    name: str
    module: str
    parts: tuple[MatrixPart, ...]
    num_inputs: int
    bias: bool = False
    gated: bool = False
    num_experts: int | None = None
    fused: ExpertTensors | None = None
    quantizable: bool = True
    partial: bool = False

    @property
    def num_outputs(self) -> int:
        """Outputs, of all experts together."""
        return self.expert_outputs * (self.num_experts or 1)

    @property
    def expert_outputs(self) -> int:
        """Outputs of one product."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def scheme(self) -> Scheme | None:
        """Weight format of the first part; others have the same layout."""
        return self.parts[0].scheme

    @property
    def shape(self) -> ProductShape:
        """Sizes of one product."""
        return ProductShape(self.expert_outputs // (1 + self.gated), self.num_inputs, self.gated)

    def weight_format(self, dtype: str) -> WeightFormat:
        """Return the layout of the weights on a GPU."""
        return WeightFormat(dtype) if self.scheme is None else self.scheme.weight_format(self.num_inputs, dtype)

    def nbytes(self, element: int) -> int:
        """Return the bytes of the weights in memory; `element` is the size of the model's type."""
        return (self.num_experts or 1) * sum(
            part.num_outputs * self.num_inputs * element
            if part.scheme is None
            else part.scheme.nbytes(part.num_outputs, self.num_inputs, element)
            for part in self.parts
        )

    def without_outputs(self) -> LayerMatrix:
        """Return an empty matrix in the place of one that another model has."""
        return replace(self, parts=tuple(MatrixPart(part.name, 0) for part in self.parts))

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerMatrix:
        """Return the matrix with the format of each part, by its name in the layer; all experts have one format."""
        if not self.quantizable:
            return self
        parts = (part._replace(scheme=scheme_of(self.path(part.name))) for part in self.parts)
        return replace(self, parts=tuple(parts))

    def path(self, part: str, expert: int = 0) -> str:
        """Return the name of a part in its layer."""
        name = part if self.num_experts is None or self.fused is not None else f"{expert}.{part}"
        return f"{self.module}.{name}" if self.module else name

    @property
    def quantized_names(self) -> tuple[str, ...]:
        """Names in the module of the projections that a file may have in another format."""
        names = (name.removeprefix(f"{self.module}.") for name, _ in self.projections())
        return tuple(names) if self.quantizable else ()

    def projections(self) -> Iterator[tuple[str, MatrixPart]]:
        """Yield the name in the layer and the part of each projection, in the order of the matrix.

        A fused part is that of all experts together.
        """
        if self.fused is not None:
            (part,) = self.parts
            yield self.path(part.name), part._replace(num_outputs=self.num_outputs)
            return
        for expert in range(self.num_experts or 1):
            for part in self.parts:
                yield self.path(part.name, expert), part

    def tensor_name(self, projection: str, kind: str) -> str:
        """Return the name of a tensor of a projection, such as its "weight" or its "bias"."""
        return f"{projection}.{kind}" if self.fused is None else self.fused.name(projection, kind)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name in the layer and the shape in a checkpoint of weights without a format, and of biases."""
        for name, part in self.projections():
            rows: dict[str, tuple[int, ...]] = (
                {} if part.scheme is not None else {"weight": (part.num_outputs, self.num_inputs)}
            )
            if self.bias and part.bias:
                rows["bias"] = (part.num_outputs,)
            for kind, shape in rows.items():
                yield self.tensor_name(name, kind), shape if self.fused is None else self.fused.shape(kind, shape)
