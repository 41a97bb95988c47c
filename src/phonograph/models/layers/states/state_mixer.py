"""Mixers of tokens with a state of fixed size for each sequence, in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from phonograph.graphs.modes import Support
from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.quantization.scheme import Scheme

if TYPE_CHECKING:
    import torch


class StateTensor(NamedTuple):
    """Part of the state that a layer keeps in the slot of a sequence.

    Attributes:
        name: name for people.
        shape: shape for one slot.
        wide: kept in float32; otherwise in the model's type.
    """

    name: str
    shape: tuple[int, ...]
    wide: bool

    def nbytes(self, element: int) -> int:
        """Return the bytes of a slot; `element` is the size of the model's type."""
        return prod(self.shape) * (4 if self.wide else element)


class StateMixer(Protocol):
    """Mixer of a layer with a state. It is a frozen dataclass.

    A sequence without computed tokens starts from a state of zeros, whatever its slot has.
    """

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    @property
    def input_norm(self) -> str | None: ...

    @property
    def output_norm(self) -> str | None: ...

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products; the last one is that of the output."""
        ...

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors of a checkpoint that are no projections, by name in the layer. They are in float32."""
        ...

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """State of a sequence."""
        ...

    @property
    def scratch(self) -> int:
        """Numbers of a token that a GPU keeps between projections and output, beside them."""
        ...

    @property
    def gpu_refusal(self) -> str | None:
        """Size that GPU kernels do not take, with those that they take; None if they take all."""
        ...

    @property
    def graph_support(self) -> Support:
        """Batches that may run in a graph."""
        ...

    def operands(
        self, projected: Sequence[torch.Tensor], others: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the operator's first arguments.

        Args:
            projected: results of the products but the last, [T, outputs] each.
            others: tensors that are no projections, by name in the layer.
        """
        ...

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> StateMixer: ...


def slot_bytes(mixer: StateMixer, element: int) -> int:
    """Return the bytes of a layer's state in one slot; `element` is the size of the model's type."""
    return sum(state.nbytes(element) for state in mixer.states)
