"""Short convolution of a layer as a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phonograph.graphs.modes import GraphSupport, Support
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.state_mixer import StateTensor
from phonograph.models.quantization.scheme import Scheme

_MODULE = "conv"
CONV_TAPS = f"{_MODULE}.conv.weight"
"""Name in a layer of the taps."""


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """Mixer by a causal convolution of few taps between two gates, as in LFM2 (arXiv:2511.23404).

    Attributes:
        taps: W, taps of the convolution.
        projection: matrix of input gates, output gates and inputs.
        output: matrix of the output.
        input_norm: norm of the stream before it.
        output_norm: norm of the output before it is added to the stream.
    """

    taps: int
    projection: LayerMatrix
    output: LayerMatrix
    input_norm: str | None
    output_norm: str | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return "short convolution"

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return self.projection, self.output

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are no projections, by name in the layer."""
        return {CONV_TAPS: (self.output.num_inputs, 1, self.taps)}

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """Last inputs of the convolution."""
        return (StateTensor("convolution", (self.taps - 1, self.output.num_inputs), wide=False),)

    @property
    def scratch(self) -> int:
        """Numbers of a token beside projection and output: none."""
        return 0

    @property
    def gpu_refusal(self) -> str | None:
        """Size that GPU kernels do not take: none."""
        return None

    @property
    def graph_support(self) -> Support:
        """Batches that may run in a graph: all."""
        return Support(GraphSupport.ALWAYS, "short convolution: kernels read lengths and slots at each replay")

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> ShortConvolution:
        """Return it with the weight format of each projection, by its name in the layer."""
        projection, output = (matrix.with_schemes(scheme_of) for matrix in self.matrices)
        return replace(self, projection=projection, output=output)


def short_convolution(hidden_size: int, *, taps: int, input_norm: str) -> ShortConvolution:
    """Return a short convolution with the names of LFM2, whose channels are those of the stream."""
    projection, output = (MatrixPart("in_proj", 3 * hidden_size),), (MatrixPart("out_proj", hidden_size),)
    return ShortConvolution(
        taps=taps,
        projection=LayerMatrix("gates and inputs", _MODULE, projection, hidden_size),
        output=LayerMatrix("output", _MODULE, output, hidden_size),
        input_norm=input_norm,
    )
