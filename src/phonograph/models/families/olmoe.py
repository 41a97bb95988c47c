"""OLMoE: experts in each layer, and norms of queries and keys over all heads together."""

from __future__ import annotations

from phonograph.models.config_fields import ANY, COMMON, FLAG, INT, NULL, POSITIVE_INT, TENSORS, Field
from phonograph.models.families.family import Family, Settings, layer_sizes
from phonograph.models.families.softmax_experts import EXPERT_LOSS, softmax_routing
from phonograph.models.layer_spec import LayerSpec, decoder_layer
from phonograph.models.layers.expert_spec import with_experts


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes, bias = layer_sizes(settings), settings["attention_bias"]
    routing = softmax_routing(settings, "num_experts", "num_local_experts", renormalised=settings["norm_topk_prob"])
    dense = decoder_layer(sizes, qkv_bias=bias, o_bias=bias, head_norms=True, joint_norms=True)
    return (with_experts(dense, routing, sizes.intermediate_size),) * settings["num_hidden_layers"]


OLMOE = Family(
    model_type="olmoe",
    fields={
        **COMMON,
        "vocab_size": Field(50304, POSITIVE_INT),
        "hidden_size": Field(2048, POSITIVE_INT),
        "intermediate_size": Field(2048, POSITIVE_INT),
        "num_hidden_layers": Field(16, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "max_position_embeddings": Field(4096, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
        "pad_token_id": Field(1, INT.or_null()),
        "eos_token_id": Field(50279, ANY),
        "attention_bias": Field(False, FLAG),
        # Clipping of queries, keys and values is not implemented; published files have null.
        "clip_qkv": Field(None, NULL),
        "num_experts": Field(64, POSITIVE_INT),
        "num_local_experts": Field(None, POSITIVE_INT.or_null()),
        "num_experts_per_tok": Field(8, POSITIVE_INT),
        "norm_topk_prob": Field(False, FLAG),
    },
    ignored={**EXPERT_LOSS, "mlp_bias": TENSORS},
    layers=_layers,
)
