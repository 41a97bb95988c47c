"""Context length of a model, as vLLM derives it: its positions, extended by rope scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phonograph.models.config_fields import LENGTH_FIELDS
from phonograph.models.rope_parameters import ORIGINAL, RopeParameters


def context_length(settings: Mapping[str, Any], rope: RopeParameters) -> tuple[int, str]:
    """Return the number of positions, and a description of the fields that determine it.

    YaRN serves the original length times its factor, linear scaling max_position_embeddings times its factor. For Llama
    3's scaling, max_position_embeddings includes the factor already.
    """
    lengths = {name: settings[name] for name in ("max_position_embeddings", *LENGTH_FIELDS) if settings[name]}
    name = min(lengths, key=lambda name: lengths[name])
    length, source = lengths[name], f"{name} {lengths[name]}"
    if rope.kind in ("linear", "yarn"):
        if rope.kind == "yarn":
            length = rope.values[ORIGINAL]
            source = f"{ORIGINAL} {length}"
        return int(
            length * rope.values["factor"]
        ), f"{source} x factor {rope.values['factor']} of {rope.kind} rope scaling"
    return int(length), source
