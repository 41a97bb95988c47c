"""Rotary parameters of config.json, in its older and newer spellings, checked key by key.

`rope_scaling` goes before `rope_parameters`. Outside of both, `rope_theta` counts where the object has none, and
`original_max_position_embeddings` in any case: transformers' model reads it so when it is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import FLAG, NUMBER, POSITIVE_INT, POSITIVE_NUMBER, Field, Kind

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
"""The keys that each type reads. The types left out choose their frequencies by the length of the sequence, so that
keys in the cache would have to be rotated again, or rotate a part of the head."""
_UNREAD = {ORIGINAL, "finetuned"}
"""Keys that transformers passes over in the types that do not read them; files in use have them."""
_WHOLE_HEAD = Kind("1.0, as only whole heads can be rotated", lambda value: value is None or value == 1.0)


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """kind:   default, linear, llama3 or yarn
    values: every key that the kind reads; ORIGINAL and factor are filled in
    field:  name of the field of config.json that they come from, for messages
    given:  its content
    """

    kind: str
    theta: float
    values: dict[str, Any]
    field: str
    given: dict[str, Any]


def read_rope(settings: Mapping[str, Any]) -> RopeParameters:
    """Reads the rotary parameters from the settings of a model.

    Raises:
        UnsupportedModelError: the type, or a key, is not implemented.
        ModelError: a key that the type needs is missing or has a value of the wrong kind.
    """
    field = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    given = cast("dict[str, Any]", settings[field] or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} in {field}={shortened(repr(given))} is not supported; supported are {', '.join(_KEYS)}"
        )
    theta = given.get("rope_theta", settings["rope_theta"])
    if not POSITIVE_NUMBER.accepts(theta):
        raise ModelError(f"rope_theta={theta!r} must be {POSITIVE_NUMBER.works}")
    keys = _KEYS[kind]
    for name, value in given.items():
        _check(name, value, keys.get(name), f"{field} of rope_type {kind!r}")
    values = {name: given.get(name, key.default) for name, key in keys.items()}
    for name, value in values.items():
        if value is _REQUIRED:
            raise ModelError(f"{field}={shortened(repr(given))} has no {name}, which rope_type {kind!r} needs")
    if ORIGINAL in keys:
        values[ORIGINAL] = settings[ORIGINAL] or values[ORIGINAL] or settings["max_position_embeddings"]
        if values["factor"] is None:
            values["factor"] = settings["max_position_embeddings"] / values[ORIGINAL]
    return RopeParameters(kind, theta, values, field, given)


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
