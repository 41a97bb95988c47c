"""Input of a draft head as a plain value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phonograph.models.layers.layer_matrix import LayerMatrix

EMBEDDING_NORM, FEATURE_NORM = "layers.0.input_layernorm", "layers.0.hidden_norm"
"""Names of the norms of the embedding and of the feature behind `model.`."""


class FeatureInput(NamedTuple):
    """Input of a draft head: features of its target beside the embedding of a token (EAGLE, Li et al. 2024 and 2025).

    In EAGLE-3, the join makes features of the target's states, the stream begins with the feature, and the first layer
    reads [norm(embedding), norm(feature)]. In EAGLE-1, a feature is the target's last state behind its final norm, the
    stream begins with the join of [embedding, feature], and the head has no final norm. There are heads of EAGLE-3 with
    the features of EAGLE-1 too, without a join.

    Attributes:
        vocab_size: tokens of the target, which the embedding has.
        owns_embedding: False if the embedding is the target's.
        owns_head: False if the matrix of the logits is the target's.
        state_size: numbers that the head reads of the target for each token.
        join: matrix that makes a feature of the target's hidden states; in EAGLE-1, the stream. None if features are
            the states.
        joins_embedding: True in EAGLE-1.
        of_last_state: the state is the last one, behind the target's final norm.
        state_norms: norms of the target's states before the join, as name and size: one for all of them together, or
            one for each.
        normed_stream: the stream begins with the normed feature.
        normed_output: the feature of the next entry is the output behind the final norm.
    """

    vocab_size: int
    owns_embedding: bool
    owns_head: bool
    state_size: int
    join: LayerMatrix | None
    joins_embedding: bool = False
    of_last_state: bool = False
    state_norms: tuple[tuple[str, int], ...] = ()
    normed_stream: bool = False
    normed_output: bool = False

    def memory_size(self, hidden_size: int) -> int:
        """Return the numbers for each token that a step keeps beside the model's own intermediates, with states."""
        normed_apart = self.state_norms[0][1] if len(self.state_norms) > 1 else 0
        return self.state_size + normed_apart + 4 * hidden_size

    def norms(self, hidden_size: int) -> Iterator[tuple[str, int]]:
        """Yield the name behind `model.` and the size of each norm: those of states, of the embedding, of the feature.

        EAGLE-1 has none.
        """
        yield from self.state_norms
        if not self.joins_embedding:
            yield EMBEDDING_NORM, hidden_size
            yield FEATURE_NORM, hidden_size

    def tensors(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name behind `model.` and the shape of each tensor of a checkpoint but the embedding."""
        if self.join is not None:
            yield from self.join.tensors()
        for name, size in self.norms(hidden_size):
            yield f"{name}.weight", (size,)
