"""Specification of a decoder layer as plain values: its heads, its feed-forward, its norms and its matrices.

A layer's value has no index and no weights, so that equal layers of a model share one object. What a family of models
has of its own is said here; kernels, memory and checkpoints follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch

from phonograph.kernels.triton.gemm.product_plan import ProductShape, WeightFormat
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.weights.expert_tensors import ExpertTensors

UNLIMITED = (-1, -1)
Activation = Literal["silu", "gelu_tanh"]
"""Activation of gates: x * sigmoid(x), or the approximation of GELU by tanh."""


class RopeTable(NamedTuple):
    """Rotary embedding of a layer: angles of its pairs by position. Layers with equal values share one table.

    Attributes:
        frequencies: angle per position of each pair (d, d + R/2), with R = 2 * pairs. The head's numbers from R on are
            not rotated.
        factor: factor on cos and sin.
        original_length: positions up to which `frequencies` hold; 0 for no limit. A table of more positions has
            `long_frequencies` at every position.
        long_frequencies: frequencies of longer tables.
        query_beta: scale of queries by position p: 1 + beta * log(1 + floor(p / query_length)); 0 for none.
        query_length: see `query_beta`.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
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
    """

    wide: bool = False
    offset: float = 0.0


PLAIN_NORMS = NormKind()


class MatrixPart(NamedTuple):
    """A projection of a checkpoint, fused with others of the same input.

    Attributes:
        name: last component of its name in a checkpoint.
        num_outputs: its outputs.
        scheme: its weight format; None for the model's type.
    """

    name: str
    num_outputs: int
    scheme: Scheme | None = None


@dataclass(frozen=True)
class LayerMatrix:
    """A matrix, in which projections of the same input are fused. Their weights have one layout in memory.

    Attributes:
        name: name for people.
        module: components of the projections' names before the last, such as "self_attn"; empty for the head.
        parts: the projections, in the order of the matrix.
        num_inputs: inputs of the product.
        bias: True if the projections have a bias.
        gated: the product is activation(first half) * second half.
        num_experts: experts that have a matrix of these parts each, one after another; None for a matrix of its own.
            Their names have the number of the expert between `module` and the part.
        fused: layout of a checkpoint's tensors that have the single part of all experts; None if each expert has its
            tensors.
        quantizable: False for weights that are in the model's type in every file.
    """

    name: str
    module: str
    parts: tuple[MatrixPart, ...]
    num_inputs: int
    bias: bool = False
    gated: bool = False
    num_experts: int | None = None
    fused: ExpertTensors | None = None
    quantizable: bool = True

    @property
    def num_outputs(self) -> int:
        """Outputs, of all experts together."""
        return self.expert_outputs * (self.num_experts or 1)

    @property
    def expert_outputs(self) -> int:
        """Outputs of one product."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def scheme(self) -> Scheme | None:
        """Weight format of the first part; others have the same layout."""
        return self.parts[0].scheme

    @property
    def shape(self) -> ProductShape:
        """Sizes of one product."""
        return ProductShape(self.expert_outputs // (1 + self.gated), self.num_inputs, self.gated)

    def weight_format(self, dtype: str) -> WeightFormat:
        """Return the layout of the weights on a GPU."""
        return WeightFormat(dtype) if self.scheme is None else self.scheme.weight_format(self.num_inputs, dtype)

    def nbytes(self, element: int) -> int:
        """Return the bytes of the weights in memory; `element` is the size of the model's type."""
        return (self.num_experts or 1) * sum(
            part.num_outputs * self.num_inputs * element
            if part.scheme is None
            else part.scheme.nbytes(part.num_outputs, self.num_inputs, element)
            for part in self.parts
        )

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerMatrix:
        """Return the matrix with the format of each part, by its name in the layer; all experts have one format."""
        if not self.quantizable:
            return self
        parts = (part._replace(scheme=scheme_of(self.path(part.name))) for part in self.parts)
        return replace(self, parts=tuple(parts))

    def path(self, part: str, expert: int = 0) -> str:
        """Return the name of a part in its layer."""
        name = part if self.num_experts is None or self.fused is not None else f"{expert}.{part}"
        return f"{self.module}.{name}" if self.module else name

    @property
    def quantized_names(self) -> tuple[str, ...]:
        """Names in the module of the projections that a file may have in another format."""
        names = (name.removeprefix(f"{self.module}.") for name, _ in self.projections())
        return tuple(names) if self.quantizable else ()

    def projections(self) -> Iterator[tuple[str, MatrixPart]]:
        """Yield the name in the layer and the part of each projection of a checkpoint, in the order of the matrix."""
        if self.fused is not None:
            (part,) = self.parts
            yield self.path(part.name), part._replace(num_outputs=self.num_outputs)
            return
        for expert in range(self.num_experts or 1):
            for part in self.parts:
                yield self.path(part.name, expert), part

    def tensor_shape(self, *rows_shape: int) -> tuple[int, ...]:
        """Return the shape in a checkpoint of a tensor of a projection, which has a row for each output."""
        return rows_shape if self.fused is None else self.fused.shape(rows_shape)


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Attention of a layer. Norms are named as in a checkpoint; None for a norm that the layer has not.

    Attributes:
        num_query_heads: H.
        num_kv_heads: K, a divisor of H.
        head_size: D.
        qkv: matrix of queries, keys and values.
        output: matrix of the output.
        window: (left, right) keys next to the query; -1 is unlimited. A `sliding_window` of W keys is (W - 1, 0).
        scale: factor of the scores.
        softcap: cap c of scaled scores s, which become c * tanh(s / c); 0 for none.
        rope: rotary embedding; None for none.
        head_norms: True if queries and keys are normed before the rotary embedding.
        joint_norms: these norms are over all heads of a token together; otherwise each head is normed.
        input_norm: norm of the stream before the layer's attention.
        output_norm: norm of the output before it is added to the stream.
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    qkv: LayerMatrix
    output: LayerMatrix
    window: tuple[int, int]
    scale: float
    softcap: float
    rope: RopeTable | None
    head_norms: bool
    joint_norms: bool
    input_norm: str | None
    output_norm: str | None


class FeedForward(Protocol):
    """Feed-forward of a layer: dense, or experts (`layers.expert_spec`). It is a frozen dataclass."""

    @property
    def input_norm(self) -> str | None: ...

    @property
    def output_norm(self) -> str | None: ...

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]: ...

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
    """A decoder layer: attention, then the feed-forward, each added to the stream."""

    attention: LayerAttention
    feed_forward: FeedForward

    @property
    def matrices(self) -> tuple[LayerMatrix, ...]:
        """Matrices in the order of the products."""
        return self.attention.qkv, self.attention.output, *self.feed_forward.matrices

    def modules(self) -> Iterator[tuple[str, MatrixPart, LayerMatrix]]:
        """Yield the projections: the name in the layer, the part, and its matrix."""
        for matrix in self.matrices:
            for name, part in matrix.projections():
                yield name, part, matrix

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms of the stream and of outputs, in the order in which they run."""
        parts = self.attention, self.feed_forward
        return tuple(name for part in parts for name in (part.input_norm, part.output_norm) if name is not None)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Everything that kernels depend on: of weight formats only the layout in memory, which several may share."""
        return self.with_schemes(lambda _: None), *(matrix.weight_format("") for matrix in self.matrices)

    def with_rope(self, rope: RopeTable | None) -> LayerSpec:
        """Return the layer with another rotary embedding."""
        return replace(self, attention=replace(self.attention, rope=rope))

    def within(self, length: int) -> LayerSpec:
        """Return the layer for sequences of at most `length` tokens: a window that holds them all is none."""
        left, right = self.attention.window
        if right != 0 or left + 1 < length:
            return self
        return replace(self, attention=replace(self.attention, window=UNLIMITED))

    def with_schemes(self, scheme_of: Callable[[str], Scheme | None]) -> LayerSpec:
        """Return the layer with the weight format of each projection, by its name in the layer."""
        attention = self.attention
        return LayerSpec(
            replace(
                attention,
                qkv=attention.qkv.with_schemes(scheme_of),
                output=attention.output.with_schemes(scheme_of),
            ),
            self.feed_forward.with_schemes(scheme_of),
        )


def decoder_layer(
    sizes: LayerSizes,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    joint_norms: bool = False,
    window: tuple[int, int] = UNLIMITED,
    scale: float | None = None,
    softcap: float = 0.0,
    activation: Activation = "silu",
    fused_names: bool = False,
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None),
    feed_forward_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None),
) -> LayerSpec:
    """Return a layer with the names of Llama, without rope, which `ModelSpec` gets from the family's parameters.

    `*_norms` are those before and after attention or feed-forward. The default of `scale` is head_size ** -0.5. With
    `fused_names` a checkpoint has queries, keys and values in one tensor, and gates and ups in another.
    """
    hidden_size, intermediate_size, num_query_heads, num_kv_heads, head_size = sizes
    q_size, kv_size = num_query_heads * head_size, num_kv_heads * head_size
    qkv = MatrixPart("q_proj", q_size), MatrixPart("k_proj", kv_size), MatrixPart("v_proj", kv_size)
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
            window=window,
            scale=head_size**-0.5 if scale is None else scale,
            softcap=softcap,
            rope=None,
            head_norms=head_norms,
            joint_norms=joint_norms,
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
    )
