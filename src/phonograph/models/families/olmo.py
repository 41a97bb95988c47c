"""OLMo 2 and 3 and OLMoE: norms of queries and keys over all heads together.

OLMo 2 and 3 norm after attention and feed-forward, OLMoE before them; it has experts in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.errors import UnsupportedModelError
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    FLAG,
    FULL,
    INT,
    NULL,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SLIDING,
    TENSORS,
    TEXTS,
    Field,
)
from phonograph.models.families.family import (
    EXPERT_LOSS,
    Family,
    Settings,
    full_every,
    layer_sizes,
    softmax_routing,
    windows,
)
from phonograph.models.layer_spec import LayerSpec, NormKind, decoder_layer
from phonograph.models.layers.expert_spec import with_experts
from phonograph.models.rope_parameters import RopeParameters, read_ropes_by_type

_THETA = 500000.0


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes, bias = layer_sizes(settings), settings["attention_bias"]
    return tuple(
        decoder_layer(
            sizes,
            qkv_bias=bias,
            o_bias=bias,
            head_norms=True,
            joint_norms=True,
            window=window,
            attention_norms=(None, "post_attention_layernorm"),
            feed_forward_norms=(None, "post_feedforward_layernorm"),
        )
        for window in windows(settings)
    )


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    """Return ropes by type of layer, of which older files scale that of full attention."""
    theta = settings["rope_theta"]
    if theta != _THETA:
        raise UnsupportedModelError(
            f"rope_theta={theta!r} is not supported, as readers differ on the base of layers with a window; "
            "rope_parameters can give one for each type of layer"
        )
    ropes = read_ropes_by_type(settings, {FULL: _THETA, SLIDING: _THETA})
    return [ropes[kind] for kind in settings["layer_types"]]


_FIELDS = {
    **COMMON,
    "vocab_size": Field(50304, POSITIVE_INT),
    "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
    "eos_token_id": Field(50279, ANY),
    "pad_token_id": Field(1, INT.or_null()),
    "attention_bias": Field(False, FLAG),
}
_NORMS = NormKind(wide=True)
OLMO2 = Family(model_type="olmo2", fields=_FIELDS, layers=_layers, norms=_NORMS)
OLMO3 = Family(
    model_type="olmo3",
    fields={
        **_FIELDS,
        "rope_theta": Field(_THETA, POSITIVE_NUMBER.or_null()),
        "sliding_window": Field(4096, POSITIVE_INT.or_null()),
        "layer_types": Field(None, TEXTS.or_null()),
    },
    layers=_layers,
    ropes=_ropes,
    layer_types=lambda settings: full_every(settings, 4),
    norms=_NORMS,
)


def _expert_layers(settings: Settings) -> tuple[LayerSpec, ...]:
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
    layers=_expert_layers,
)
