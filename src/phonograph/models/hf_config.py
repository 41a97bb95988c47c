"""Settings of a model: config.json read through the allow-list of `config_fields.py`, with transformers' meaning.

A field outside the list is rejected. An omitted field has the default of transformers' class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from phonograph.errors import ConfigError, ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import FIXED, FULL, IGNORED, SLIDING
from phonograph.models.families.family import Family


def read_settings(raw: Mapping[str, Any], architecture: str, family: Family) -> dict[str, Any]:
    """Return every field that a model of this family uses, by name.

    Derived fields are filled in: num_key_value_heads, layer_types, and sliding_window, which is None if no layer has a
    window.

    Args:
        raw: content of config.json.
        architecture: name of the architecture, for messages.
        family: family of the architecture.

    Raises:
        UnsupportedModelError: model_type does not match the architecture; a field is not in the allow-list, or requires
            a feature that is not implemented.
        ModelError: a value has the wrong type.
    """
    model_type = family.model_type
    if raw.get("model_type") != model_type:
        raise UnsupportedModelError(
            f"model_type={raw.get('model_type')!r} and architectures={raw.get('architectures')!r} do not belong "
            f"together; {architecture} has the model_type {model_type!r}"
        )
    for name, value in raw.items():
        _check(name, value, family)
    raw = {family.aliases.get(name, name): value for name, value in raw.items()}
    settings = {name: raw.get(name, field.default) for name, field in family.fields.items()}
    settings["dtype"] = settings["dtype"] or settings["torch_dtype"]
    settings["num_key_value_heads"] = settings["num_key_value_heads"] or settings["num_attention_heads"]
    if "sliding_window" in settings:
        _fill_layer_types(settings, family)
    return settings


def check_code(raw: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Check that trust_remote_code does not ask for model code of the checkpoint.

    Raises:
        UnsupportedModelError: there is some, and trust_remote_code is set.
    """
    if trust_remote_code and raw.get("auto_map"):
        raise UnsupportedModelError(
            f"auto_map={shortened(repr(raw['auto_map']))} names model code of the checkpoint, which does not run here; "
            "leave out trust_remote_code, or set auto_map to null by hf_overrides to run only that of the tokenizer"
        )


def check_overrides(overrides: Mapping[str, Any], raw: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Check that each override names a field of the file or of a family (`fields`).

    Raises:
        ConfigError: there is no such field.
    """
    known = {*raw, *FIXED, *IGNORED, *fields}
    for name, value in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "give fields of transformers' configuration"
            raise ConfigError("hf_overrides", {name: value}, f"config.json has no field of that name; {hint}")


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with overrides, which replace whole fields; in quantization_config they replace single keys.

    A key of quantization_config, at any depth, is taken out by null.
    """
    field = "quantization_config"
    merged = {**raw, **overrides}
    if isinstance(raw.get(field), dict) and isinstance(overrides.get(field), dict):
        merged[field] = _merged(raw[field], overrides[field])
    return merged


def _merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for name, value in overrides.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(raw.get(name), dict):
            merged[name] = _merged(raw[name], cast("dict[str, Any]", value))
        else:
            merged[name] = value
    return merged


def _check(name: str, value: Any, family: Family) -> None:
    if name.startswith("_"):
        return
    shown, name = f"{name}={shortened(repr(value))}", family.aliases.get(name, name)
    field = family.fields.get(name)
    if field is not None:
        if not field.kind.accepts(value):
            raise ModelError(f"{shown} must be {field.kind.works}; {field.default!r} is the default")
    elif name in FIXED:
        if value not in FIXED[name]:
            raise UnsupportedModelError(f"{shown} is not supported; the default, {FIXED[name][0]!r}, is")
    elif value is not None and name not in IGNORED and name not in family.ignored:
        raise UnsupportedModelError(
            f"{shown} is a field that models of type {family.model_type!r} do not have by default, and its effect is "
            f"not known; if it has none, null takes it out: --hf-overrides '{{\"{name}\": null}}'"
        )


def window_notes(settings: Mapping[str, Any]) -> list[str]:
    """Return a note on a window that no layer has."""
    window = settings.get("sliding_window")
    if window is None or SLIDING in settings["layer_types"]:
        return []
    return [f"sliding_window={window} ignored: layer_types has no {SLIDING}"]


def _fill_layer_types(settings: dict[str, Any], family: Family) -> None:
    """Set the kind of each layer, by the family's rule if the file names none."""
    if not settings.get("use_sliding_window", True):
        settings["sliding_window"] = None
    window, num_layers = settings["sliding_window"], settings["num_hidden_layers"]
    types = cast("list[str] | None", settings.get("layer_types"))
    if types is None:
        types = family.layer_types(settings)
    if len(types) != num_layers or not {FULL, SLIDING} >= set(types):
        raise UnsupportedModelError(
            f"layer_types={shortened(repr(types))} must name {FULL} or {SLIDING} for each of {num_layers} layers"
        )
    if SLIDING in types and (window is None or window <= 0):
        raise ModelError(
            f"sliding_window={window!r} must be a positive integer, as layer_types names {SLIDING}"
            + ("; use_sliding_window=False unsets it" if settings.get("use_sliding_window") is False else "")
        )
    settings["layer_types"] = types
