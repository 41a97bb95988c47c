"""Llama 2 and 3, SmolLM2 and other models of its architecture, and Mistral."""

from __future__ import annotations

from phonograph.errors import ModelError
from phonograph.models.config_fields import ANY, COMMON, FLAG, INT, POSITIVE_INT, TENSORS, TEXTS, UNREAD, Field
from phonograph.models.families.family import Family, Settings, layer_sizes, windows
from phonograph.models.layer_spec import LayerSpec, decoder_layer

_FIELDS = {**COMMON, "bos_token_id": Field(1, INT.or_null()), "eos_token_id": Field(2, ANY)}


def _llama(settings: Settings) -> tuple[LayerSpec, ...]:
    if settings["hidden_size"] % settings["num_attention_heads"]:
        raise ModelError(
            f"hidden_size={settings['hidden_size']} must be a multiple of "
            f"num_attention_heads={settings['num_attention_heads']} in a model of type 'llama'"
        )
    bias = settings["attention_bias"]
    layer = decoder_layer(layer_sizes(settings), qkv_bias=bias, o_bias=bias, mlp_bias=settings["mlp_bias"])
    return (layer,) * settings["num_hidden_layers"]


def _mistral(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes = layer_sizes(settings)
    return tuple(decoder_layer(sizes, window=window) for window in windows(settings))


LLAMA = Family(
    model_type="llama",
    fields={**_FIELDS, "attention_bias": Field(False, FLAG), "mlp_bias": Field(False, FLAG)},
    ignored={"use_sliding_window": UNREAD, "max_window_layers": UNREAD},
    layers=_llama,
)
MISTRAL = Family(
    model_type="mistral",
    fields={
        **_FIELDS,
        "intermediate_size": Field(14336, POSITIVE_INT),
        "num_key_value_heads": Field(8, POSITIVE_INT),
        "max_position_embeddings": Field(131072, POSITIVE_INT),
        "sliding_window": Field(4096, INT.or_null()),
        "layer_types": Field(None, TEXTS.or_null()),
    },
    ignored={"attention_bias": TENSORS, "mlp_bias": TENSORS},
    layers=_mistral,
)
