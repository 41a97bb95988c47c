"""Specification of a decoder layer as plain values: its heads, its feed-forward, its norms and its matrices.

A layer's value has no index and no weights, so that equal layers of a model share one object. What a family of models
has of its own is said here; kernels, memory and checkpoints follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch

from phonograph.models.layers.layer_embedding import LayerEmbedding, layer_embedding
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.quantization.scheme import Scheme

UNLIMITED = (-1, -1)
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
"""Activation of gates: x * sigmoid(x), GELU by the approximation with tanh or by erf, max(x, 0), or its square."""
ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""Activation of experts' gates and ups, or of ups alone: one of `Activation`, or that of `clamped_swiglu_and_mul`."""


class RopeTable(NamedTuple):
    """Rotary embedding of a layer: angles of its pairs by position. Layers with equal values share one table.

    Attributes:
        frequencies: angle per position of each pair (d, d + R/2), with R = 2 * pairs. The head's numbers from R on are
            not rotated.
        factor: factor on cos and sin.
        distance: distance of a pair's numbers, if it is not R/2 but half a head: pairs (d, d + distance).
        original_length: positions up to which `frequencies` hold; 0 for no limit. A table of more positions has
            `long_frequencies` at every position.
        long_frequencies: frequencies of longer tables.
        query_beta: scale of queries by position p: 1 + beta * log(1 + floor(p / query_length)); 0 for none.
        query_length: see `query_beta`.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    distance: int = 0
    original_length: int = 0
    long_frequencies: tuple[float, ...] = ()
    query_beta: float = 0.0
    query_length: int = 0


class NormKind(NamedTuple):
    """Arithmetic of a model's norms.

    Attributes:
        wide: weights are kept in float32, and x / rms * weight is rounded once. Otherwise x / rms is rounded to the
            model's type before it is multiplied.
        offset: number that is added to the weights of a checkpoint in transformers' format.
        layer: layer norms, which subtract the mean, in place of RMS norms; `bias`: they have a bias.
        after_sum: output norms are of the stream after the output is added to it.
    """

    wide: bool = False
    offset: float = 0.0
    layer: bool = False
    bias: bool = False
    after_sum: bool = False


PLAIN_NORMS = NormKind()
SINKS = "self_attn.sinks"
"""Name of the sinks of a layer's heads."""


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Attention of a layer. Norms are named as in a checkpoint; None for a norm that the layer has not.

    Attributes:
        num_query_heads: H.
        num_kv_heads: K, a divisor of H.
        head_size: D.
        qkv: matrix of queries, keys and values; without values if they are the keys.
        gated: the rows of each query head in `qkv` are followed by those of the gates of its output, which is
            multiplied by their sigmoid.
        output: matrix of the output.
        window: (left, right) keys next to the query; -1 is unlimited. A `sliding_window` of W keys is (W - 1, 0).
        scale: factor of the scores.
        softcap: cap c of scaled scores s, which become c * tanh(s / c); 0 for none.
        sinks: each query head has a sink: one more score in the denominator of the softmax, without a value.
        rope: rotary embedding; None for none.
        head_norms: True if queries and keys are normed before the rotary embedding.
        joint_norms: these norms are over all heads of a token together; otherwise each head is normed.
        value_norms: True if each head of values is normed, without weights.
        keys_are_values: True if values are the keys as they are before their norm and the rotary embedding.
        kv_layer: index of an earlier layer whose keys and values the layer reads, so that it has and writes none; None
            for its own.
        memory: matrix of the keys and values of an encoder's states, to which the layer attends; `qkv` then has queries
            alone. None for attention to the sequence itself.
        input_norm: norm of the stream before the layer's attention.
        output_norm: norm of the output before it is added to the stream.
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    qkv: LayerMatrix
    output: LayerMatrix
    gated: bool = False
    window: tuple[int, int]
    scale: float
    softcap: float
    sinks: bool
    rope: RopeTable | None
    head_norms: bool
    joint_norms: bool
    value_norms: bool
    keys_are_values: bool
    kv_layer: int | None
    input_norm: str | None
    output_norm: str | None
    memory: LayerMatrix | None = None

    @property
    def num_key_heads(self) -> int:
        """Heads of keys in `qkv`."""
        return self.num_kv_heads if self.kv_layer is None and self.memory is None else 0

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return (self.qkv, self.output) if self.memory is None else (self.memory, self.qkv, self.output)

    @property
    def scratch(self) -> int:
        """Numbers of a token that a GPU keeps beside the projections: queries without the gates between them."""
        return self.output.num_inputs if self.gated else 0

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors of a checkpoint that are neither projections nor norms, by name in the layer."""
        return {SINKS: (self.num_query_heads,)} if self.sinks else {}

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerAttention:
        """Return the attention with the weight format of each projection, by its name in the layer."""
        return replace(self, qkv=self.qkv.with_schemes(scheme_of), output=self.output.with_schemes(scheme_of))


class FeedForward(Protocol):
    """Feed-forward of a layer: dense, or experts (`layers.expert_spec`). It is a frozen dataclass."""

    @property
    def input_norm(self) -> str | None: ...

    @property
    def output_norm(self) -> str | None: ...

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]: ...

    @property
    def norms(self) -> tuple[str | None, ...]: ...

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> FeedForward: ...


@dataclass(frozen=True, kw_only=True)
class LayerFeedForward:
    """Dense feed-forward of a layer: down(activation(gate) * up).

    Attributes:
        gate_up: matrix of gates and ups.
        down: matrix of the output.
        activation: of the gates.
        input_norm: norm of the stream before it; None for none.
        output_norm: norm of the output before it is added to the stream; None for none.
    """

    gate_up: LayerMatrix
    down: LayerMatrix
    activation: Activation
    input_norm: str | None
    output_norm: str | None

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return self.gate_up, self.down

    @property
    def norms(self) -> tuple[str | None, ...]:
        """Names of the norms."""
        return self.input_norm, self.output_norm

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors of a checkpoint that are neither projections nor norms, by name in the layer."""
        return {}

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerFeedForward:
        """Return the feed-forward with the weight format of each projection, by its name in the layer."""
        return replace(self, gate_up=self.gate_up.with_schemes(scheme_of), down=self.down.with_schemes(scheme_of))


class LayerSizes(NamedTuple):
    """Sizes of a layer."""

    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int


class Factors(NamedTuple):
    """Factors of a model's embeddings, of what layers add to the stream, and of logits.

    Attributes:
        softcap: cap c of logits x times their factor, which become c * tanh(x / c); 0 for none.
        rounds_embedding: the factor of embeddings is rounded to the model's type before it is multiplied.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    softcap: float = 0.0
    rounds_embedding: bool = False

    def of_embedding(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings of a model in `dtype`."""
        return torch.tensor(self.embedding, dtype=dtype).item() if self.rounds_embedding else self.embedding


NO_FACTORS = Factors()


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: a mixer of tokens, then the feed-forward, each added to the stream. It may have one of them.

    Attributes:
        mixer: attention, or a mixer with a state; None for none.
        beside: mixer with a state that reads the same normed rows as the attention, or None. Both are added.
        cross: attention to an encoder's states after the mixer, or None.
        feed_forward: of the layer; None for none.
        embedding: the layer's embedding of the token, or None.
        scalar: name of the tensor with one number, the factor of the stream after the layer; None for none.
    """

    mixer: LayerAttention | StateMixer | None
    feed_forward: FeedForward | None
    embedding: LayerEmbedding | None = None
    scalar: str | None = None
    cross: LayerAttention | None = None
    beside: StateMixer | None = None

    @property
    def attention(self) -> LayerAttention:
        """The mixer of a layer with attention; others are left out by `ModelSpec.attentions`."""
        assert isinstance(self.mixer, LayerAttention)
        return self.mixer

    @property
    def state(self) -> StateMixer | None:
        """The mixer of a layer with a state; None for others."""
        return self.beside if isinstance(self.mixer, LayerAttention) else self.mixer

    @property
    def parts(self) -> tuple[LayerAttention | StateMixer | FeedForward, ...]:
        """The mixers, attention to an encoder and the feed-forward, as far as the layer has them."""
        return tuple(part for part in (self.mixer, self.beside, self.cross, self.feed_forward) if part is not None)

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        embedding = () if self.embedding is None else (self.embedding.gate, self.embedding.output)
        return *(matrix for part in self.parts for matrix in part.matrices), *embedding

    @property
    def other_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors that are neither projections nor norms, by name in the layer; they are kept in float32."""
        return {name: shape for part in self.parts for name, shape in part.other_shapes.items()}

    def modules(self) -> Iterator[tuple[str, MatrixPart, LayerMatrix]]:
        """Yield the projections: the name in the layer, the part, and its matrix."""
        for matrix in self.matrices:
            for name, part in matrix.projections():
                yield name, part, matrix

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms of the stream and of outputs, in the order in which they run."""
        mixer = (name for one in (self.mixer, self.cross) if one for name in (one.input_norm, one.output_norm))
        feed_forward = () if self.feed_forward is None else self.feed_forward.norms
        embedding = None if self.embedding is None else self.embedding.output_norm
        return tuple(name for name in (*mixer, *feed_forward, embedding) if name is not None)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Everything that kernels depend on: of weight formats only the layout in memory, which several may share."""
        return self.with_schemes(lambda _: None), *(matrix.weight_format("") for matrix in self.matrices)

    def with_rope(self, rope: RopeTable | None) -> LayerSpec:
        """Return the layer with another rotary embedding."""
        return replace(self, mixer=replace(self.attention, rope=rope))

    def within(self, length: int) -> LayerSpec:
        """Return the layer for sequences of at most `length` tokens: a window that holds them all is none."""
        if not isinstance(self.mixer, LayerAttention):
            return self
        left, right = self.mixer.window
        if right not in (0, left) or left + 1 < length:
            return self
        return replace(self, mixer=replace(self.mixer, window=UNLIMITED))

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerSpec:
        """Return the layer with the weight format of each projection, by its name in the layer."""
        names = "mixer", "beside", "cross", "feed_forward", "embedding"
        parts: dict[str, Any] = {name: part for name in names if (part := getattr(self, name)) is not None}
        return replace(self, **{name: part.with_schemes(scheme_of) for name, part in parts.items()})


def decoder_layer(
    sizes: LayerSizes,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    gated: bool = False,
    head_norms: bool = False,
    joint_norms: bool = False,
    value_norms: bool = False,
    keys_are_values: bool = False,
    kv_layer: int | None = None,
    window: tuple[int, int] = UNLIMITED,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    activation: Activation = "silu",
    fused_names: bool = False,
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None),
    feed_forward_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None),
    embedding_size: int = 0,
    scalar: str | None = None,
) -> LayerSpec:
    """Return a layer with the names of Llama, without rope, which `ModelSpec` gets from the family's parameters.

    `*_norms` are those before and after attention or feed-forward. The default of `scale` is head_size ** -0.5. With
    `fused_names` a checkpoint has queries, keys and values in one tensor, and gates and ups in another.
    `embedding_size` are the numbers of the layer's embedding of a token; 0 for none.
    """
    hidden_size, intermediate_size, num_query_heads, num_kv_heads, head_size = sizes
    q_size, kv_size = num_query_heads * head_size, num_kv_heads * head_size
    qkv = (MatrixPart("q_proj", (1 + gated) * q_size), MatrixPart("k_proj", kv_size), MatrixPart("v_proj", kv_size))
    qkv = qkv[:1] if kv_layer is not None else qkv[:2] if keys_are_values else qkv
    gate_up = MatrixPart("gate_proj", intermediate_size), MatrixPart("up_proj", intermediate_size)
    if fused_names:
        qkv, gate_up = (
            (MatrixPart(name, sum(part.num_outputs for part in parts)),)
            for name, parts in (("qkv_proj", qkv), ("gate_up_proj", gate_up))
        )
    output, down = (MatrixPart("o_proj", hidden_size),), (MatrixPart("down_proj", hidden_size),)
    attention, mlp = "self_attn", "mlp"
    return LayerSpec(
        LayerAttention(
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            qkv=LayerMatrix("qkv", attention, qkv, hidden_size, bias=qkv_bias),
            output=LayerMatrix("output", attention, output, q_size, bias=o_bias),
            gated=gated,
            window=window,
            scale=head_size**-0.5 if scale is None else scale,
            softcap=softcap,
            sinks=sinks,
            rope=None,
            head_norms=head_norms,
            joint_norms=joint_norms,
            value_norms=value_norms,
            keys_are_values=keys_are_values,
            kv_layer=kv_layer,
            input_norm=attention_norms[0],
            output_norm=attention_norms[1],
        ),
        LayerFeedForward(
            gate_up=LayerMatrix("gate and up", mlp, gate_up, hidden_size, bias=mlp_bias, gated=True),
            down=LayerMatrix("down", mlp, down, intermediate_size, bias=mlp_bias),
            activation=activation,
            input_norm=feed_forward_norms[0],
            output_norm=feed_forward_norms[1],
        ),
        layer_embedding(hidden_size, embedding_size) if embedding_size else None,
        scalar,
    )
