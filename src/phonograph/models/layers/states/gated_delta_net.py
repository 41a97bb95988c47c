"""Gated delta net of a layer as a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        projection: matrix of queries, keys, values and output gates, then of rates and times.
        gates: matrix of rates and times where their weights have another format; else None.
        output: matrix of the output.
        input_norm: norm of the stream before it.
        output_norm: norm of the output before it is added to the stream.
    """

    sizes: DeltaSizes
    taps: int
    projection: LayerMatrix
    gates: LayerMatrix | None
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
        return self.projection, *(() if self.gates is None else (self.gates,)), self.output

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

    def operands(
        self, projected: Sequence[torch.Tensor], others: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return mixed inputs and gates of the tokens, and the tensors that are no projections."""
        if self.gates is None:
            (projected_TF,) = projected
            num_gates = 2 * self.sizes.value_heads
            projected = projected_TF.split([projected_TF.shape[1] - num_gates, num_gates], 1)
        return *projected, others[TAPS].squeeze(1), *(others[name] for name in (DECAY, TIME_BIAS, NORM))

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> GatedDeltaNet:
        """Return it with the weight format of each projection, by its name in the layer."""
        parts = (part for matrix in self.matrices[:-1] for part in matrix.with_schemes(scheme_of).parts)
        projection, gates = _projections((*parts,), self.projection.num_inputs)
        return replace(self, projection=projection, gates=gates, output=self.output.with_schemes(scheme_of))


def _projections(parts: tuple[MatrixPart, ...], num_inputs: int) -> tuple[LayerMatrix, LayerMatrix | None]:
    """Return the matrix of all inputs, or two if rates and times, the second half of the parts, have another format."""
    if len({part.scheme for part in parts}) == 1:
        return LayerMatrix("q, k, v, gate, rates and times", _MODULE, parts, num_inputs), None
    half = len(parts) // 2
    gates = LayerMatrix("rates and times", _MODULE, parts[half:], num_inputs)
    return LayerMatrix("q, k, v and gate", _MODULE, parts[:half], num_inputs), gates


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
    if sizes.by_head:
        widths = {"qkvz": sizes.channels + values, "ba": 2 * heads}
    parts = tuple(MatrixPart(f"in_proj_{name}", width) for name, width in widths.items())
    projection, gates = _projections(parts, hidden_size)
    return GatedDeltaNet(
        sizes=sizes,
        taps=taps,
        projection=projection,
        gates=gates,
        output=LayerMatrix("output", _MODULE, (MatrixPart("out_proj", hidden_size),), values),
        input_norm=input_norm,
    )
