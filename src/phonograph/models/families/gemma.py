"""Gemma 1, 2 and 3: norms with weights 1 + w in float32, gates with GELU, and embeddings times sqrt(hidden size).

Gemma 2 has norms on both sides, caps of scores and logits, and a window on every other layer. Gemma 3 has norms of
heads in place of the cap of scores, and a window with a rope of its own on five layers of six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phonograph.models.config_fields import (
    ANY,
    COMMON,
    FLAG,
    FULL,
    INT,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SLIDING,
    TEXT,
    TEXTS,
    Field,
    FieldKind,
)
from phonograph.models.families.family import GELU_TANH, Family, Settings, full_every, layer_sizes, windows
from phonograph.models.layer_spec import UNLIMITED, Factors, LayerSpec, NormKind, decoder_layer
from phonograph.models.rope_parameters import RopeParameters, read_ropes_by_type

_GLOBAL_THETA, _LOCAL_THETA = 1000000.0, 10000.0


def _gemma(settings: Settings) -> tuple[LayerSpec, ...]:
    bias = settings["attention_bias"]
    layer = decoder_layer(layer_sizes(settings, GELU_TANH), qkv_bias=bias, o_bias=bias, activation="gelu_tanh")
    return (layer,) * settings["num_hidden_layers"]


def _with_both_norms(settings: Settings, *, head_norms: bool) -> tuple[LayerSpec, ...]:
    """Return the layers of Gemma 2 and 3."""
    sizes, bias = layer_sizes(settings, GELU_TANH, "hidden_activation"), settings["attention_bias"]
    return tuple(
        decoder_layer(
            sizes,
            qkv_bias=bias,
            o_bias=bias,
            head_norms=head_norms,
            window=window,
            scale=settings["query_pre_attn_scalar"] ** -0.5,
            softcap=settings["attn_logit_softcapping"] or 0.0,
            activation="gelu_tanh",
            attention_norms=("input_layernorm", "post_attention_layernorm"),
            feed_forward_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
        for window in _windows(settings)
    )


def _windows(settings: Settings) -> list[tuple[int, int]]:
    """Return the window of each layer; half of it is on each side if tokens look ahead (EmbeddingGemma)."""
    if not settings.get("use_bidirectional_attention"):
        return windows(settings)
    side = (settings["sliding_window"] or 0) // 2
    return [UNLIMITED if window == UNLIMITED else (side, side) for window in windows(settings)]


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    """Return ropes by type of layer. max_position_embeddings includes the scaling of full attention."""
    thetas = {FULL: settings["rope_theta"], SLIDING: settings["rope_local_base_freq"] or _LOCAL_THETA}
    found = read_ropes_by_type(settings, thetas)
    ropes = {kind: replace(rope, extends=False) for kind, rope in found.items()}
    return [ropes[kind] for kind in settings["layer_types"]]


def _factors(settings: Settings) -> Factors:
    return Factors(
        embedding=settings["hidden_size"] ** 0.5,
        softcap=settings.get("final_logit_softcapping") or 0.0,
        rounds_embedding=True,
    )


_NORMS = NormKind(wide=True, offset=1.0)
_FIELDS = {
    **COMMON,
    "vocab_size": Field(256000, POSITIVE_INT),
    "head_dim": Field(256, POSITIVE_INT),
    "max_position_embeddings": Field(8192, POSITIVE_INT),
    "tie_word_embeddings": Field(True, FLAG),
    "bos_token_id": Field(2, INT.or_null()),
    "eos_token_id": Field(1, ANY),
    "pad_token_id": Field(0, INT.or_null()),
    "attention_bias": Field(False, FLAG),
}
_BOTH_NORMS_FIELDS = {
    **{name: field for name, field in _FIELDS.items() if name != "hidden_act"},
    "hidden_activation": Field("gelu_pytorch_tanh", TEXT),
    "hidden_size": Field(2304, POSITIVE_INT),
    "intermediate_size": Field(9216, POSITIVE_INT),
    "num_hidden_layers": Field(26, COMMON["num_hidden_layers"].kind),
    "num_attention_heads": Field(8, POSITIVE_INT),
    "num_key_value_heads": Field(4, POSITIVE_INT),
    "query_pre_attn_scalar": Field(256, POSITIVE_NUMBER),
    "sliding_window": Field(4096, POSITIVE_INT.or_null()),
    "layer_types": Field(None, TEXTS.or_null()),
}
_NO_CAP = FieldKind("null, as transformers does not cap the scores of this family", lambda value: value is None)

GEMMA = Family(
    model_type="gemma",
    fields={
        **_FIELDS,
        "hidden_act": Field("gelu_pytorch_tanh", TEXT),
        "hidden_size": Field(3072, POSITIVE_INT),
        "intermediate_size": Field(24576, POSITIVE_INT),
        "num_hidden_layers": Field(28, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "num_key_value_heads": Field(16, POSITIVE_INT),
    },
    ignored={"hidden_activation": "hidden_act says it"},
    layers=_gemma,
    norms=_NORMS,
    factors=_factors,
)
GEMMA2 = Family(
    model_type="gemma2",
    fields={
        **_BOTH_NORMS_FIELDS,
        "attn_logit_softcapping": Field(50.0, POSITIVE_NUMBER.or_null()),
        "final_logit_softcapping": Field(30.0, POSITIVE_NUMBER.or_null()),
    },
    ignored={"hidden_act": "hidden_activation says it", "sliding_window_size": "sliding_window says it"},
    layers=lambda settings: _with_both_norms(settings, head_norms=False),
    layer_types=lambda settings: full_every(settings, 2),
    norms=_NORMS,
    factors=_factors,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    fields={
        **_BOTH_NORMS_FIELDS,
        "vocab_size": Field(262208, POSITIVE_INT),
        "max_position_embeddings": Field(131072, POSITIVE_INT),
        "attn_logit_softcapping": Field(None, _NO_CAP),
        "final_logit_softcapping": Field(None, POSITIVE_NUMBER.or_null()),
        "sliding_window_pattern": Field(None, POSITIVE_INT.or_null()),
        "use_bidirectional_attention": Field(False, FLAG.or_null()),
        "rope_theta": Field(_GLOBAL_THETA, POSITIVE_NUMBER.or_null()),
        "rope_local_base_freq": Field(None, POSITIVE_NUMBER.or_null()),
    },
    ignored={"hidden_act": "hidden_activation says it"},
    layers=lambda settings: _with_both_norms(settings, head_norms=True),
    ropes=_ropes,
    layer_types=lambda settings: full_every(settings, settings["sliding_window_pattern"] or 6),
    norms=_NORMS,
    factors=_factors,
)
