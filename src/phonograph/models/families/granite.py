"""Granite 3 without experts: Llama with factors of embeddings, scores, layers and logits."""

from __future__ import annotations

from phonograph.models.config_fields import ANY, COMMON, FLAG, INT, NUMBER, POSITIVE_NUMBER, Field
from phonograph.models.families.family import Family, Settings, layer_sizes
from phonograph.models.layer_spec import Factors, LayerSpec, decoder_layer


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    bias = settings["attention_bias"]
    layer = decoder_layer(
        layer_sizes(settings),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=settings["mlp_bias"],
        scale=settings["attention_multiplier"],
    )
    return (layer,) * settings["num_hidden_layers"]


def _factors(settings: Settings) -> Factors:
    return Factors(
        embedding=settings["embedding_multiplier"],
        residual=settings["residual_multiplier"],
        logits=1 / settings["logits_scaling"],
    )


GRANITE = Family(
    model_type="granite",
    fields={
        **COMMON,
        "bos_token_id": Field(1, INT.or_null()),
        "eos_token_id": Field(2, ANY),
        "attention_bias": Field(False, FLAG),
        "mlp_bias": Field(False, FLAG),
        "attention_multiplier": Field(1.0, NUMBER),
        "embedding_multiplier": Field(1.0, NUMBER),
        "residual_multiplier": Field(1.0, NUMBER),
        "logits_scaling": Field(1.0, POSITIVE_NUMBER),
    },
    layers=_layers,
    factors=_factors,
)
