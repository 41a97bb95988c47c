"""Weights of one layer of a decoder, and the places of a checkpoint's tensors in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phonograph.errors import WeightError
from phonograph.models.heads.feature_input import EMBEDDING_NORM, FEATURE_NORM, FeatureInput
from phonograph.models.layer_spec import (
    SINKS,
    FeedForward,
    LayerAttention,
    LayerFeedForward,
    LayerSpec,
)
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_embedding import LayerEmbeddingWeights
from phonograph.models.layers.linear import Linear, WeightAllocator, norm_views
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.layers.states.state_weights import StateWeights
from phonograph.models.quantization.block_embedding import Embedding
from phonograph.models.quantization.scheme import LinearWeight

Norm = Callable[[str | None], torch.Tensor | None]
"""Allocator of a norm by its name; None for no norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of a layer's attention, next to its specification and the index of the layer.

    Attributes:
        qkv: queries, keys and values, one matrix with (H + 2K) * D outputs, and H * D more with gates.
        head_norms: [H + K, D], the query norm's weight for each query head, then the key norm's for each KV head; or
            None. Norms over all heads have other weights for each head. Without keys of its own, a layer has [H, D].
        sinks: float32 [H], or None.
        input_norm: [E], or None; so is `output_norm`. A layer norm has [2, E]: its weight and its bias.
        memory: keys and values of an encoder's states, one matrix with 2K * D outputs, or None.
    """

    spec: LayerAttention
    layer: int
    input_norm: torch.Tensor | None
    qkv: Linear
    head_norms: torch.Tensor | None
    sinks: torch.Tensor | None
    output: Linear
    output_norm: torch.Tensor | None
    memory: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        return (self.qkv, self.output) if self.memory is None else (self.memory, self.qkv, self.output)

    @classmethod
    def make(cls, spec: LayerAttention, layer: int, norm: Norm, allocate: WeightAllocator) -> AttentionWeights:
        """Allocate the weights without contents."""
        heads = spec.num_query_heads + spec.num_key_heads
        return cls(
            spec=spec,
            layer=layer,
            input_norm=norm(spec.input_norm),
            qkv=allocate.linear(spec.qkv),
            head_norms=allocate.norm(heads, spec.head_size) if spec.head_norms else None,
            sinks=allocate.tensor(spec.num_query_heads, dtype=torch.float32) if spec.sinks else None,
            output=allocate.linear(spec.output),
            output_norm=norm(spec.output_norm),
            memory=None if spec.memory is None else allocate.linear(spec.memory),
        )

    def own_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of sinks and of norms of heads, by the name in the layer."""
        views: dict[str, torch.Tensor] = {} if self.sinks is None else {SINKS: self.sinks}
        if self.head_norms is None:
            return views
        spec, count = self.spec, self.spec.num_query_heads
        of_queries, of_keys = self.head_norms[:count], self.head_norms[count:]
        views["self_attn.q_norm.weight"] = of_queries.view(-1) if spec.joint_norms else of_queries
        if spec.kv_layer is None:
            views["self_attn.k_norm.weight"] = of_keys.view(-1) if spec.joint_norms else of_keys
        return views


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardWeights:
    """Weights of a layer's feed-forward, next to its specification. Gates and ups are one matrix.

    Attributes:
        scalar: [1], factor of the stream after it, or None.
    """

    spec: LayerFeedForward
    input_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    output_norm: torch.Tensor | None
    scalar: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        return self.gate_up, self.down

    @property
    def gated(self) -> bool:
        """True if there are gates, and not ups alone."""
        return self.gate_up.spec.num_outputs > self.down.spec.num_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """Weights of a layer's experts, next to their specification.

    Attributes:
        router: logits of the experts, and of the gate of a shared expert.
        choice_bias: float32 [X], or None.
        gate_up: gates and ups of all experts, one matrix with X * 2I outputs.
        down: one matrix with X * E outputs.
        shared: the shared expert, or None.
        router_norm: [E], or None; so is `sum_norm`.
        expert_scale: float32 [X], or None.
        scalar: [1], factor of the stream after them, or None.
        joint: weights of `gate_up` and of `down`, each with the rows of the shared expert after its own; None if the
            shared expert has memory of its own.
    """

    spec: LayerExperts
    input_norm: torch.Tensor | None
    router: Linear
    choice_bias: torch.Tensor | None
    gate_up: Linear
    down: Linear
    shared: FeedForwardWeights | None
    output_norm: torch.Tensor | None
    router_norm: torch.Tensor | None = None
    expert_scale: torch.Tensor | None = None
    sum_norm: torch.Tensor | None = None
    scalar: torch.Tensor | None = None
    joint: tuple[LinearWeight, LinearWeight] | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        return self.router, self.gate_up, self.down, *(() if self.shared is None else self.shared.linears)

    def own_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor that only experts have, by its name in the layer."""
        spec = self.spec
        named = (
            (spec.choice_bias, self.choice_bias),
            (spec.router_norm, self.router_norm),
            (spec.expert_scale, self.expert_scale),
            (None if spec.sum_norm is None else f"{spec.sum_norm}.weight", self.sum_norm),
        )
        return {name: tensor for name, tensor in named if name is not None and tensor is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of a layer, next to its specification."""

    spec: LayerSpec
    mixer: AttentionWeights | StateWeights | None
    feed_forward: FeedForwardWeights | ExpertsWeights | None
    embedding: LayerEmbeddingWeights | None
    scalar: torch.Tensor | None
    cross: AttentionWeights | None
    beside: StateWeights | None

    @classmethod
    def make(
        cls, spec: LayerSpec, layer: int, hidden_size: int, allocate: WeightAllocator, num_layers: int = 0
    ) -> LayerWeights:
        """Allocate the weights without contents. Dummy weights are drawn in this order.

        Cross attention counts as the layer of `num_layers` more.
        """
        mixer, feed_forward = spec.mixer, spec.feed_forward

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else allocate.norm(hidden_size)

        of_mixer = None if mixer is None else _any_mixer(mixer, layer, norm, allocate)
        beside = None if spec.beside is None else StateWeights.make(spec.beside, layer, norm, allocate)
        cross = None
        if spec.cross is not None:
            cross = AttentionWeights.make(spec.cross, num_layers + layer, norm, allocate)
        of_feed_forward = None if feed_forward is None else _any_feed_forward(feed_forward, norm, allocate)
        scalar = None if spec.scalar is None else allocate.tensor(1)
        embedding = None
        if spec.embedding is not None:
            embedding = LayerEmbeddingWeights(
                spec=spec.embedding,
                layer=layer,
                gate=allocate.linear(spec.embedding.gate),
                output=allocate.linear(spec.embedding.output),
                output_norm=allocate.norm(hidden_size),
                scalar=scalar,
            )
        elif scalar is not None:
            assert of_feed_forward is not None
            of_feed_forward = replace(of_feed_forward, scalar=scalar)
        return cls(
            spec=spec,
            mixer=of_mixer,
            feed_forward=of_feed_forward,
            embedding=embedding,
            scalar=scalar,
            cross=cross,
            beside=beside,
        )

    @property
    def parts(self) -> list[AttentionWeights | StateWeights | FeedForwardWeights | ExpertsWeights]:
        """The mixers, attention to an encoder and the feed-forward, as far as the layer has them."""
        return [part for part in (self.mixer, self.beside, self.cross, self.feed_forward) if part is not None]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        embedding = () if self.embedding is None else (self.embedding.gate, self.embedding.output)
        return *(linear for part in self.parts for linear in part.linears), *embedding

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name in the layer: views of fused weights."""
        views = self.mixer.own_views() if isinstance(self.mixer, AttentionWeights) else dict[str, torch.Tensor]()
        for mixer in (self.mixer, self.beside):
            views |= mixer.others if isinstance(mixer, StateWeights) else {}
        parts = self.parts
        if isinstance(self.feed_forward, ExpertsWeights):
            views |= self.feed_forward.own_views()
            parts += [] if self.feed_forward.shared is None else [self.feed_forward.shared]
        for weights in parts:
            for name, norm in (
                (weights.spec.input_norm, weights.input_norm),
                (weights.spec.output_norm, weights.output_norm),
            ):
                if name is not None and norm is not None:
                    views |= norm_views(name, norm)
        for linear in self.linears:
            views |= linear.checkpoint_views()
        if self.spec.scalar is not None and self.scalar is not None:
            views[self.spec.scalar] = self.scalar
        if self.embedding is not None:
            views[f"{self.embedding.spec.output_norm}.weight"] = self.embedding.output_norm
        if isinstance(self.feed_forward, ExpertsWeights) and self.feed_forward.choice_bias is not None:
            assert self.feed_forward.spec.choice_bias is not None
            views[self.feed_forward.spec.choice_bias] = self.feed_forward.choice_bias
        return views


def _any_mixer(
    spec: LayerAttention | StateMixer, layer: int, norm: Norm, allocate: WeightAllocator
) -> AttentionWeights | StateWeights:
    if isinstance(spec, LayerAttention):
        return AttentionWeights.make(spec, layer, norm, allocate)
    return StateWeights.make(spec, layer, norm, allocate)


def _any_feed_forward(spec: FeedForward, norm: Norm, allocate: WeightAllocator) -> FeedForwardWeights | ExpertsWeights:
    if isinstance(spec, LayerExperts):
        return _experts(spec, norm, allocate)
    assert isinstance(spec, LayerFeedForward)
    return _feed_forward(spec, norm, allocate)


def _feed_forward(spec: LayerFeedForward, norm: Norm, allocate: WeightAllocator) -> FeedForwardWeights:
    return FeedForwardWeights(
        spec=spec,
        input_norm=norm(spec.input_norm),
        gate_up=allocate.linear(spec.gate_up),
        down=allocate.linear(spec.down),
        output_norm=norm(spec.output_norm),
    )


def _experts(spec: LayerExperts, norm: Norm, allocate: WeightAllocator) -> ExpertsWeights:
    def by_expert(name: str | None) -> torch.Tensor | None:
        return None if name is None else allocate.tensor(spec.routing.num_experts, dtype=torch.float32)

    choice_bias, input_norm, router = by_expert(spec.choice_bias), norm(spec.input_norm), allocate.linear(spec.router)
    if spec.shared is not None and spec.gpu_routing.shared and allocate.by_outputs:
        gate_up, shared_gate_up, both_gate_up = allocate.joint(spec.gate_up, spec.shared.gate_up)
        down, shared_down, both_down = allocate.joint(spec.down, spec.shared.down)
        joint = both_gate_up, both_down
        shared = FeedForwardWeights(
            spec=spec.shared, input_norm=None, gate_up=shared_gate_up, down=shared_down, output_norm=None
        )
    else:
        gate_up, down, joint = allocate.linear(spec.gate_up), allocate.linear(spec.down), None
        shared = None if spec.shared is None else _feed_forward(spec.shared, norm, allocate)
    return ExpertsWeights(
        spec=spec,
        input_norm=input_norm,
        router=router,
        choice_bias=choice_bias,
        gate_up=gate_up,
        down=down,
        shared=shared,
        joint=joint,
        output_norm=norm(spec.output_norm),
        router_norm=norm(spec.router_norm),
        expert_scale=by_expert(spec.expert_scale),
        sum_norm=norm(spec.sum_norm),
    )


@dataclass(slots=True, kw_only=True)
class FeatureWeights:
    """Weights of a draft head's input; see `FeatureInput`.

    Attributes:
        join: makes features of the target's hidden states, or the stream; or None.
        norms: each norm by its name behind `model.`.
        state_norms: norms of the target's states; its final norm is set before the head is bound.
        output_norm: the head's final norm, if features of the next entries are behind it.
        embedding_VE: table of the target, unless the head has its own; set before the head is bound.
        target_ids: int64 [drafts], token of the target for each of the head; None if they are the same.
    """

    spec: FeatureInput
    join: Linear | None
    norms: dict[str, torch.Tensor]
    state_norms: list[torch.Tensor]
    embedding_VE: Embedding
    output_norm: torch.Tensor | None = None
    target_ids: torch.Tensor | None = None

    @classmethod
    def make(
        cls, spec: FeatureInput, hidden_size: int, allocate: WeightAllocator, tied: Linear | None
    ) -> FeatureWeights:
        """Allocate them, without contents. The embedding is that of `tied` if it is given, the matrix of the logits."""
        join = None if spec.join is None else allocate.linear(spec.join)
        norms = {name: allocate.norm(size) for name, size in spec.norms(hidden_size)}
        return cls(
            spec=spec,
            join=join,
            norms=norms,
            state_norms=[norms[name] for name, _ in spec.state_norms],
            embedding_VE=tied.matrix.t()
            if tied is not None
            else allocate.tensor(spec.vocab_size if spec.owns_embedding else 0, hidden_size),
        )

    @property
    def embedding_norm(self) -> torch.Tensor:
        return self.norms[EMBEDDING_NORM]

    @property
    def feature_norm(self) -> torch.Tensor:
        return self.norms[FEATURE_NORM]

    def take_draft_ids(self, offsets: torch.Tensor, file: Path) -> None:
        """Keep the tokens of the target for those of the head.

        Args:
            offsets: integers [drafts] that are added to the head's token ids.
            file: for messages.

        Raises:
            WeightError: they are not a list of integers, or lead out of the target's vocabulary.
        """
        if offsets.ndim != 1 or offsets.is_floating_point():
            raise WeightError(f"tensor d2t in {file} has shape {list(offsets.shape)}; expected a list of integers")
        ids = torch.arange(len(offsets)) + offsets.long()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.spec.vocab_size:
            raise WeightError(f"tensor d2t in {file} leads out of the target's vocabulary of {self.spec.vocab_size}")
        assert isinstance(self.embedding_VE, torch.Tensor), "the target's is shared later"
        self.target_ids = ids.to(self.embedding_VE.device)

    def check_draft_ids(self, num_drafts: int) -> None:
        """Check that each token of the head has one of the target.

        Raises:
            WeightError: it has not.
        """
        found = self.spec.vocab_size if self.target_ids is None else len(self.target_ids)
        if found != num_drafts:
            kind = "is missing" if self.target_ids is None else f"has {found} entries"
            raise WeightError(f"tensor d2t {kind}; the head has {num_drafts} tokens, the target {self.spec.vocab_size}")

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor by its name behind `model.`."""
        views = {
            **({} if self.join is None else self.join.checkpoint_views()),
            **{f"{name}.weight": norm for name, norm in self.norms.items()},
        }
        if self.spec.owns_embedding:
            assert isinstance(self.embedding_VE, torch.Tensor)
            views["embed_tokens.weight"] = self.embedding_VE
        return views
