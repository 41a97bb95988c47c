"""Weights of a layer's mixer with a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from phonograph.kernels.ranks import Ranks, joint_norm_over_ranks
from phonograph.models.layers.linear import Linear, WeightAllocator
from phonograph.models.layers.states.mamba_mixer import NORM, MambaMixer
from phonograph.models.layers.states.state_mixer import StateMixer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWeights:
    """Weights of a mixer, next to its specification and the index of the layer.

    Attributes:
        input_norm: [E], or None; so is `output_norm`.
        linears: matrices in the order of the products; the last one is that of the output.
        others: float32 tensors by their names in the layer.
    """

    spec: StateMixer
    layer: int
    input_norm: torch.Tensor | None
    linears: tuple[Linear, ...]
    others: Mapping[str, torch.Tensor]
    output_norm: torch.Tensor | None

    @classmethod
    def make(
        cls,
        spec: StateMixer,
        layer: int,
        norm: Callable[[str | None], torch.Tensor | None],
        allocate: WeightAllocator,
    ) -> StateWeights:
        """Allocate the weights without contents."""
        return cls(
            spec=spec,
            layer=layer,
            input_norm=norm(spec.input_norm),
            linears=tuple(allocate.linear(matrix) for matrix in spec.matrices),
            others={name: allocate.tensor(*shape, dtype=torch.float32) for name, shape in spec.other_shapes.items()},
            output_norm=norm(spec.output_norm),
        )


def norm_over_ranks(
    weights: StateWeights, mixed_TX: torch.Tensor, eps: torch.Tensor | float, ranks: Ranks | None
) -> None:
    """Norm the outputs of a mixer in place, if they have one norm over the heads of all ranks.

    Args:
        weights: of the mixer.
        mixed_TX: outputs of the heads of this rank.
        eps: of the norm.
        ranks: ranks with equal numbers of heads; None for a whole model.
    """
    if ranks is not None and isinstance(weights.spec, MambaMixer) and weights.spec.joint_norm:
        pair = mixed_TX.unsqueeze(1), weights.others[NORM].unsqueeze(0)
        mixed_TX.copy_(joint_norm_over_ranks([pair], eps, ranks).squeeze(1))
