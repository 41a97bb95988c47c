"""gpt-oss: sinks, a window on every other layer, experts with biases, and a clamped gated activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phonograph.kernels.torch.layers import SWIGLU_LIMIT
from phonograph.models.config_fields import (
    COMMON,
    FLAG,
    FULL,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SLIDING,
    TENSORS,
    TEXTS,
    Field,
    FieldKind,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, layer_sizes, softmax_routing, windows
from phonograph.models.layer_spec import LayerSpec, NormKind, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.rope_parameters import ORIGINAL, RopeParameters, read_rope
from phonograph.models.weights.expert_tensors import ExpertTensors

_NAMES = ExpertNames(gate="gate_up_proj", down="down_proj", router="router")
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
"""Rotary parameters of a file that has none."""
_LIMIT = FieldKind(
    f"{SWIGLU_LIMIT} or null, as transformers clamps there whatever the file says",
    lambda value: value is None or value == SWIGLU_LIMIT,
)


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes, bias = layer_sizes(settings), settings["attention_bias"]
    routing = softmax_routing(settings, "num_local_experts", "num_experts", renormalised=True)
    fused = ExpertTensors(routing.num_experts, input_major=True, bare=True)

    def layer(window: tuple[int, int]) -> LayerSpec:
        dense = decoder_layer(sizes, qkv_bias=bias, o_bias=bias, window=window, sinks=True)
        return with_experts(
            dense,
            routing,
            sizes.intermediate_size,
            names=_NAMES,
            activation="clamped_swiglu",
            bias=True,
            fused=(fused._replace(interleaved=True), fused),
        )

    return tuple(map(layer, windows(settings)))


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    if not settings["rope_scaling"] and settings["rope_parameters"] is None:
        settings = {**settings, "rope_parameters": _ROPE}
    return (read_rope(settings),) * settings["num_hidden_layers"]


def _layer_types(settings: Settings) -> list[str]:
    """Return types with a window on the first of each two layers."""
    return [FULL if layer % 2 else SLIDING for layer in range(settings["num_hidden_layers"])]


GPT_OSS = Family(
    model_type="gpt_oss",
    fields={
        **COMMON,
        "vocab_size": Field(201088, POSITIVE_INT),
        "hidden_size": Field(2880, POSITIVE_INT),
        "intermediate_size": Field(2880, POSITIVE_INT),
        "num_hidden_layers": Field(36, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(64, POSITIVE_INT),
        "num_key_value_heads": Field(8, POSITIVE_INT),
        "head_dim": Field(64, POSITIVE_INT),
        "max_position_embeddings": Field(131072, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
        "rope_theta": Field(150000.0, POSITIVE_NUMBER.or_null()),
        "attention_bias": Field(True, FLAG),
        "sliding_window": Field(128, POSITIVE_INT.or_null()),
        "layer_types": Field(None, TEXTS.or_null()),
        "num_local_experts": Field(128, POSITIVE_INT),
        "num_experts": Field(None, POSITIVE_INT.or_null()),
        "num_experts_per_tok": Field(4, POSITIVE_INT),
        "swiglu_limit": Field(None, _LIMIT),
    },
    ignored={
        **EXPERT_LOSS,
        "mlp_bias": TENSORS,
        "experts_per_token": "num_experts_per_tok says it",
        "initial_context_length": f"{ORIGINAL} says it",
    },
    layers=_layers,
    ropes=_ropes,
    layer_types=_layer_types,
    norms=NormKind(wide=True),
)
