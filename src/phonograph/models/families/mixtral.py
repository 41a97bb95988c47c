"""Mixtral."""

from __future__ import annotations

from phonograph.models.config_fields import (
    ANY,
    COMMON,
    EPSILON,
    INT,
    NULL,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    TENSORS,
    Field,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, softmax_routing
from phonograph.models.families.llama import MISTRAL
from phonograph.models.layer_spec import LayerSpec
from phonograph.models.layers.expert_spec import ExpertNames, with_experts

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def _mixtral(settings: Settings) -> tuple[LayerSpec, ...]:
    routing = softmax_routing(settings, "num_local_experts", "num_experts", renormalised=True)
    size = settings["intermediate_size"]
    return tuple(with_experts(dense, routing, size, names=_NAMES) for dense in MISTRAL.layers(settings))


MIXTRAL = Family(
    model_type="mixtral",
    fields={
        **COMMON,
        "intermediate_size": Field(14336, POSITIVE_INT),
        "num_key_value_heads": Field(8, POSITIVE_INT),
        "max_position_embeddings": Field(131072, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, EPSILON),
        "bos_token_id": Field(1, INT.or_null()),
        "eos_token_id": Field(2, ANY),
        "rope_theta": Field(1000000.0, POSITIVE_NUMBER.or_null()),
        "sliding_window": Field(None, INT.or_null()),
        "layer_types": Field(None, NULL),
        "num_local_experts": Field(8, POSITIVE_INT),
        "num_experts": Field(None, POSITIVE_INT.or_null()),
        "num_experts_per_tok": Field(2, POSITIVE_INT),
    },
    ignored={**EXPERT_LOSS, "attention_bias": TENSORS, "mlp_bias": TENSORS},
    layers=_mixtral,
)
