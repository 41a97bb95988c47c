"""Common part of mixers with one projection, a causal convolution and an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.quantization.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class ConvMixer:
    """Projection, convolution and output of a mixer.

    Attributes:
        taps: W, taps of the convolution.
        bias: the convolution has a bias.
        projection: matrix of all that the mixer reads of a token.
        output: matrix of the output.
        input_norm: norm of the stream before it.
        output_norm: norm of the output before it is added to the stream.
    """

    taps: int
    bias: bool
    projection: LayerMatrix
    output: LayerMatrix
    input_norm: str | None
    output_norm: str | None = None

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return self.projection, self.output

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> Self:
        """Return it with the weight format of each projection, by its name in the layer."""
        return replace(
            self, projection=self.projection.with_schemes(scheme_of), output=self.output.with_schemes(scheme_of)
        )
