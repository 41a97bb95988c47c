"""SmolLM3: Llama with layers without rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.errors import ModelError, shortened
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    FLAG,
    FULL,
    INT,
    INTS,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SLIDING,
    TEXTS,
    UNREAD,
    Field,
)
from phonograph.models.families.family import Family, Settings, layer_sizes, windows
from phonograph.models.layer_spec import LayerSpec, decoder_layer
from phonograph.models.rope_parameters import RopeParameters, read_rope


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes, bias = layer_sizes(settings), settings["attention_bias"]
    return tuple(
        decoder_layer(sizes, qkv_bias=bias, o_bias=bias, mlp_bias=settings["mlp_bias"], window=window)
        for window in windows(settings)
    )


def _has_rope(settings: Settings) -> list[bool]:
    """Return True for each layer with rotary embedding. `no_rope_layers` has 1 for these."""
    count, stated = settings["num_hidden_layers"], settings["no_rope_layers"]
    if stated is None:
        return [(layer + 1) % settings["no_rope_layer_interval"] != 0 for layer in range(count)]
    if len(stated) < count:
        raise ModelError(f"no_rope_layers={shortened(repr(stated))} must have a number for each of {count} layers")
    return [number != 0 for number in stated[:count]]


def _layer_types(settings: Settings) -> list[str]:
    has_window = settings["sliding_window"] is not None
    return [SLIDING if has_window and not has_rope else FULL for has_rope in _has_rope(settings)]


def _ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    rope = read_rope(settings)
    return [rope if has_rope else None for has_rope in _has_rope(settings)]


SMOLLM3 = Family(
    model_type="smollm3",
    fields={
        **COMMON,
        "vocab_size": Field(128256, POSITIVE_INT),
        "hidden_size": Field(2048, POSITIVE_INT),
        "num_hidden_layers": Field(36, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(16, POSITIVE_INT),
        "num_key_value_heads": Field(4, POSITIVE_INT.or_null()),
        "max_position_embeddings": Field(32768, POSITIVE_INT),
        "bos_token_id": Field(128000, INT.or_null()),
        "eos_token_id": Field(128001, ANY),
        "pad_token_id": Field(128004, INT.or_null()),
        "tie_word_embeddings": Field(True, FLAG),
        "rope_theta": Field(2000000.0, POSITIVE_NUMBER.or_null()),
        "attention_bias": Field(False, FLAG),
        "mlp_bias": Field(False, FLAG),
        "no_rope_layers": Field(None, INTS.or_null()),
        "no_rope_layer_interval": Field(4, POSITIVE_INT),
        "use_sliding_window": Field(False, FLAG),
        "sliding_window": Field(None, POSITIVE_INT.or_null()),
        "layer_types": Field(None, TEXTS.or_null()),
    },
    ignored={"max_window_layers": UNREAD},
    layers=_layers,
    ropes=_ropes,
    layer_types=_layer_types,
)
