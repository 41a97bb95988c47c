"""Configuration of a model from the header of a GGUF file, as the fields of transformers' config.json.

Keys of the architecture outside the lists here are rejected, so that no file runs without a feature that it requires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.files.gguf_file import GgufFile
from phonograph.models.families.hybrids.qwen_hybrid import TILED
from phonograph.models.layer_spec import LayerSpec, RopeTable
from phonograph.models.quantization.gguf_blocks import FLOATS, check_kind, fused_schemes
from phonograph.models.quantization.scheme import Quantization
from phonograph.models.registry import find_architecture
from phonograph.models.weights.gguf_experts import expert_pieces, expert_schemes
from phonograph.models.weights.gguf_names import FUSED, PARTS, hugging_face_name

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
"""Architectures by `general.architecture`. Files of Mistral and Mixtral models mostly say "llama"."""
INTERLEAVED = frozenset({"llama", "mistral", "granite", "granitemoe"})
"""Architectures whose files have the two halves of each head of queries and keys interleaved."""
ROPE_FACTORS = "rope_freqs.weight"
_LAYERS_OF_27B = 62
"""Layers by which llama.cpp knows Gemma 3 27B, whose scale of scores is another one."""
_REQUIRED = object()


class _Key(NamedTuple):
    """A key below the architecture's name: its field in config.json, its type, and the value of files without it."""

    field: str
    kind: type
    default: Any = None


_KEYS: Mapping[str, _Key] = {
    "context_length": _Key("max_position_embeddings", int, _REQUIRED),
    "embedding_length": _Key("hidden_size", int, _REQUIRED),
    "block_count": _Key("num_hidden_layers", int, _REQUIRED),
    "feed_forward_length": _Key("intermediate_size", int, _REQUIRED),
    "attention.head_count": _Key("num_attention_heads", int, _REQUIRED),
    "attention.head_count_kv": _Key("num_key_value_heads", int),
    "attention.layer_norm_rms_epsilon": _Key("rms_norm_eps", float, _REQUIRED),
    "attention.key_length": _Key("head_dim", int),
    "rope.freq_base": _Key("rope_theta", float, 10000.0),
    "rope.freq_base_swa": _Key("rope_local_base_freq", float),
}
_SCALING: Mapping[str, _Key] = {
    "rope.scaling.factor": _Key("factor", float),
    "rope.scaling.original_context_length": _Key("original_max_position_embeddings", int),
    "rope.scaling.yarn_beta_fast": _Key("beta_fast", float),
    "rope.scaling.yarn_beta_slow": _Key("beta_slow", float),
}
_USED = {"expert_used_count": _Key("num_experts_per_tok", int, _REQUIRED)}
_GRANITE = {
    "attention.scale": _Key("attention_multiplier", float, _REQUIRED),
    "embedding_scale": _Key("embedding_multiplier", float, _REQUIRED),
    "residual_scale": _Key("residual_multiplier", float, _REQUIRED),
    "logit_scale": _Key("logits_scaling", float, _REQUIRED),
}
_MIXTRAL = {"expert_count": _Key("num_local_experts", int), **_USED}
_QWEN3_MOE = {
    "expert_count": _Key("num_experts", int, _REQUIRED),
    **_USED,
    "expert_feed_forward_length": _Key("moe_intermediate_size", int, _REQUIRED),
}
_QWEN2_MOE = {
    **_QWEN3_MOE,
    "expert_shared_feed_forward_length": _Key("shared_expert_intermediate_size", int, _REQUIRED),
}
_QWEN35 = {
    "full_attention_interval": _Key("full_attention_interval", int, 4),
    "ssm.conv_kernel": _Key("linear_conv_kernel_dim", int, _REQUIRED),
    "ssm.state_size": _Key("linear_key_head_dim", int, _REQUIRED),
    "ssm.group_count": _Key("linear_num_key_heads", int, _REQUIRED),
    "ssm.time_step_rank": _Key("linear_num_value_heads", int, _REQUIRED),
}
_OWN_KEYS: Mapping[str, Mapping[str, _Key]] = {
    "qwen2moe": _QWEN2_MOE,
    "qwen3moe": _QWEN3_MOE,
    "olmoe": {"expert_count": _Key("num_experts", int, _REQUIRED), **_USED},
    "gpt-oss": {"expert_count": _Key("num_local_experts", int, _REQUIRED), **_USED},
    "granite": _GRANITE,
    "granitemoe": {
        **_GRANITE,
        "expert_count": _Key("num_local_experts", int, _REQUIRED),
        **_USED,
        "expert_shared_feed_forward_length": _Key("shared_intermediate_size", int),
    },
    "qwen35": _QWEN35,
    # No matrix has the size of a dense feed-forward, which files may leave out.
    "qwen35moe": {**_QWEN35, **_QWEN2_MOE, "feed_forward_length": _Key("intermediate_size", int)},
}
"""Keys of single architectures."""
_RENORMALISED = {"qwen2moe": False, "qwen3moe": True, "olmoe": False}
"""Fields norm_topk_prob, which files do not have: llama.cpp's graphs of these architectures fix it."""
_SOFTMAX = 1
_BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Projections whose biases a switch of config.json brings. Those that a file lacks are 0."""
_FIXED: Mapping[str, Callable[[Any, dict[str, Any]], bool]] = {
    "vocab_size": lambda value, config: value == config["vocab_size"],
    "attention.value_length": lambda value, config: value == _head_size(config),
    "rope.dimension_count": lambda value, config: value == _head_size(config) * config.get("partial_rotary_factor", 1),
    # Positions of images, which are those of text without any.
    "rope.dimension_sections": lambda value, config: config["model_type"].startswith("qwen3_5"),
    "ssm.inner_size": lambda value, config: (
        value == config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
    ),
    "nextn_predict_layers": lambda value, config: value == 0,
    # For Granite false means that no layer has a rope.
    "rope.scaling.finetuned": lambda value, config: value is True or "granite" not in config["model_type"],
    "rope.scaling.type": lambda value, config: value in ("none", "linear", "yarn"),
    "rope.scaling.attn_factor": lambda value, config: value == 1,
    "rope.scaling.yarn_attn_factor": lambda value, config: value == 1,
    "rope.scaling.yarn_ext_factor": lambda value, config: value == 1,
    "attention.sliding_window": lambda value, config: value == config.get("sliding_window", 0),
    "attention.sliding_window_pattern": lambda value, config: value == config.get("sliding_window_pattern"),
    "expert_count": lambda value, config: value == 0,
    "expert_used_count": lambda value, config: value == 0,
    "expert_feed_forward_length": lambda value, config: value == config["intermediate_size"],
    "expert_gating_func": lambda value, config: value == _SOFTMAX,
    "expert_weights_norm": lambda value, config: value is config.get("norm_topk_prob", True),
    "expert_weights_scale": lambda value, config: value == 1,
    "use_parallel_residual": lambda value, config: value is False,
    "attention.causal": lambda value, config: value is True,
    "tensor_data_layout": lambda value, config: True,
}
"""Keys that must have the value that the model has here."""


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that the header stands for.

    Raises:
        UnsupportedModelError: the architecture, a key or a tensor's type is not supported.
        ModelError: a key or the embedding is missing, or has the wrong type.
    """
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"general.architecture={shortened(repr(name))} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": find_architecture(architecture).model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "vocab_size": _vocab_size(file),
    }
    for switch, parts in _BIASES.items():
        if any(f".{part}.bias" in name for name in file.tensors for part in parts):
            config[switch] = True
    if name in ("llama", "mistral") and file.values.get(f"{name}.expert_count"):
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    keys = _keys_of(name, config)
    for key, entry in keys.items():
        value = _read(file, f"{name}.{key}", entry)
        if value is not None:
            config[entry.field] = value
    if name in _RENORMALISED:
        config["norm_topk_prob"] = _RENORMALISED[name]
    if config.get("shared_intermediate_size"):
        config |= {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
    # Qwen3's default is another one; llama.cpp's is this.
    config.setdefault("head_dim", _head_size(config))
    if name.startswith("qwen35"):
        config |= _of_qwen35(file, name, config)
    _check_sizes(file, config)
    _read_scaling(file, name, config)
    window = _read(file, f"{name}.attention.sliding_window", _Key("sliding_window", int))
    if window and config["model_type"] == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if window and config["model_type"] in ("mistral", "mixtral"):
        config["sliding_window"] = window
    if name == "gemma3":
        config |= _of_gemma3(config, _read(file, f"{name}.attention.sliding_window", _Key("", int, _REQUIRED)))
    if name == "gpt-oss":
        config |= _of_gpt_oss(config, _read(file, f"{name}.attention.sliding_window", _Key("", int, _REQUIRED)))
    _check_keys(file, name, config)
    return config


def _of_gemma3(config: Mapping[str, Any], window: int) -> dict[str, Any]:
    """Return fields of Gemma 3 that a file does not have, as llama.cpp has them (`src/llama-model.cpp`)."""
    head_size, share = _head_size(dict(config)), config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": share if config["num_hidden_layers"] == _LAYERS_OF_27B else head_size,
    }


def _of_gpt_oss(config: Mapping[str, Any], window: int) -> dict[str, Any]:
    """Return fields of gpt-oss in the spelling of its publisher, whose bounds of YaRN are not rounded to pairs."""
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    rounding = {"truncate": False} if scaling["rope_type"] == "yarn" else {}
    return {"sliding_window": window, "rope_scaling": {**scaling, **rounding}}


def _of_qwen35(file: GgufFile, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of Qwen3.5 that a header has in other units."""
    inner, rotated = (
        _read(file, f"{name}.{key}", _Key("", int, _REQUIRED)) for key in ("ssm.inner_size", "rope.dimension_count")
    )
    return {
        TILED: True,
        "linear_value_head_dim": inner // max(config["linear_num_value_heads"], 1),
        "partial_rotary_factor": rotated / config["head_dim"],
    }


def quantization_of_gguf(file: GgufFile, layers: Sequence[LayerSpec]) -> Quantization | None:
    """Return the weight format of each projection that is in blocks; None if there are none.

    A fused matrix with parts in floating point is in the model's type as a whole.

    Raises:
        UnsupportedModelError: a tensor has a type that is not supported.
    """
    schemes = expert_schemes({name: tensor.kind for name, tensor in file.tensors.items()}, layers)
    fused: dict[str, dict[str, str]] = {}
    for own_name, tensor in file.tensors.items():
        check_kind(own_name, tensor.kind)
        module, _, end = hugging_face_name(own_name, _architecture(file)).rpartition(".")
        prefix, _, part = module.rpartition(".")
        if end == "weight" and part in PARTS:
            fused.setdefault(f"{prefix}.{FUSED.get(part, part)}", {})[module] = tensor.kind
    for matrix, kinds in fused.items():
        # Loading reports missing parts.
        is_whole = len(kinds) == max(list(FUSED.values()).count(matrix.rpartition(".")[2]), 1)
        if is_whole and FLOATS.keys().isdisjoint(kinds.values()):
            by_kind = fused_schemes(kinds.values())
            schemes |= {module: by_kind[kind] for module, kind in kinds.items()}
    head = file.tensors.get("output.weight") or file.tensors.get("token_embd.weight")
    in_blocks = None if head is None or head.kind in FLOATS else fused_schemes([head.kind])[head.kind]
    return Quantization("gguf", schemes, head=in_blocks) if schemes else None


def notes_of_gguf(file: GgufFile, quantization: Quantization | None, layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return a note on the tensors whose blocks become numbers in the model's type."""
    pieces = expert_pieces(layers)

    def module(name: str) -> str:
        piece = pieces.get(name)
        return hugging_face_name(name, _architecture(file)).removesuffix(".weight") if piece is None else piece.module

    converted = {
        name: tensor.kind
        for name, tensor in file.tensors.items()
        if tensor.kind not in FLOATS and (quantization is None or not quantization.scheme_of(module(name)))
    }
    if not converted:
        return ()
    shown = ", ".join(f"{name} ({kind})" for name, kind in list(converted.items())[:3])
    more = f" and {len(converted) - 3} more" if len(converted) > 3 else ""
    return (f"{shown}{more} of the file: dequantized to the model's type while loading, unless a CPU packs the head",)


def rope_of_gguf(file: GgufFile, rope: RopeTable) -> RopeTable:
    """Return a rope with frequencies divided by the numbers of `rope_freqs.weight`, as Llama 3.1 has them, if any.

    Raises:
        ModelError: the tensor has another type or shape, or a number that is not positive.
    """
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return rope
    count = len(rope.frequencies)
    factors = tensor.data if tensor.kind == "F32" and tensor.shape == (count,) else np.zeros(count)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(
            f"tensor {ROPE_FACTORS} {tensor.kind} {list(tensor.shape)} must have {count} positive numbers in F32"
        )
    return rope._replace(frequencies=tuple((np.asarray(rope.frequencies, np.float32) / factors).tolist()))


def _check_sizes(file: GgufFile, config: dict[str, Any]) -> None:
    """Compare the header's sizes with one tensor of the last layer, before anything is computed from them."""
    name = f"blk.{config['num_hidden_layers'] - 1}.attn_q.weight"
    tensor, expected = (
        file.tensors.get(name),
        [(1 + (TILED in config)) * config["num_attention_heads"] * _head_size(config), config["hidden_size"]],
    )
    if tensor is None:
        raise ModelError(
            f"the header says block_count={config['num_hidden_layers']}, and the file has no tensor {name}"
        )
    if list(tensor.shape) != expected:
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}; the header's sizes ask for {expected}")


def _read(file: GgufFile, key: str, entry: _Key) -> Any:
    value = file.values.get(key)
    if value is None:
        if entry.default is _REQUIRED:
            raise ModelError(f"the header has no {key}; the file is damaged or incomplete")
        return entry.default
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        # Some tools write one value for each layer.
        value = value[0]
    if type(value) is not entry.kind:
        raise UnsupportedModelError(f"{key}={shortened(repr(value))} is not supported; supported is one number")
    # The file has float32; config.json of the model had these few digits.
    return float(f"{value:.7g}") if entry.kind is float else value


def _read_scaling(file: GgufFile, name: str, config: dict[str, Any]) -> None:
    kind = file.values.get(f"{name}.rope.scaling.type", "none")
    # Before types there were factors of linear scaling.
    factor = file.values.get(f"{name}.rope.scale_linear")
    if kind == "none" and factor not in (None, 1.0):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if kind not in ("linear", "yarn"):
        return
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, entry in _SCALING.items():
        value = _read(file, f"{name}.{key}", entry)
        if value is not None and (kind == "yarn" or entry.field == "factor"):
            scaling[entry.field] = value
    config["rope_scaling"] = scaling


def _check_keys(file: GgufFile, name: str, config: dict[str, Any]) -> None:
    """Reject keys of features that are not implemented."""
    for key, value in file.values.items():
        own = key.removeprefix(f"{name}.")
        if own == key or own in _keys_of(name, config) or own in _SCALING or own == "rope.scale_linear":
            continue
        if own not in _FIXED:
            raise UnsupportedModelError(f"{key}={shortened(repr(value))} is a key whose effect is not implemented")
        if not _FIXED[own](value, config):
            raise UnsupportedModelError(f"{key}={shortened(repr(value))} is not supported with the model's other sizes")


def _keys_of(name: str, config: Mapping[str, Any]) -> Mapping[str, _Key]:
    """Return the keys that are read from files of an architecture."""
    return {**_KEYS, **(_MIXTRAL if config["model_type"] == "mixtral" else _OWN_KEYS.get(name, {}))}


def _architecture(file: GgufFile) -> str:
    return str(file.values["general.architecture"])


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("the file has no matrix token_embd.weight; it is damaged, or holds no language model")
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    """Return float16 for models in float16. Blocks were made from bfloat16, and scales in it are exact enough."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float16" if "F16" in kinds and kinds <= {"F16", "F32"} else "bfloat16"


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // max(config["num_attention_heads"], 1)
