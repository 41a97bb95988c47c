"""Protocol of a family of models: the fields of its config.json, and its layers as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phonograph.errors import ModelError, UnsupportedModelError
from phonograph.models.config_fields import FULL, Field
from phonograph.models.layer_spec import NO_FACTORS, UNLIMITED, Factors, LayerSizes, LayerSpec

_MOST_HEAD_SIZE = 1 << 16
"""Largest head size; larger numbers are of damaged files, and a rotary embedding has a frequency for each pair."""

Settings = Mapping[str, Any]
"""Fields of config.json with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: everything that a new one says.

    Attributes:
        model_type: model type in config.json.
        fields: fields of config.json that define a model, with their defaults.
        ignored: fields without effect on this family, each with the reason.
        layers: function that returns the layers of a configuration, without weight formats.
        factors: function that returns the factors of a configuration.
    """

    model_type: str
    fields: Mapping[str, Field]
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: Callable[[Settings], tuple[LayerSpec, ...]]
    factors: Callable[[Settings], Factors] = lambda _: NO_FACTORS


def layer_sizes(settings: Settings) -> LayerSizes:
    """Return the sizes of a layer.

    Raises:
        ModelError: the numbers do not go together.
        UnsupportedModelError: the activation is not implemented.
    """
    if settings["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={settings['hidden_act']!r} is not supported; supported is silu")
    num_query_heads, num_kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    head_size = settings["head_dim"] or settings["hidden_size"] // num_query_heads
    if num_query_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads={num_query_heads} must be a multiple of num_key_value_heads={num_kv_heads}"
        )
    if not 0 < head_size <= _MOST_HEAD_SIZE or head_size % 2:
        raise ModelError(
            f"head_dim={head_size} must be positive and even, for the rotary embedding, and at most {_MOST_HEAD_SIZE}"
        )
    return LayerSizes(settings["hidden_size"], settings["intermediate_size"], num_query_heads, num_kv_heads, head_size)


def windows(settings: Settings) -> list[tuple[int, int]]:
    """Return the window of each layer."""
    types = settings.get("layer_types", [FULL] * settings["num_hidden_layers"])
    return [UNLIMITED if kind == FULL else (settings["sliding_window"] - 1, 0) for kind in types]
