"""Weights of one layer of a decoder, and the places of a checkpoint's tensors in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phonograph.models.layer_spec import SINKS, FeedForward, LayerAttention, LayerFeedForward, LayerSpec
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.linear import Linear, WeightAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of a layer's attention, next to its specification and the index of the layer.

    Attributes:
        qkv: queries, keys and values, one matrix with (H + 2K) * D outputs.
        head_norms: [H + K, D], the query norm's weight for each query head, then the key norm's for each KV head; or
            None. Norms over all heads have other weights for each head.
        sinks: float32 [H], or None.
        input_norm: [E], or None; so is `output_norm`.
    """

    spec: LayerAttention
    layer: int
    input_norm: torch.Tensor | None
    qkv: Linear
    head_norms: torch.Tensor | None
    sinks: torch.Tensor | None
    output: Linear
    output_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardWeights:
    """Weights of a layer's feed-forward, next to its specification. Gates and ups are one matrix."""

    spec: LayerFeedForward
    input_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    output_norm: torch.Tensor | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """Weights of a layer's experts, next to their specification.

    Attributes:
        router: logits of the experts, and of the gate of a shared expert.
        choice_bias: float32 [X], or None.
        gate_up: gates and ups of all experts, one matrix with X * 2I outputs.
        down: one matrix with X * E outputs.
        shared: the shared expert, or None.
    """

    spec: LayerExperts
    input_norm: torch.Tensor | None
    router: Linear
    choice_bias: torch.Tensor | None
    gate_up: Linear
    down: Linear
    shared: FeedForwardWeights | None
    output_norm: torch.Tensor | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        return self.router, self.gate_up, self.down, *(() if self.shared is None else self.shared.linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of a layer."""

    attention: AttentionWeights
    feed_forward: FeedForwardWeights | ExpertsWeights

    @classmethod
    def make(cls, spec: LayerSpec, layer: int, hidden_size: int, allocate: WeightAllocator) -> LayerWeights:
        """Allocate the weights without contents. Dummy weights are drawn in this order."""
        attention, feed_forward = spec.attention, spec.feed_forward

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else allocate.norm(hidden_size)

        heads = attention.num_query_heads + attention.num_kv_heads
        return cls(
            attention=AttentionWeights(
                spec=attention,
                layer=layer,
                input_norm=norm(attention.input_norm),
                qkv=allocate.linear(attention.qkv),
                head_norms=allocate.norm(heads, attention.head_size) if attention.head_norms else None,
                sinks=allocate.tensor(attention.num_query_heads, dtype=torch.float32) if attention.sinks else None,
                output=allocate.linear(attention.output),
                output_norm=norm(attention.output_norm),
            ),
            feed_forward=_any_feed_forward(feed_forward, norm, allocate),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices in the order of the products."""
        return self.attention.qkv, self.attention.output, *self.feed_forward.linears

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name in the layer: views of fused weights."""
        views: dict[str, torch.Tensor] = {}
        for weights in (self.attention, self.feed_forward):
            for name, norm in (
                (weights.spec.input_norm, weights.input_norm),
                (weights.spec.output_norm, weights.output_norm),
            ):
                if name is not None and norm is not None:
                    views[f"{name}.weight"] = norm
        for linear in self.linears:
            views |= linear.checkpoint_views()
        if isinstance(self.feed_forward, ExpertsWeights) and self.feed_forward.choice_bias is not None:
            assert self.feed_forward.spec.choice_bias is not None
            views[self.feed_forward.spec.choice_bias] = self.feed_forward.choice_bias
        if self.attention.sinks is not None:
            views[SINKS] = self.attention.sinks
        head_norms, num_query_heads = self.attention.head_norms, self.attention.spec.num_query_heads
        if head_norms is not None:
            of_queries, of_keys = head_norms[:num_query_heads], head_norms[num_query_heads:]
            joint = self.attention.spec.joint_norms
            views["self_attn.q_norm.weight"] = of_queries.view(-1) if joint else of_queries
            views["self_attn.k_norm.weight"] = of_keys.view(-1) if joint else of_keys
        return views


_Norm = Callable[[str | None], torch.Tensor | None]


def _any_feed_forward(spec: FeedForward, norm: _Norm, allocate: WeightAllocator) -> FeedForwardWeights | ExpertsWeights:
    if isinstance(spec, LayerExperts):
        return _experts(spec, norm, allocate)
    assert isinstance(spec, LayerFeedForward)
    return _feed_forward(spec, norm, allocate)


def _feed_forward(spec: LayerFeedForward, norm: _Norm, allocate: WeightAllocator) -> FeedForwardWeights:
    return FeedForwardWeights(
        spec=spec,
        input_norm=norm(spec.input_norm),
        gate_up=allocate.linear(spec.gate_up),
        down=allocate.linear(spec.down),
        output_norm=norm(spec.output_norm),
    )


def _experts(spec: LayerExperts, norm: _Norm, allocate: WeightAllocator) -> ExpertsWeights:
    choice_bias = None
    if spec.choice_bias is not None:
        choice_bias = allocate.tensor(spec.routing.num_experts, dtype=torch.float32)
    return ExpertsWeights(
        spec=spec,
        input_norm=norm(spec.input_norm),
        router=allocate.linear(spec.router),
        choice_bias=choice_bias,
        gate_up=allocate.linear(spec.gate_up),
        down=allocate.linear(spec.down),
        shared=None if spec.shared is None else _feed_forward(spec.shared, norm, allocate),
        output_norm=norm(spec.output_norm),
    )
