"""Mamba 2 of a layer as a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phonograph.graphs.modes import GraphSupport, Support
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.state_mixer import StateTensor
from phonograph.models.quantization.scheme import Scheme

_MODULE = "mamba"
TAPS, BIAS, DECAY, SKIP, TIME_BIAS, NORM = (
    f"{_MODULE}.{name}" for name in ("conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight")
)
"""Names in a layer of the tensors that are no projections."""


@dataclass(frozen=True, kw_only=True)
class MambaMixer:
    """Mixer by a causal convolution and the scan of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060).

    Attributes:
        sizes: heads.
        taps: W, taps of the convolution.
        bias: the convolution has a bias.
        projection: matrix of output gates, inputs, keys, queries and times.
        output: matrix of the output.
        input_norm: norm of the stream before it.
        output_norm: norm of the output before it is added to the stream.
    """

    sizes: MambaSizes
    taps: int
    bias: bool
    projection: LayerMatrix
    output: LayerMatrix
    input_norm: str | None
    output_norm: str | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return "Mamba 2"

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return self.projection, self.output

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are no projections, by name in the layer."""
        sizes = self.sizes
        heads = dict.fromkeys((DECAY, SKIP, TIME_BIAS), (sizes.heads,))
        bias = {BIAS: (sizes.channels,)} if self.bias else {}
        return {TAPS: (sizes.channels, 1, self.taps), **bias, **heads, NORM: (sizes.inner,)}

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
        """Numbers of a token beside projections and output: inputs of the scan, after the convolution."""
        return self.sizes.channels

    @property
    def gpu_refusal(self) -> str | None:
        """Reason why no GPU runs it."""
        return f"layers with {self.name} have no GPU kernel yet"

    @property
    def graph_support(self) -> Support:
        """Batches that may run in a graph: all."""
        return Support(GraphSupport.ALWAYS, "Mamba 2: lengths and slots are read at each replay")

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> MambaMixer:
        """Return it with the weight format of each projection, by its name in the layer."""
        return replace(
            self, projection=self.projection.with_schemes(scheme_of), output=self.output.with_schemes(scheme_of)
        )


def mamba_mixer(
    sizes: MambaSizes,
    *,
    hidden_size: int,
    taps: int,
    conv_bias: bool,
    bias: bool,
    input_norm: str | None = "input_layernorm",
) -> MambaMixer:
    """Return a mixer with the names of Bamba.

    Args:
        sizes: heads.
        hidden_size: E.
        taps: of the convolution.
        conv_bias: the convolution has a bias.
        bias: the projections have a bias.
        input_norm: norm of the stream before it.
    """
    inputs = (MatrixPart("in_proj", sizes.inner + sizes.channels + sizes.heads),)
    output = (MatrixPart("out_proj", hidden_size),)
    return MambaMixer(
        sizes=sizes,
        taps=taps,
        bias=conv_bias,
        projection=LayerMatrix("gates, inputs, keys and times", _MODULE, inputs, hidden_size, bias=bias),
        output=LayerMatrix("output", _MODULE, output, sizes.inner, bias=bias),
        input_norm=input_norm,
    )
