"""Rotary parameters of config.json, in its older and newer spellings, validated key by key.

`rope_scaling` takes precedence over `rope_parameters`. Outside of both, `rope_theta` applies if the object has none,
and `original_max_position_embeddings` always, as in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import (
    FLAG,
    FULL,
    NUMBER,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    POSITIVE_NUMBERS,
    Field,
    FieldKind,
    is_number,
)

ORIGINAL = "original_max_position_embeddings"
_REQUIRED = object()
_SHARE = FieldKind("a number above 0 and at most 1", lambda value: is_number(value) and 0 < cast("float", value) <= 1)
PARTIAL = Field(None, _SHARE.or_null())
"""Field of the rotated share of a head, in families that have it."""
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
    "longrope": {
        "factor": Field(None, POSITIVE_NUMBER.or_null()),
        ORIGINAL: Field(None, POSITIVE_INT),
        "short_factor": Field(_REQUIRED, POSITIVE_NUMBERS),
        "long_factor": Field(_REQUIRED, POSITIVE_NUMBERS),
        "attention_factor": Field(None, NUMBER.or_null()),
    },
    "proportional": {"factor": Field(1.0, POSITIVE_NUMBER), "partial_rotary_factor": PARTIAL},
}
"""Keys of each supported type. Other types choose frequencies by the sequence length, so that cached keys would have
to be rotated again.
"""
KINDS = ("default", "linear", "llama3", "yarn")
"""Types of families that do not name theirs."""
BETA = "llama_4_scaling_beta"
"""Key of the scale of queries by position."""
_UNREAD = {ORIGINAL, "finetuned"}
"""Keys that transformers ignores in types without them; published files have them."""
_WHOLE_HEAD = FieldKind("1.0, as this family rotates whole heads", lambda value: value is None or value == 1.0)


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary parameters.

    Attributes:
        kind: default, linear, llama3, yarn, longrope or proportional.
        values: every key of the kind; ORIGINAL and factor are filled in.
        field: field of config.json with the parameters, for messages.
        raw: content of that field.
        share: share of each head that is rotated.
        query_beta: strength of the scale of queries by position; 0 for none.
        extends: True if the model serves the scaled length; max_position_embeddings is without the scaling.
    """

    kind: str
    theta: float
    values: dict[str, Any]
    field: str
    raw: dict[str, Any]
    share: float = 1.0
    query_beta: float = 0.0
    extends: bool = False


def read_rope(
    settings: Mapping[str, Any], *, kinds: Iterable[str] = KINDS, where: str = "", has_beta: bool = False
) -> RopeParameters:
    """Read the rotary parameters from the settings of a model.

    Args:
        settings: fields of the model. A family whose fields have partial_rotary_factor rotates a part of each head.
        kinds: supported types.
        where: path of the parameters within the field, for messages.
        has_beta: the parameters may have a scale of queries by position.

    Raises:
        UnsupportedModelError: the type, or a key, is not implemented.
        ModelError: a required key is missing, or a value has the wrong type.
    """
    field = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    raw = cast("dict[str, Any]", settings[field] or {})
    kind = raw.get("rope_type", raw.get("type", "default"))
    field += where
    if kind not in kinds:
        raise UnsupportedModelError(
            f"rope_type={kind!r} in {field}={shortened(repr(raw))} is not supported; supported are {', '.join(kinds)}"
        )
    theta = raw.get("rope_theta", settings["rope_theta"])
    if not POSITIVE_NUMBER.accepts(theta):
        raise ModelError(f"rope_theta={theta!r} must be {POSITIVE_NUMBER.works}")
    keys = dict(_KEYS[kind])
    if has_beta:
        keys |= {BETA: Field(None, NUMBER.or_null()), ORIGINAL: Field(None, POSITIVE_INT)}
    if "partial_rotary_factor" in settings:
        keys["partial_rotary_factor"] = PARTIAL
    for name, value in raw.items():
        _check(name, value, keys.get(name), f"{field} of rope_type {kind!r}")
    values = {name: raw.get(name, key.default) for name, key in keys.items()}
    for name, value in values.items():
        if value is _REQUIRED:
            raise ModelError(f"{field}={shortened(repr(raw))} has no {name}, which rope_type {kind!r} needs")
    if ORIGINAL in keys:
        outside = settings[ORIGINAL] if ORIGINAL in _KEYS[kind] else None
        values[ORIGINAL] = outside or values[ORIGINAL] or settings["max_position_embeddings"]
        if values.get("factor", 1.0) is None:
            values["factor"] = settings["max_position_embeddings"] / values[ORIGINAL]
    return RopeParameters(
        kind,
        theta,
        values,
        field,
        raw,
        share=raw.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0,
        query_beta=values.get(BETA) or 0.0,
        extends=kind in ("linear", "yarn"),
    )


def read_ropes_by_type(
    settings: Mapping[str, Any], thetas: Mapping[str, float], kinds: Iterable[str] = KINDS
) -> dict[str, RopeParameters]:
    """Read the parameters of each type of layer.

    Newer files have an object for each type in rope_parameters. In older ones rope_scaling is that of the layers with
    full attention, and the others have none.

    Args:
        settings: fields of the model.
        thetas: base by type, where the parameters have none.
        kinds: supported types of ropes.

    Raises:
        UnsupportedModelError: rope_parameters has other keys, or as `read_rope`.
        ModelError: as `read_rope`.
    """
    raw = cast("dict[str, Any]", settings["rope_parameters"] or {})
    scaling = cast("dict[str, Any]", settings["rope_scaling"] or {})
    if "type" in scaling and "rope_type" not in scaling:
        raise UnsupportedModelError(
            f"rope_scaling={shortened(repr(scaling))} has a type and no rope_type, which readers of this family take "
            "for no scaling; rope_type is supported"
        )
    for name, value in raw.items():
        if name not in thetas or not isinstance(value, dict | None):
            raise UnsupportedModelError(
                f"{name}={shortened(repr(value))} in rope_parameters is not supported; supported are objects for "
                f"{' and '.join(thetas)}"
            )
    found: dict[str, RopeParameters] = {}
    for kind, theta in thetas.items():
        own = {**(raw.get(kind) or {}), **(scaling if kind == FULL else {})}
        if own.get("truncate") is False:
            raise UnsupportedModelError(
                f"truncate=False in the rope of {kind} is not supported, as transformers ignores it by type of layer; "
                "true works"
            )
        inner = {**settings, "rope_scaling": None, "rope_parameters": own, "rope_theta": theta, ORIGINAL: None}
        found[kind] = read_rope(inner, kinds=kinds, where=f".{kind}")
    return found


def _check(name: str, value: Any, key: Field | None, where: str) -> None:
    if name in ("rope_type", "type", "rope_theta"):
        return
    shown = f"{name}={shortened(repr(value))} in {where}"
    if name == "partial_rotary_factor":
        key = key or Field(1.0, _WHOLE_HEAD)
    if key is not None:
        if not key.kind.accepts(value):
            raise ModelError(f"{shown} must be {key.kind.works}")
    elif value is not None and name not in _UNREAD:
        raise UnsupportedModelError(
            f"{shown} is a key that this type does not read, or that sets the parameters of single layers; take it out"
        )
