"""Embeddings of a token in single layers: their specification and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.linear import Linear, WeightAllocator
from phonograph.models.quantization.scheme import Scheme


class LayerEmbeddings(NamedTuple):
    """Embeddings of a token in all layers, from a table of its own and from the token's embedding.

    With token t, its embedding x of E numbers and L layers, those of P numbers in layer l are
    (sqrt(P) * table[t] + norm(projection(x) / sqrt(E)))[l] / sqrt(2).

    Attributes:
        vocab_size: rows of the table.
        size: P.
    """

    vocab_size: int
    size: int


@dataclass(frozen=True, kw_only=True)
class LayerEmbedding:
    """Embedding of a token in a layer, added after the feed-forward: output(activation(gate(stream)) * embedding).

    Attributes:
        gate: matrix of the gates, whose outputs are the numbers of the embedding.
        output: matrix of what is added.
        output_norm: norm of it.
    """

    gate: LayerMatrix
    output: LayerMatrix
    output_norm: str

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerEmbedding:
        """Return it with the weight format of each projection, by its name in the layer."""
        return replace(self, gate=self.gate.with_schemes(scheme_of), output=self.output.with_schemes(scheme_of))


def layer_embedding(hidden_size: int, size: int) -> LayerEmbedding:
    """Return the embedding of `size` numbers, with the names of Gemma."""
    gate, output = (MatrixPart("per_layer_input_gate", size),), (MatrixPart("per_layer_projection", hidden_size),)
    return LayerEmbedding(
        gate=LayerMatrix("gate of the layer's embedding", "", gate, hidden_size),
        output=LayerMatrix("layer's embedding", "", output, size),
        output_norm="post_per_layer_input_norm",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddingWeights:
    """Weights of a layer's embedding of a token.

    Attributes:
        layer: index of the layer.
        scalar: [1], factor of the stream after it, or None.
    """

    spec: LayerEmbedding
    layer: int
    gate: Linear
    output: Linear
    output_norm: torch.Tensor
    scalar: torch.Tensor | None


class LayerEmbeddingFactors(NamedTuple):
    """Factors of what the table has, of the projection before its norm, and of their sum."""

    found: float
    projected: float
    both: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddingsWeights:
    """Weights of all layers' embeddings of a token.

    Attributes:
        table_VX: [vocabulary, L * P].
        projection: [L * P, E], of the token's embedding.
        norm_P: norm of its result in each layer.
    """

    spec: LayerEmbeddings
    table_VX: torch.Tensor
    projection: Linear
    norm_P: torch.Tensor

    @classmethod
    def make(
        cls, spec: LayerEmbeddings, num_layers: int, hidden_size: int, allocate: WeightAllocator
    ) -> LayerEmbeddingsWeights:
        """Allocate the weights without contents."""
        size = num_layers * spec.size
        part = (MatrixPart("per_layer_model_projection", size),)
        matrix = LayerMatrix("layers' embeddings", "", part, hidden_size, quantizable=False)
        return cls(
            spec=spec,
            table_VX=allocate.tensor(spec.vocab_size, size),
            projection=allocate.linear(matrix),
            norm_P=allocate.norm(spec.size),
        )

    def factors(self) -> LayerEmbeddingFactors:
        """Return the factors in the model's type, as transformers rounds them."""
        found = torch.tensor(self.spec.size**0.5, dtype=self.table_VX.dtype).item()
        return LayerEmbeddingFactors(found, self.projection.spec.num_inputs**-0.5, 2**-0.5)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name in the model."""
        return {
            "embed_tokens_per_layer.weight": self.table_VX,
            "per_layer_projection_norm.weight": self.norm_P,
            **self.projection.checkpoint_views(),
        }
