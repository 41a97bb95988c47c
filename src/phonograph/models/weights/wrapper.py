"""Checkpoints of models that also read images or sound: the configuration of the text model, and its tensors' names.

Also what names of other tensors say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import FIXED, IGNORED


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model around a text model.

    Attributes:
        model_type: model type in config.json.
        text_models: architectures of text models by the model type in text_config; the first is the default.
        ignored: fields of other parts.
    """

    model_type: str
    text_models: Mapping[str, str]
    ignored: frozenset[str]


_QWEN_VISION = frozenset({"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"})
WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "gemma3",
        {"gemma3_text": "Gemma3ForCausalLM"},
        frozenset({"image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image"}),
    ),
    "Gemma4ForConditionalGeneration": Wrapper(
        "gemma4",
        {"gemma4_text": "Gemma4ForCausalLM"},
        frozenset(
            {
                *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
                *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "vision_soft_tokens_per_image"),
            }
        ),
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", {"qwen3_5_text": "Qwen3_5ForCausalLM"}, _QWEN_VISION),
    "Qwen3_5MoeForConditionalGeneration": Wrapper(
        "qwen3_5_moe", {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, _QWEN_VISION
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3",
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        frozenset(
            {
                *("image_token_index", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
                "vision_feature_layer",
            }
        ),
    ),
}
"""Wrappers by the architecture in config.json."""
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""Prefixes of the text model's tensors, in older and newer files."""
_HEAD = "language_model.lm_head."
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|embed_vision|audio_tower|embed_audio|mtp)\."
)
_SHARED = ("dtype", "torch_dtype", "quantization_config", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of the text model that files have outside of text_config; those outside count."""

_OF_WRAPPERS = ("architectures", "model_type", "text_config", "vision_config", "tie_word_embeddings")


def unwrapped(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the text model's config.json, and the architecture of its wrapper; None if there is none.

    Raises:
        UnsupportedModelError: the text model, or a field of the wrapper, is not supported.
        ModelError: there is no text_config.
    """
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    wrapper = WRAPPERS.get(name)
    if wrapper is None:
        return dict(raw), None
    if raw.get("model_type") != wrapper.model_type:
        raise UnsupportedModelError(
            f"model_type={raw.get('model_type')!r} and architectures={names!r} do not belong together; {name} has the "
            f"model_type {wrapper.model_type!r}"
        )
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"text_config={shortened(repr(text))} must be an object with the fields of the text model")
    known = {*_SHARED, *IGNORED, *wrapper.ignored, *_OF_WRAPPERS}
    for field, value in raw.items():
        is_off = value is None or (field in FIXED and value in FIXED[field])
        if not (is_off or field in known or field.startswith("_")):
            raise UnsupportedModelError(
                f"{field}={shortened(repr(value))} is a field that models of type {wrapper.model_type!r} do not have "
                "by default, and its effect is not known; if it has none, take it out of the file"
            )
    text = cast("dict[str, Any]", text)
    default, *_ = wrapper.text_models
    model_type = text.get("model_type", default)
    if model_type not in wrapper.text_models:
        raise UnsupportedModelError(
            f"model_type={model_type!r} of text_config is not supported in {name}; supported are "
            f"{', '.join(wrapper.text_models)}"
        )
    shared = {field: raw[field] for field in _SHARED if raw.get(field) is not None}
    return {
        **text,
        **shared,
        "architectures": [wrapper.text_models[model_type]],
        "model_type": model_type,
        # transformers ties by the field outside of text_config.
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }, name


def text_name(name: str) -> str | None:
    """Return the name of a wrapped checkpoint's tensor in the text model; None for one of another part."""
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    if name.startswith(_HEAD):
        return name.removeprefix("language_model.")
    return None if _OTHER_PARTS.match(name) else name


def is_norm(name: str) -> bool:
    """Return True for the name of a norm's weights in a checkpoint; some are numbered, a router's is a scale.

    The norm inside a mixer with a state is none of these: its weights are w in a model of norms of 1 + w.
    """
    return re.search(r"(?<!linear_attn\.)[nN]orm(_\d|\.\d+)?\.weight$|\.router\.scale$", name) is not None


def skipped_note(names: Iterable[str]) -> str:
    """Return a note that counts tensors of other parts, and of layers after those that run."""
    counts = Counter[str]()
    for name in names:
        part = _OTHER_PARTS.match(name)
        counts[".".join(name.split(".")[:3]) if part is None else part[0].removesuffix(".")] += 1
    shown = ", ".join(f"{part} {count}" for part, count in sorted(counts.items()))
    return f"tensors of other parts than the text model skipped: {shown}"


def head_tensor_name(name: str) -> str:
    """Return the name of a draft head's tensor as a model's: files leave `model.` out, and have a `midlayer`."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    return name if name.startswith("lm_head.") else f"model.{name}"
