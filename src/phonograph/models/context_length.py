"""Context length of a model, as vLLM derives it: its positions, extended by rope scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phonograph.models.config_fields import LENGTH_FIELDS
from phonograph.models.rope_parameters import ORIGINAL, RopeParameters


def context_length(
    settings: Mapping[str, Any], ropes: Sequence[RopeParameters | None], first_position: int = 0
) -> tuple[int, str]:
    """Return the number of positions from the first token on, and a description of the fields that determine it.

    YaRN serves the original length times its factor, linear scaling max_position_embeddings times its factor. For other
    types, and for families that say so, max_position_embeddings includes the factor already. Layers without scaling do
    not limit the context.
    """
    lengths = {name: settings[name] for name in ("max_position_embeddings", *LENGTH_FIELDS) if settings[name]}
    name = min(lengths, key=lambda name: lengths[name])
    length, source = lengths[name], f"{name} {lengths[name]}"
    rope = next((rope for rope in ropes if rope is not None and rope.extends), None)
    if rope is not None:
        if rope.kind == "yarn":
            length = rope.values[ORIGINAL]
            source = f"{ORIGINAL} {length}"
        return int(
            length * rope.values["factor"]
        ), f"{source} x factor {rope.values['factor']} of {rope.kind} rope scaling"
    if first_position:
        return int(length) - first_position, f"{source} less the {first_position} before the first token"
    return int(length), source


def rope_notes(ropes: Sequence[RopeParameters | None]) -> list[str]:
    """Return a note on factors that are chosen by the configured length."""
    rope = next((rope for rope in ropes if rope is not None and rope.kind == "longrope"), None)
    if rope is None:
        return []
    length = rope.values[ORIGINAL]
    return [
        f"longrope: max_model_len of {length} or less has the short factors, a larger one the long factors at every "
        "position"
    ]
