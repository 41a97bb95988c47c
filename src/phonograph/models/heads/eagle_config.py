"""Configurations of EAGLE heads: those of the authors, of SpecForge, of Model Optimizer, and of speculators 0.9.

A field that changes the result and is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import FLAG, INTS, POSITIVE_INT, FieldKind
from phonograph.models.families.family import Family, Settings
from phonograph.models.families.llama import LLAMA
from phonograph.models.families.qwens.qwen import QWEN3
from phonograph.models.hf_config import read_settings

METHODS: Mapping[str, str] = {
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"), "eagle3"),
    **dict.fromkeys(("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"), "eagle"),
}
"""Method by the architecture in config.json."""
FAMILIES: Mapping[str, Family] = {"llama": LLAMA, "qwen3": QWEN3}
"""Families of a head's layers by `model_type` in the format of speculators, whose default is the last."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_KINDS: Mapping[str, FieldKind] = {
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias"), FLAG),
    "use_aux_hidden_state": FLAG,
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size"), POSITIVE_INT),
    LAYER_IDS: INTS,
}
"""Fields of EAGLE-3 heads beside those of their layers."""
_LAYOUT: Mapping[str, tuple[object, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1, 0),
    "eh_proj_before_attn": (False,),
    "return_hidden_post_norm": (False,),
}
"""Fields of `eagle_config` that Model Optimizer and TensorRT-LLM know, with the values of the layout that runs."""
_MODEL_TYPE, _LAYERS = "speculators_model_type", "transformer_layer_config"
_OF_FILE = {
    *("auto_map", "embed_requires_grad", "speculators_config", "speculators_version", "tie_word_embeddings"),
    *(_MODEL_TYPE, _LAYERS),
}
"""Fields of speculators outside of `transformer_layer_config` about the file, its training and its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head's config.json.

    Attributes:
        architecture: first of `architectures`.
        family: of its layers.
        settings: fields of the family.
        own: fields of EAGLE-3 heads that are given.
        names_outputs: layers by number may be those whose output is read.
    """

    architecture: str
    family: Family
    settings: Settings
    own: Mapping[str, Any]
    names_outputs: bool


def method_of(raw: Mapping[str, Any]) -> str | None:
    """Return the method of a head by its config.json; None for other models.

    Raises:
        UnsupportedModelError: it is another kind of head in the format of speculators.
    """
    if _MODEL_TYPE in raw:
        if raw[_MODEL_TYPE] != "eagle3":
            refuse(raw, _MODEL_TYPE, "is not supported; eagle3 is")
        return "eagle3"
    return METHODS.get(_architecture(raw))


def read_head_config(raw: Mapping[str, Any], method: str) -> HeadConfig:
    """Return the configuration of a head.

    Args:
        raw: config.json.
        method: "eagle3", or "eagle" for EAGLE-1.

    Raises:
        UnsupportedModelError: a field is not known, or asks for what is not implemented.
        ModelError: a value has the wrong type.
    """
    if _MODEL_TYPE in raw:
        layers = raw.get(_LAYERS)
        if not isinstance(layers, dict):
            raise ModelError(f"{_LAYERS}={shortened(repr(layers))} must be an object with the fields of the layers")
        layers = cast("dict[str, Any]", layers)
        default = list(FAMILIES)[-1]
        family = FAMILIES.get(str(layers.get("model_type", default)))
        if family is None:
            refuse(layers, "model_type", f"of {_LAYERS} is not supported; {' and '.join(FAMILIES)} are")
        outside = {name: value for name, value in raw.items() if name not in _OF_FILE}
        # The package reads these outside of the layers only.
        layers = {name: value for name, value in layers.items() if name not in _KINDS}
        fields = outside | layers | {"model_type": family.model_type}
    else:
        family = LLAMA
        fields = {**raw, "model_type": LLAMA.model_type}
    own: dict[str, Any] = {}
    if method == "eagle":
        # The tensors say whether `fc` has a bias.
        fields.pop("bias", None)
    else:
        own = _nested(fields) | {name: fields.pop(name) for name in _KINDS if name in fields}
        own = {name: value for name, value in own.items() if value is not None}
    for name, value in own.items():
        if not _KINDS[name].accepts(value):
            raise ModelError(f"{name}={shortened(repr(value))} must be {_KINDS[name].works}")
    if own.get("norm_before_fc") and own.get("fc_norm"):
        refuse(own, "fc_norm", "and norm_before_fc=True norm the states twice; heads have one of them")
    architecture = _architecture(raw)
    settings = read_settings(fields, architecture, family)
    return HeadConfig(
        architecture=architecture, family=family, settings=settings, own=own, names_outputs=_MODEL_TYPE not in raw
    )


def refuse(fields: Mapping[str, Any], name: str, problem: str) -> NoReturn:
    """Raise an error about a field, with its value."""
    raise UnsupportedModelError(f"{name}={shortened(repr(fields.get(name)))} {problem}")


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none named in config.json)"


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Take `eagle_config` out of the fields and return those of the head in it."""
    nested: Any = fields.pop("eagle_config", None) or {}
    if not isinstance(nested, dict):
        refuse({"eagle_config": nested}, "eagle_config", "must be an object")
    nested = cast("dict[str, Any]", nested)
    for name, value in nested.items():
        if name in _KINDS or value is None:
            continue
        if name not in _LAYOUT:
            refuse(nested, name, "is a field of eagle_config that is not known")
        if value not in _LAYOUT[name]:
            refuse(nested, name, f"of eagle_config is not supported; {_LAYOUT[name][0]} is")
    return {name: value for name, value in nested.items() if name in _KINDS}
