"""What a config.json says, with the meaning that transformers gives it.

Importing transformers' configuration classes takes as long as the rest of a start. A file of the common kind is
therefore read here, with their defaults written down once; tests hold it to what the classes say. Whatever is unusual
in a file (a key that is not known here, a value of another type, code of its own) goes to transformers, which also
words the complaint where there is one.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, cast

from phonograph.errors import ModelError

_COMMON: dict[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN: dict[str, object] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
# By model_type; None where the value follows from others.
DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        **_COMMON,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        **_COMMON,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {**_COMMON, **_QWEN},
    "qwen3": {**_COMMON, **_QWEN, "head_dim": 128, "attention_bias": False},
}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "hidden_act": (str,),
    "rms_norm_eps": (float,),
    "tie_word_embeddings": (bool,),
    "attention_bias": (bool,),
    "mlp_bias": (bool,),
    "use_sliding_window": (bool,),
    "sliding_window": (int, NoneType),
    "layer_types": (list, NoneType),
    "dtype": (str, NoneType),
    "torch_dtype": (str, NoneType),
    "bos_token_id": (int, NoneType),
    "eos_token_id": (int, list, NoneType),
    "rope_theta": (int, float),
    "rope_scaling": (dict, NoneType),
    "rope_parameters": (dict, NoneType),
}
"""Types of the values that are read here; of every other setting int."""

_OLDER_SPELLINGS = {"torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}
# Of no consequence for the model that we run.
_UNREAD = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "initializer_range",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "transformers_version",
    "use_cache",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_DEFAULT_THETA = 10000.0
_SCALED_FROM_LENGTH = ("llama3", "yarn", "longrope")


def read_settings(raw: dict[str, Any], architecture: str, path: Path, *, trust_remote_code: bool) -> SimpleNamespace:
    """The settings in config.json (`raw`, read from `path`) as attributes, named as transformers names them.

    Raises:
        ModelError: transformers cannot use the file.
    """
    return read_common(raw, architecture) or _ask_transformers(path, trust_remote_code=trust_remote_code)


def read_common(raw: dict[str, Any], architecture: str) -> SimpleNamespace | None:
    """The settings of a file of the common kind, None for any other."""
    kind = raw.get("model_type")
    if kind != _MODEL_TYPES.get(architecture) or kind is None:
        return None
    defaults = DEFAULTS[kind]
    read = {key: value for key, value in raw.items() if key not in _UNREAD}
    if not read.keys() <= defaults.keys() | _OLDER_SPELLINGS:
        return None
    if any(type(value) not in _KINDS.get(key, (int,)) for key, value in read.items()):
        return None
    end = read.get("eos_token_id")
    if isinstance(end, list) and any(type(token_id) is not int for token_id in end):
        return None
    settings = SimpleNamespace(**{**defaults, **{key: read[key] for key in read.keys() - _OLDER_SPELLINGS}})
    if settings.dtype is None:
        settings.dtype = raw.get("torch_dtype")
    if settings.num_key_value_heads is None:
        settings.num_key_value_heads = settings.num_attention_heads
    if kind == "llama" and settings.hidden_size % (settings.num_attention_heads or 1):
        return None  # which its class refuses
    if "use_sliding_window" in defaults and not _fill_layer_types(settings):
        return None
    settings.rope_parameters = _rope_parameters(raw, settings.max_position_embeddings)
    return None if settings.rope_parameters is None else settings


def _fill_layer_types(settings: SimpleNamespace) -> bool:
    if not settings.use_sliding_window:
        settings.sliding_window = None
    if settings.layer_types is None:
        first = settings.max_window_layers if settings.sliding_window is not None else settings.num_hidden_layers
        settings.layer_types = [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(settings.num_hidden_layers)
        ]
    known = all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in settings.layer_types)
    return known and len(settings.layer_types) == settings.num_hidden_layers


def _rope_parameters(raw: dict[str, Any], max_position_embeddings: int) -> dict[str, Any] | None:
    """Both spellings as one dictionary; None where layers differ or a part of the head is rotated."""
    parameters: dict[str, Any] = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if "partial_rotary_factor" in parameters or any(isinstance(value, dict) for value in parameters.values()):
        return None
    parameters.setdefault("rope_theta", raw.get("rope_theta", _DEFAULT_THETA))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] in _SCALED_FROM_LENGTH:
        parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
    return parameters


def _ask_transformers(path: Path, *, trust_remote_code: bool) -> SimpleNamespace:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path.parent), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ModelError(f"{path} cannot be used: {error}") from error
    return cast("SimpleNamespace", config)
