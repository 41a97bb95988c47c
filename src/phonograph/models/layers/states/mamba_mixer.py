"""Mamba 2 of a layer as a plain value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phonograph.graphs.modes import GraphSupport, Support
from phonograph.kernels.torch.state.mamba2 import MOST_GPU_KEYS, MambaSizes
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.conv_mixer import ConvMixer
from phonograph.models.layers.states.state_mixer import StateTensor

_MODULE = "mamba"
TAPS, BIAS, DECAY, SKIP, TIME_BIAS, NORM = (
    f"{_MODULE}.{name}" for name in ("conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight")
)
"""Names in a layer of the tensors that are no projections."""


@dataclass(frozen=True, kw_only=True)
class MambaMixer(ConvMixer):
    """Mixer by a causal convolution and the scan of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060).

    The projection has output gates, inputs, keys, queries and times. See `ConvMixer` for the other attributes.

    Attributes:
        sizes: heads.
        joint_norm: outputs have one norm over the heads of all ranks, after the mixer.
    """

    sizes: MambaSizes
    joint_norm: bool = False

    @property
    def name(self) -> str:
        """Name for people."""
        return "Mamba 2"

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are no projections, by name in the layer."""
        sizes = self.sizes
        heads = dict.fromkeys((DECAY, SKIP, TIME_BIAS), (sizes.heads,))
        bias = {BIAS: (sizes.channels,)} if self.bias else {}
        norm = {NORM: (sizes.inner,)} if sizes.norm_groups or self.joint_norm else {}
        return {TAPS: (sizes.channels, 1, self.taps), **bias, **heads, **norm}

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """Last inputs of the convolution, and the matrix of each head."""
        sizes = self.sizes
        return (
            StateTensor("convolution", (self.taps - 1, sizes.channels), wide=False),
            StateTensor("recurrent", (sizes.heads, sizes.head_size, sizes.key_size), wide=True),
        )

    @property
    def scratch(self) -> int:
        """Numbers of a token beside projections and output; see `MambaSizes`."""
        return sum(self.sizes.scratch_widths)

    @property
    def gpu_refusal(self) -> str | None:
        """Size of keys that GPU kernels do not take; None if they take these."""
        size = self.sizes.key_size
        if size <= MOST_GPU_KEYS:
            return None
        return f"a state of {size} numbers for each input of {self.name}; GPU kernels take up to {MOST_GPU_KEYS}"

    @property
    def graph_support(self) -> Support:
        """Batches that may run in a graph: all."""
        return Support(GraphSupport.ALWAYS, "Mamba 2: lengths and slots are read at each replay")

    def operands(
        self, projected: Sequence[torch.Tensor], others: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return what the product has written, and the tensors that are no projections."""
        heads = (others[name] for name in (DECAY, SKIP, TIME_BIAS))
        norm = None if self.joint_norm else others.get(NORM)
        return *projected, others[TAPS].squeeze(1), others.get(BIAS), *heads, norm


def mamba_mixer(
    sizes: MambaSizes,
    *,
    hidden_size: int,
    taps: int,
    conv_bias: bool,
    bias: bool,
    output_bias: bool | None = None,
    input_norm: str | None = "input_layernorm",
) -> MambaMixer:
    """Return a mixer with the names of Bamba.

    Args:
        sizes: heads.
        hidden_size: E.
        taps: of the convolution.
        conv_bias: the convolution has a bias.
        bias: the projections have a bias.
        output_bias: the last one has a bias; None for as the others.
        input_norm: norm of the stream before it.
    """
    inputs = (MatrixPart("in_proj", sizes.inner + sizes.channels + sizes.heads),)
    output = (MatrixPart("out_proj", hidden_size),)
    return MambaMixer(
        sizes=sizes,
        taps=taps,
        bias=conv_bias,
        projection=LayerMatrix("gates, inputs, keys and times", _MODULE, inputs, hidden_size, bias=bias),
        output=LayerMatrix("output", _MODULE, output, sizes.inner, bias=bias if output_bias is None else output_bias),
        input_norm=input_norm,
    )
