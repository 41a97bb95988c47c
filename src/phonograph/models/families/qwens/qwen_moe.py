"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import cast

from phonograph.models.config_fields import (
    COMMON,
    FLAG,
    INT,
    INTS,
    LAYERS,
    NULL,
    POSITIVE_INT,
    TENSORS,
    TEXTS,
    UNREAD,
    Field,
    FieldKind,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, layer_sizes, softmax_routing
from phonograph.models.families.qwens.qwen import QWEN3
from phonograph.models.layer_spec import LayerFeedForward, LayerSpec, decoder_layer
from phonograph.models.layers.expert_spec import with_experts


def has_experts(settings: Settings) -> list[bool]:
    """Return True for the layers that have experts; the others are dense."""
    every, dense = settings["decoder_sparse_step"], cast("list[int]", settings["mlp_only_layers"] or [])
    return [index not in dense and (index + 1) % every == 0 for index in range(settings["num_hidden_layers"])]


def _qwen2_moe(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes = layer_sizes(settings)
    routing = softmax_routing(settings, "num_experts", renormalised=settings["norm_topk_prob"])
    shared = decoder_layer(sizes._replace(intermediate_size=settings["shared_expert_intermediate_size"])).feed_forward
    assert isinstance(shared, LayerFeedForward)
    dense = decoder_layer(sizes, qkv_bias=settings["qkv_bias"])
    sparse = with_experts(dense, routing, settings["moe_intermediate_size"], shared=shared, shared_gate=True)
    return tuple(sparse if is_sparse else dense for is_sparse in has_experts(settings))


def _qwen3_moe(settings: Settings) -> tuple[LayerSpec, ...]:
    routing = softmax_routing(settings, "num_experts", "num_local_experts", renormalised=settings["norm_topk_prob"])
    size, layers = settings["moe_intermediate_size"], zip(QWEN3.layers(settings), has_experts(settings), strict=True)
    return tuple(with_experts(dense, routing, size) if sparse else dense for dense, sparse in layers)


_NO_WINDOW = FieldKind("false: windows of this family are not implemented", lambda value: value is False)
_QWEN = {
    **COMMON,
    "vocab_size": Field(151936, POSITIVE_INT),
    "max_position_embeddings": Field(32768, POSITIVE_INT),
    "decoder_sparse_step": Field(1, POSITIVE_INT),
    "mlp_only_layers": Field(None, INTS.or_null()),
    "norm_topk_prob": Field(False, FLAG),
    "hidden_size": Field(2048, POSITIVE_INT),
    "num_hidden_layers": Field(24, LAYERS),
    "sliding_window": Field(4096, INT.or_null()),
}
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    fields={
        **_QWEN,
        "intermediate_size": Field(5632, POSITIVE_INT),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "num_key_value_heads": Field(16, POSITIVE_INT.or_null()),
        "qkv_bias": Field(True, FLAG),
        "use_sliding_window": Field(False, _NO_WINDOW),
        "layer_types": Field(None, TEXTS.or_null()),
        "max_window_layers": Field(28, INT),
        "moe_intermediate_size": Field(1408, POSITIVE_INT),
        "shared_expert_intermediate_size": Field(5632, POSITIVE_INT),
        "num_experts": Field(60, POSITIVE_INT),
        "num_experts_per_tok": Field(4, POSITIVE_INT),
    },
    ignored={**EXPERT_LOSS, "attention_bias": TENSORS, "mlp_bias": TENSORS},
    layers=_qwen2_moe,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    fields={
        **_QWEN,
        "intermediate_size": Field(6144, POSITIVE_INT),
        "num_key_value_heads": Field(4, POSITIVE_INT),
        "attention_bias": Field(False, FLAG),
        "use_sliding_window": Field(False, FLAG),
        "layer_types": Field(None, NULL),
        "moe_intermediate_size": Field(768, POSITIVE_INT),
        "num_experts": Field(128, POSITIVE_INT),
        "num_local_experts": Field(None, POSITIVE_INT.or_null()),
        "num_experts_per_tok": Field(8, POSITIVE_INT),
    },
    ignored={
        **EXPERT_LOSS,
        "mlp_bias": TENSORS,
        "max_window_layers": UNREAD,
        "shared_expert_intermediate_size": UNREAD,
    },
    layers=_qwen3_moe,
)
