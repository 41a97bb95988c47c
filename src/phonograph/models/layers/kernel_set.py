"""Protocols of a kernel set and of the parts of a decoder that it builds.

A part is a piece of the forward loop bound to a device: it owns its weights and the plans of its products. Fusion is
its affair: the norm that the next part begins with (`then`) may be computed at once, deferred to the next product, or
left to it. The loop is the same for all kernel sets.

Shapes: T tokens, N rows that need logits, P rows that are kept in the last layer, H query heads, K KV heads, D head
size, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from phonograph.models.heads.encoder_ends import InputWeights
from phonograph.models.heads.pooler_spec import Pooling
from phonograph.models.layers.layer_embedding import LayerEmbeddingsWeights, LayerEmbeddingWeights
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.part_weights import AttentionWeights, ExpertsWeights, FeatureWeights, FeedForwardWeights
from phonograph.models.layers.states.state_weights import StateWeights
from phonograph.models.quantization.block_embedding import Embedding


class KVTarget(NamedTuple):
    """Destination of a layer's keys and values.

    Attributes:
        kv_cache: [2, B, S, K, D].
        slot_mapping: int64, of the step's tokens; may be shorter than they are; -1 writes nothing.
        k_scale: [K] float32 for the keys of an FP8 cache, or None for 1.
        v_scale: the same for values.
        clears_padding: True if attention itself writes the zeros of padding rows.
    """

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    clears_padding: bool


class Attend(Protocol):
    """Attention of one step. It writes keys and values to the KV cache, and reads the cache.

    A model needs only `__call__`. The two methods split it, for a kernel set that rotates queries and keys and writes
    the cache in one launch.
    """

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor | None, v_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        """Return the output, contiguous [T, H, D]. The inputs may be views whose heads are contiguous.

        Without keys and values nothing is written: the layer reads those of another.
        """
        ...

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        """Return the destination of a layer's keys and values."""
        ...

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        """Attend to the cache, which has the step's keys and values, into `out_THD`."""
        ...


@dataclass(slots=True)
class Stream:
    """The residual stream between two parts. The next part may overwrite it.

    Attributes:
        hidden_TE: the rows.
        normed: normed rows for the next part, if the kernel set computes them (`Rows`).
        norm: deferred norm of `normed`, if there is one.
        is_part: True if only the rows that are kept in the last layer are left.
        num_rows: int32 [1] on the device, number of rows that are not padding; None for all.
    """

    hidden_TE: torch.Tensor
    normed: Any = None
    norm: Any = None
    is_part: bool = False
    num_rows: torch.Tensor | None = None


class StepStates(NamedTuple):
    """States of a step's sequences.

    Attributes:
        query_start_loc: int32 [R + 1], first token of each sequence in the step.
        seq_lens: int32 [R], tokens of each sequence with those of the step; 0 for an empty row.
        slots: int32 [R], slot of each sequence. A row with -1 starts from zeros and writes no state.
        checkpoints: int32 [3, R], by row: the place in the pool that the state is read from in place of the slot; the
            place that it is copied to; and the tokens of the sequence at the copy. -1 for none.
        pool: states by slot, then by checkpoint, of each layer that has them, in the order of `StateMixer.states`.
        single: True if the first sequences have one token each, and the others, after them, none.
        early: True if a kernel that starts while the one before it runs may read the tensors above: those at the head
            of the step, and those of the step before, have ended.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    checkpoints: torch.Tensor
    pool: Mapping[int, tuple[torch.Tensor, ...]]
    single: bool = False
    early: bool = False


class Step(NamedTuple):
    """Inputs of a step that all layers share.

    Attributes:
        rotary: of `KernelSet.rotary`.
        attend: attention of the step.
        rows_P: the only rows that are kept after attention, int64; None for all.
        num_kept: int32 [1] on the device, number of `rows_P` that are not padding; None for all.
        embeddings_TX: [T, L * P], embeddings of all tokens in all layers; None if the model has none.
        states: states of the sequences; None if no layer has them.
    """

    rotary: Any
    attend: Attend
    rows_P: torch.Tensor | None = None
    num_kept: torch.Tensor | None = None
    embeddings_TX: torch.Tensor | None = None
    states: StepStates | None = None


class EmbeddingPart(Protocol):
    """The beginning of the stream.

    Attributes:
        then: the part that reads the stream next; a model sets it.
    """

    then: Any

    def __call__(self, input_ids_T: torch.Tensor) -> Stream: ...


class InputPart(Protocol):
    """The beginning of an encoder's stream; `then` as in `EmbeddingPart`."""

    then: Any

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> Stream:
        """Return the stream of tokens with their types (`core.token_types`)."""
        ...


class FeaturePart(Protocol):
    """The beginning of a draft head's stream; `then` as in `EmbeddingPart`."""

    then: Any

    def join(self, states_TF: torch.Tensor) -> torch.Tensor:
        """Return features [T, E] of the target's hidden states, which it may overwrite; valid until the next call."""
        ...

    def next_features(self, hidden_TE: torch.Tensor, rows_R: torch.Tensor | None, out_RE: torch.Tensor) -> None:
        """Write the features of the next entries: what the head said in these rows of its stream, or in all."""
        ...

    def __call__(self, input_ids_T: torch.Tensor, features_TE: torch.Tensor) -> Stream: ...


class MixerPart(Protocol):
    """Mixer of a layer: attention, or one with a state; `then` as in `EmbeddingPart`."""

    then: Any

    def __call__(self, stream: Stream, step: Step) -> Stream:
        """Return the stream with the result added, of the rows that are kept. It is valid until the next call."""
        ...


class FeedForwardPart(Protocol):
    """Feed-forward of a layer; `then` as in `EmbeddingPart`, None after the last layer."""

    then: Any

    def __call__(self, stream: Stream) -> Stream:
        """Return the stream with the result added. It is valid until the next call."""
        ...


class LayerEmbeddingPart(Protocol):
    """A layer's embedding of a token; `then` as in `FeedForwardPart`."""

    then: Any

    def __call__(self, stream: Stream, step: Step) -> Stream:
        """Return the stream with the result added. It is valid until the next call."""
        ...


class LayerEmbeddingsPart(Protocol):
    """Embeddings of tokens in all layers."""

    def __call__(self, input_ids_T: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Return [T, L * P], valid during the step, for the stream that begins with the tokens' embeddings."""
        ...


class HeadPart(Protocol):
    """The final norm and the logits."""

    def __call__(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        """Return logits [N, V] of the rows `rows_N` of the stream, or of all rows; valid until the next call."""
        ...


class KernelSet(Protocol):
    """Builder of a decoder's parts for one kind of device."""

    def rotary(self, positions_T: torch.Tensor) -> Any:
        """Return the input of attention that depends on the positions only, once a step."""
        ...

    def embedding(self, embedding_VE: Embedding) -> EmbeddingPart: ...

    def input(self, embedding_VE: Embedding, weights: InputWeights) -> InputPart: ...

    def features(self, weights: FeatureWeights) -> FeaturePart: ...

    def attention(self, weights: AttentionWeights) -> MixerPart: ...

    def states(self, weights: StateWeights) -> MixerPart: ...

    def beside(self, attention: AttentionWeights, states: StateWeights) -> MixerPart:
        """Return a part of two mixers that read the same rows, normed by `states.input_norm`."""
        ...

    def feed_forward(self, weights: FeedForwardWeights) -> FeedForwardPart: ...

    def experts(self, weights: ExpertsWeights, load_X: torch.Tensor | None = None) -> FeedForwardPart:
        """Return a part that adds the pairs of each expert to `load_X`, int64, in each step; None counts nothing."""
        ...

    def layer_embedding(self, weights: LayerEmbeddingWeights) -> LayerEmbeddingPart: ...

    def layer_embeddings(self, weights: LayerEmbeddingsWeights) -> LayerEmbeddingsPart: ...

    def head(self, norm_E: torch.Tensor | None, linear: Linear) -> HeadPart: ...

    def gathered(self, logits_NP: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary for those of a part that a rank has; on rank 0 only."""
        ...

    def pool(
        self,
        hidden_TE: torch.Tensor,
        norm_E: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
        pooling: Pooling,
    ) -> torch.Tensor:
        """Return rows of the stream after the final norm, float32: [R, E] of the prompts, or [T, E] of all tokens.

        Args:
            hidden_TE: the stream.
            norm_E: final norm, or None.
            query_start_loc: int32 [R+1], on the device; None for all tokens. Empty slots get a row of finite numbers.
            pooling: what a prompt's row is.
        """
        ...

    def keep_pooled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the pooler's rows of a step where they stay until the next one, whichever graph that is."""
        ...

    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        """Return True if the last layer of a prefill of `num_tokens` computes only the `num_kept` rows with logits."""
        ...
