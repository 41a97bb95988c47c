"""Rotary parameters of config.json, in its older and newer spellings, validated key by key.

`rope_scaling` takes precedence over `rope_parameters`. Outside of both, `rope_theta` applies if the object has none,
and `original_max_position_embeddings` always, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import FLAG, NUMBER, POSITIVE_INT, POSITIVE_NUMBER, Field, FieldKind

ORIGINAL = "original_max_position_embeddings"
_REQUIRED = object()
_KEYS: dict[str, dict[str, Field]] = {
    "default": {},
    "linear": {"factor": Field(_REQUIRED, POSITIVE_NUMBER)},
    "llama3": {
        "factor": Field(_REQUIRED, POSITIVE_NUMBER),
        "low_freq_factor": Field(_REQUIRED, POSITIVE_NUMBER),
        "high_freq_factor": Field(_REQUIRED, POSITIVE_NUMBER),
        ORIGINAL: Field(None, POSITIVE_INT),
    },
    "yarn": {
        "factor": Field(_REQUIRED, POSITIVE_NUMBER.or_null()),
        ORIGINAL: Field(None, POSITIVE_INT),
        "attention_factor": Field(None, NUMBER.or_null()),
        "beta_fast": Field(None, NUMBER.or_null()),
        "beta_slow": Field(None, NUMBER.or_null()),
        "mscale": Field(None, NUMBER.or_null()),
        "mscale_all_dim": Field(None, NUMBER.or_null()),
        "truncate": Field(True, FLAG),
    },
}
"""Keys of each supported type. Other types choose frequencies by the sequence length, so that cached keys would have
to be rotated again, or rotate a part of the head.
"""
_UNREAD = {ORIGINAL, "finetuned"}
"""Keys that transformers ignores in types without them; published files have them."""
_WHOLE_HEAD = FieldKind("1.0, as only whole heads can be rotated", lambda value: value is None or value == 1.0)


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary parameters.

    Attributes:
        kind: default, linear, llama3 or yarn.
        values: every key of the kind; ORIGINAL and factor are filled in.
        field: field of config.json with the parameters, for messages.
        raw: content of that field.
    """

    kind: str
    theta: float
    values: dict[str, Any]
    field: str
    raw: dict[str, Any]


def read_rope(settings: Mapping[str, Any]) -> RopeParameters:
    """Read the rotary parameters from the settings of a model.

    Raises:
        UnsupportedModelError: the type, or a key, is not implemented.
        ModelError: a required key is missing, or a value has the wrong type.
    """
    field = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    raw = cast("dict[str, Any]", settings[field] or {})
    kind = raw.get("rope_type", raw.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} in {field}={shortened(repr(raw))} is not supported; supported are {', '.join(_KEYS)}"
        )
    theta = raw.get("rope_theta", settings["rope_theta"])
    if not POSITIVE_NUMBER.accepts(theta):
        raise ModelError(f"rope_theta={theta!r} must be {POSITIVE_NUMBER.works}")
    keys = _KEYS[kind]
    for name, value in raw.items():
        _check(name, value, keys.get(name), f"{field} of rope_type {kind!r}")
    values = {name: raw.get(name, key.default) for name, key in keys.items()}
    for name, value in values.items():
        if value is _REQUIRED:
            raise ModelError(f"{field}={shortened(repr(raw))} has no {name}, which rope_type {kind!r} needs")
    if ORIGINAL in keys:
        values[ORIGINAL] = settings[ORIGINAL] or values[ORIGINAL] or settings["max_position_embeddings"]
        if values["factor"] is None:
            values["factor"] = settings["max_position_embeddings"] / values[ORIGINAL]
    return RopeParameters(kind, theta, values, field, raw)


def _check(name: str, value: Any, key: Field | None, where: str) -> None:
    if name in ("rope_type", "type", "rope_theta"):
        return
    shown = f"{name}={shortened(repr(value))} in {where}"
    if name == "partial_rotary_factor":
        key = Field(1.0, _WHOLE_HEAD)
    if key is not None:
        if not key.kind.accepts(value):
            raise ModelError(f"{shown} must be {key.kind.works}")
    elif value is not None and name not in _UNREAD:
        raise UnsupportedModelError(
            f"{shown} is a key that this type does not read, or that sets the parameters of single layers; take it out"
        )
