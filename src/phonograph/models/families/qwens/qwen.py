"""Qwen2, Qwen2.5 and Qwen3."""

from __future__ import annotations

from phonograph.models.config_fields import COMMON, FLAG, INT, POSITIVE_INT, TENSORS, TEXTS, Field
from phonograph.models.families.family import Family, Settings, layer_sizes, windows
from phonograph.models.layer_spec import LayerSpec, decoder_layer

_FIELDS = {
    **COMMON,
    "vocab_size": Field(151936, POSITIVE_INT),
    "intermediate_size": Field(22016, POSITIVE_INT),
    "num_key_value_heads": Field(32, POSITIVE_INT.or_null()),
    "max_position_embeddings": Field(32768, POSITIVE_INT),
    "use_sliding_window": Field(False, FLAG),
    "sliding_window": Field(4096, INT.or_null()),
    "max_window_layers": Field(28, INT),
    "layer_types": Field(None, TEXTS.or_null()),
}


def _qwen2(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes = layer_sizes(settings)
    return tuple(decoder_layer(sizes, qkv_bias=True, window=window) for window in windows(settings))


def _qwen3(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes, bias = layer_sizes(settings), settings["attention_bias"]
    return tuple(
        decoder_layer(sizes, qkv_bias=bias, o_bias=bias, head_norms=True, window=window) for window in windows(settings)
    )


QWEN2 = Family(
    model_type="qwen2",
    # GTE-Qwen2 looks ahead.
    fields={**_FIELDS, "is_causal": Field(True, FLAG)},
    ignored={"attention_bias": TENSORS, "mlp_bias": TENSORS},
    layers=_qwen2,
)
QWEN3 = Family(
    model_type="qwen3",
    fields={**_FIELDS, "head_dim": Field(128, POSITIVE_INT), "attention_bias": Field(False, FLAG)},
    ignored={"mlp_bias": TENSORS},
    layers=_qwen3,
)
