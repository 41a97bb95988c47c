"""Input of a draft head as a plain value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phonograph.models.layers.layer_matrix import LayerMatrix


class FeatureInput(NamedTuple):
    """Input of a draft head: features of its target beside the embedding of a token (EAGLE, Li et al. 2024 and 2025).

    The stream begins with the feature, and the first layer reads [norm(embedding), norm(feature)].

    Attributes:
        vocab_size: tokens of the target, which the embedding has.
        owns_embedding: False if the embedding is the target's.
        join: matrix that makes a feature of the target's hidden states.
        embedding_norm: norm of the embedding, by its name in the first layer.
        feature_norm: norm of the feature, likewise.
        normed_stream: the stream begins with the normed feature.
    """

    vocab_size: int
    owns_embedding: bool
    join: LayerMatrix
    embedding_norm: str
    feature_norm: str
    normed_stream: bool

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name behind `model.` and the shape of each tensor of a checkpoint but the embedding."""
        yield from self.join.tensors()
        for norm in (self.embedding_norm, self.feature_norm):
            yield f"layers.0.{norm}.weight", (hidden_size,)
