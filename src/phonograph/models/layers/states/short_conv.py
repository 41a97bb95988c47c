"""Gated short convolution of a layer as a plain value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phonograph.graphs.modes import GraphSupport, Support
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.conv_mixer import ConvMixer
from phonograph.models.layers.states.state_mixer import StateTensor

if TYPE_CHECKING:
    import torch

TAPS, BIAS = "conv.conv.weight", "conv.conv.bias"
"""Names in a layer of the tensors that are no projections."""


@dataclass(frozen=True, kw_only=True)
class ShortConv(ConvMixer):
    """Mixer by a causal convolution with a gate on its input and one on its output, as in LFM2.

    The projection has input gates, output gates and inputs. See `ConvMixer` for the attributes.
    """

    @property
    def name(self) -> str:
        """Name for people."""
        return "short convolution"

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are no projections, by name in the layer."""
        channels = self.output.num_inputs
        return {TAPS: (channels, 1, self.taps)} | ({BIAS: (channels,)} if self.bias else {})

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """Last inputs of the convolution."""
        return (StateTensor("convolution", (self.taps - 1, self.output.num_inputs), wide=False),)

    @property
    def scratch(self) -> int:
        """Numbers of a token beside projections and output: none."""
        return 0

    @property
    def gpu_refusal(self) -> str | None:
        """Reason why no GPU runs it: none."""
        return None

    @property
    def graph_support(self) -> Support:
        """Batches that may run in a graph: all."""
        return Support(GraphSupport.ALWAYS, "short convolution: lengths and slots are read at each replay")

    def operands(
        self, projected: Sequence[torch.Tensor], others: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return what the product has written, and the tensors that are no projections."""
        return *projected, others[TAPS].squeeze(1), others.get(BIAS)


def short_conv(hidden_size: int, *, taps: int, bias: bool, input_norm: str | None = "input_layernorm") -> ShortConv:
    """Return a short convolution with the names of LFM2.

    Args:
        hidden_size: E, which is the number of channels.
        taps: of the convolution.
        bias: of the convolution and the projections.
        input_norm: norm of the stream before it.
    """
    inputs, output = (MatrixPart("in_proj", 3 * hidden_size),), (MatrixPart("out_proj", hidden_size),)
    return ShortConv(
        taps=taps,
        bias=bias,
        projection=LayerMatrix("gates and inputs", "conv", inputs, hidden_size, bias=bias),
        output=LayerMatrix("output", "conv", output, hidden_size, bias=bias),
        input_norm=input_norm,
    )
