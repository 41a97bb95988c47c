"""Gated delta net of a layer as a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phonograph.graphs.modes import GraphSupport, Support
from phonograph.kernels.torch.state.gated_delta import MOST_GPU_SIZE, DeltaSizes
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.state_mixer import StateTensor
from phonograph.models.quantization.scheme import Scheme

if TYPE_CHECKING:
    import torch

_MODULE = "linear_attn"
TAPS, DECAY, TIME_BIAS, NORM = (f"{_MODULE}.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"))
"""Names in a layer of the tensors that are no projections."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Mixer by a causal convolution and the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    Attributes:
        sizes: heads, and the order of the columns of the projections.
        taps: W, taps of the convolution.
        projection: matrix of queries, keys, values and output gates.
        gates: matrix of rates and times.
        output: matrix of the output.
        input_norm: norm of the stream before it.
        output_norm: norm of the output before it is added to the stream.
    """

    sizes: DeltaSizes
    taps: int
    projection: LayerMatrix
    gates: LayerMatrix
    output: LayerMatrix
    input_norm: str | None
    output_norm: str | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return "gated delta net"

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return self.projection, self.gates, self.output

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are no projections, by name in the layer."""
        heads = self.sizes.value_heads
        return {
            TAPS: (self.sizes.channels, 1, self.taps),
            DECAY: (heads,),
            TIME_BIAS: (heads,),
            NORM: (self.sizes.value_size,),
        }

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """Last inputs of the convolution, and the matrix of each head of values."""
        sizes = self.sizes
        return (
            StateTensor("convolution", (self.taps - 1, sizes.channels), wide=False),
            StateTensor("recurrent", (sizes.value_heads, sizes.key_size, sizes.value_size), wide=True),
        )

    @property
    def scratch(self) -> int:
        """Numbers of a token beside projections and output: inputs of the rule, and what its chunks need."""
        return sum(self.sizes.scratch_widths)

    @property
    def gpu_refusal(self) -> str | None:
        """Size of heads that GPU kernels do not take; None if they take these."""
        key, value = self.sizes.key_size, self.sizes.value_size
        if max(key, value) <= MOST_GPU_SIZE:
            return None
        return f"heads of {key} and {value} in a {self.name}; GPU kernels take up to {MOST_GPU_SIZE}"

    @property
    def graph_support(self) -> Support:
        """Batches that may run in a graph: all."""
        return Support(GraphSupport.ALWAYS, "gated delta net: kernels read lengths and slots at each replay")

    def operands(self, others: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that are no projections, in the order of the operator's arguments."""
        return others[TAPS].squeeze(1), *(others[name] for name in (DECAY, TIME_BIAS, NORM))

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> GatedDeltaNet:
        """Return it with the weight format of each projection, by its name in the layer."""
        return replace(
            self,
            projection=self.projection.with_schemes(scheme_of),
            gates=self.gates.with_schemes(scheme_of),
            output=self.output.with_schemes(scheme_of),
        )


def gated_delta_net(
    sizes: DeltaSizes, *, hidden_size: int, taps: int, input_norm: str | None = "input_layernorm"
) -> GatedDeltaNet:
    """Return a gated delta net with the names of Qwen3-Next if its columns are in the order of heads, else of Qwen3.5.

    Args:
        sizes: heads.
        hidden_size: E.
        taps: of the convolution.
        input_norm: norm of the stream before it.
    """
    heads, values = sizes.value_heads, sizes.value_heads * sizes.value_size
    widths = {"qkv": sizes.channels, "z": values, "b": heads, "a": heads}
    names = ("qkvz",), ("ba",)
    if not sizes.by_head:
        names = ("qkv", "z"), ("b", "a")
    else:
        widths = {"qkvz": sizes.channels + values, "ba": 2 * heads}
    projection, gates = (tuple(MatrixPart(f"in_proj_{name}", widths[name]) for name in group) for group in names)
    return GatedDeltaNet(
        sizes=sizes,
        taps=taps,
        projection=LayerMatrix("q, k, v and gate", _MODULE, projection, hidden_size),
        gates=LayerMatrix("rates and times", _MODULE, gates, hidden_size),
        output=LayerMatrix("output", _MODULE, (MatrixPart("out_proj", hidden_size),), values),
        input_norm=input_norm,
    )
