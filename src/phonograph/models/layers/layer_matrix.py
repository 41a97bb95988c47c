"""Matrix of a layer as a plain value: its projections, and their names and shapes in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from phonograph.kernels.triton.gemm.product_plan import ProductShape, WeightFormat
from phonograph.models.quantization.scheme import Scheme


class MatrixPart(NamedTuple):
    """A projection of a checkpoint, fused with others of the same input.

    Attributes:
        name: last component of its name in a checkpoint.
        num_outputs: its outputs.
        scheme: its weight format; None for the model's type.
    """

    name: str
    num_outputs: int
    scheme: Scheme | None = None


class ExpertStack(NamedTuple):
    """Layout of the one tensor in which a checkpoint has a matrix of all experts, and of the tensor of its biases.

    Attributes:
        input_major: the tensor is [X, inputs, outputs]; otherwise [X, outputs, inputs].
        interleaved: outputs of the two halves of an expert's matrix lie in turn: gate, up, gate, up.
    """

    input_major: bool = False
    interleaved: bool = False


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
        stack: layout of the tensor with the weights of all experts, whose name has no number; None if each expert has
            tensors of its own. A stacked matrix has one part.
        quantizable: False for weights that are in the model's type in every file.
    """

    name: str
    module: str
    parts: tuple[MatrixPart, ...]
    num_inputs: int
    bias: bool = False
    gated: bool = False
    num_experts: int | None = None
    stack: ExpertStack | None = None
    quantizable: bool = True

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

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerMatrix:
        """Return the matrix with the format of each part, by its name in the layer; all experts have one format."""
        if not self.quantizable:
            return self
        parts = (part._replace(scheme=scheme_of(self.path(part.name))) for part in self.parts)
        return replace(self, parts=tuple(parts))

    def path(self, part: str, expert: int = 0) -> str:
        """Return the name of a part in its layer."""
        name = part if self.num_experts is None or self.stack is not None else f"{expert}.{part}"
        return f"{self.module}.{name}" if self.module else name

    @property
    def quantized_names(self) -> tuple[str, ...]:
        """Names in the module of the projections that a file may have in another format."""
        names = (name.removeprefix(f"{self.module}.") for name, _ in self.projections())
        return tuple(names) if self.quantizable else ()

    def projections(self) -> Iterator[tuple[str, MatrixPart]]:
        """Yield the name in the layer and the part of each projection, in the order of the matrix.

        The part of a stacked matrix is that of all experts together.
        """
        if self.stack is not None:
            (part,) = self.parts
            yield self.path(part.name), part._replace(num_outputs=self.num_outputs)
            return
        for expert in range(self.num_experts or 1):
            for part in self.parts:
                yield self.path(part.name, expert), part

    def weight_name(self, projection: str) -> str:
        """Return the name of the weights of a projection that is not quantized."""
        return f"{projection}.weight" if self.stack is None else projection

    def bias_name(self, projection: str) -> str:
        """Return the name of the biases of a projection."""
        return f"{projection}.bias" if self.stack is None else f"{projection}_bias"

    def weight_shape(self, part: MatrixPart) -> tuple[int, ...]:
        """Return the shape of the weights of one of `projections` in a checkpoint, if they are not quantized."""
        if self.stack is None:
            return part.num_outputs, self.num_inputs
        sizes = self.expert_outputs, self.num_inputs
        return self.num_experts or 1, *(reversed(sizes) if self.stack.input_major else sizes)

    def bias_shape(self, part: MatrixPart) -> tuple[int, ...]:
        """Return the shape of the biases of one of `projections`."""
        return (part.num_outputs,) if self.stack is None else (self.num_experts or 1, self.expert_outputs)
