"""Experts of Gemma 4, beside the dense feed-forward of a layer, with norms and a router of their own."""

from __future__ import annotations

from dataclasses import replace

from phonograph.errors import ModelError
from phonograph.kernels.routing import Routing
from phonograph.models.families.family import Settings
from phonograph.models.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layer_spec import LayerFeedForward, LayerSpec
from phonograph.models.layers.expert_spec import LayerExperts

EXPERT_FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")
"""Fields that a model with experts has."""


def with_experts_beside(layer: LayerSpec, settings: Settings) -> LayerSpec:
    """Return the layer with experts, whose sum is added to its feed-forward's before the last norm.

    Raises:
        ModelError: a number is missing, or a token has more experts than there are.
    """
    for field in EXPERT_FIELDS:
        if settings[field] is None:
            raise ModelError(f"{field}=None must be a positive integer, as enable_moe_block=True")
    num_experts, top_k, size = (settings[field] for field in EXPERT_FIELDS)
    if top_k > num_experts:
        raise ModelError(f"top_k_experts={top_k} must be at most num_experts={num_experts}")
    dense, hidden_size = layer.feed_forward, layer.attention.qkv.num_inputs
    assert isinstance(dense, LayerFeedForward)

    def experts(name: str, part: str, outputs: int, inputs: int, *, gated: bool = False) -> LayerMatrix:
        parts = (MatrixPart(part, outputs),)
        return LayerMatrix(
            name, "experts", parts, inputs, gated=gated, num_experts=num_experts, quantizable=False, stacked=True
        )

    return replace(
        layer,
        feed_forward=LayerExperts(
            routing=Routing(num_experts, top_k, logit_factor=hidden_size**-0.5),
            router=LayerMatrix("router", "router", (MatrixPart("proj", num_experts),), hidden_size, quantizable=False),
            choice_bias=None,
            gate_up=experts("experts' gate and up", "gate_up_proj", 2 * size, hidden_size, gated=True),
            down=experts("experts' down", "down_proj", hidden_size, size),
            shared=replace(dense, output_norm="post_feedforward_layernorm_1"),
            input_norm="pre_feedforward_layernorm_2",
            output_norm=dense.output_norm,
            activation=dense.activation,
            router_norm="router.scale",
            expert_scale="router.per_expert_scale",
            sum_norm="post_feedforward_layernorm_2",
        ),
    )
