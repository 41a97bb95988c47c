"""GGUF files of checkpoints in transformers' format, written by llama.cpp's package, and the weights that they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from phonograph.files.gguf_file import read_gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{own}" for part, own in zip("qkvo", ["q", "k", "v", "output"], strict=True)},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
# Bytes of a block, and the places of its float16 numbers with the size that makes weights of about 0.05.
RANDOM = {"Q4_K": (144, {0: 2e-4, 2: 1.5e-3}), "Q5_K": (176, {0: 1e-4, 2: 1.5e-3}), "Q6_K": (210, {208: 4e-5})}


BOTH_NORMS = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in files of Gemma 3."""


OF_STATES = {
    "post_attention_layernorm": "post_attention_norm",
    **{f"linear_attn.in_proj_{part}": own for part, own in zip("ba", ("ssm_beta", "ssm_alpha"), strict=True)},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    **{f"linear_attn.{part}": f"ssm_{part}" for part in ("conv1d", "norm")},
    "linear_attn.out_proj": "ssm_out",
}
"""Names in files of Qwen3.5."""


ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoeshared": "granitemoe",
    # Files of Granite 4 without layers that have a state.
    "granitemoehybrid": "granite",
    "gpt_oss": "gpt-oss",
}
"""llama.cpp's architectures by the model type, where they have other names."""
EXPERT_PARTS = {
    **{f"{part}_proj": part for part in ("gate", "up", "down")},
    **{"w1": "gate", "w3": "up", "w2": "down"},
}
ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router.layer")
INTERLEAVED = ("llama", "granite", "granitemoe")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"model\.layers\.(\d+)\.(shared_mlp|block_sparse_moe)\.(input|output)_linear\.weight")
_OSS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")


def expert_header(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Return the keys of models with experts, and of Granite."""
    count = config.get("num_experts") or config.get("num_local_experts")
    keys: dict[str, Any] = {}
    if count:
        keys |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
        keys |= {
            key: config[field]
            for field, key in {
                "moe_intermediate_size": "expert_feed_forward_length",
                "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "shared_intermediate_size": "expert_shared_feed_forward_length",
            }.items()
            if config.get(field)
        }
    if "granite" in arch:
        keys |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if arch == "gpt-oss":
        rope = config["rope_parameters"]
        keys |= {
            "attention.sliding_window": config["sliding_window"],
            "expert_feed_forward_length": config["intermediate_size"],
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, str]]:
    """Return views by llama.cpp's names of a layer's experts, each with a name of one part in a checkpoint.

    Tensors of single experts are replaced by views of one tensor, and gates and ups in one tensor are two views.
    """
    found: dict[str, tuple[torch.Tensor, str]] = {}
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name, tensor in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            groups.setdefault((match[1], EXPERT_PARTS[match[3]]), {})[int(match[2])] = name
        elif (match := _FUSED.fullmatch(name)) is not None:
            routed = any("router" in other for other in tensors)
            end = "_exps" if match[2] == "block_sparse_moe" else "_shexp" if routed else ""
            pieces = (
                {"down": tensor}
                if match[3] == "output"
                else dict(zip(("gate", "up"), tensor.chunk(2, -2), strict=True))
            )
            for part, piece in pieces.items():
                found[f"blk.{match[1]}.ffn_{part}{end}.weight"] = piece, f"{match[2]}.{part}_proj.weight"
        elif (match := _OSS.fullmatch(name)) is not None:
            rows, kind = (tensor, "bias") if match[3] else (tensor.transpose(1, 2), "weight")
            # Gates and ups lie in turn.
            pieces = {"down": rows} if match[2] == "down" else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            for part, piece in pieces.items():
                found[f"blk.{match[1]}.ffn_{part}_exps.{kind}"] = piece, f"experts.{part}_proj.{kind}"
    for (layer, part), names in groups.items():
        whole = torch.stack([tensors[names[expert]] for expert in range(len(names))])
        tensors |= {names[expert]: rows for expert, rows in enumerate(whole)}
        found[f"blk.{layer}.ffn_{part}_exps.weight"] = whole, f"experts.{part}_proj.weight"
    return found


def own_name(name: str, architecture: str = "") -> str:
    """Return llama.cpp's name of a tensor."""
    module, _, end = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{end}"
    _, _, layer, rest = module.split(".", 3)
    names = {**NAMES, **BOTH_NORMS} if architecture == "gemma3" else NAMES
    if architecture.startswith("qwen35"):
        names = {**names, **OF_STATES}
        if end in ("A_log", "dt_bias"):
            return f"blk.{layer}.{'ssm_a' if end == 'A_log' else 'ssm_dt.bias'}"
    if architecture == "gpt-oss":
        names = {**names, "post_attention_layernorm": "post_attention_norm"}
        if end == "sinks":
            return f"blk.{layer}.attn_sinks.weight"
    names |= dict.fromkeys(ROUTERS, "ffn_gate_inp")
    names |= {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    names["mlp.shared_expert_gate"] = "ffn_gate_inp_shexp"
    return f"blk.{layer}.{names[rest]}.{end}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of heads as llama.cpp's conversion of Llama models does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo `interleaved`."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def state_header(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Return the keys of Qwen3.5."""
    rotated = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    keys = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": 4,
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [rotated // 2, 0, 0, 0],
    }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def tiled(name: str, array: np.ndarray, config: dict[str, Any], *, back: bool = False) -> np.ndarray:
    """Order heads of values as llama.cpp's conversion of Qwen3.5 does: first those of each key head, then the second.

    With `back`, undo it.
    """
    part = name.split("linear_attn.")[-1].removesuffix(".weight")
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    sizes = dict.fromkeys(("in_proj_qkv", "conv1d", "in_proj_z", "out_proj"), config["linear_value_head_dim"])
    size = sizes.get(part, 1 if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias") else 0)
    if not size:
        return array
    if part == "out_proj":
        array = array.T
    first = array.shape[0] - heads * size
    each = (heads // groups, groups) if back else (groups, heads // groups)
    values = array[first:].reshape(*each, size, *array.shape[1:]).swapaxes(0, 1).reshape(array[first:].shape)
    array = np.concatenate([array[:first], values])
    return np.ascontiguousarray(array.T if part == "out_proj" else array)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return rows of random blocks of a type that the package reads but does not write."""
    size, halves = RANDOM[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    for place, scale in halves.items():
        numbers = (rng.uniform(0.5, 1.5, blocks.shape[:-1]) * scale).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    folder: Path,
    kind_of: Callable[[str], str],
    *,
    header: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: str | None = None,
) -> dict[str, torch.Tensor]:
    """Write the checkpoint of a folder as a GGUF file.

    Args:
        path: the file.
        folder: checkpoint in transformers' format.
        kind_of: type of a matrix by its name in the checkpoint, without the number of an expert; norms, biases and
            routers are in F32.
        header: further keys; None leaves out the key.
        tensors: further tensors, in F32.
        without: a tensor to leave out, by its name in the checkpoint or in the file.

    Returns:
        The weights that the file means, by their names in the checkpoint.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope = config.get("rope_parameters") or config
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    keys = {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_size,
        f"{arch}.attention.value_length": head_size,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        f"{arch}.rope.dimension_count": head_size,
        **expert_header(config, arch),
        **(state_header(config, arch) if arch.startswith("qwen35") else {}),
        **(header or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    meant = load_file(folder / "model.safetensors")
    meant = {name: tensor.float() for name, tensor in meant.items()}
    of_experts = stacked(meant)
    inside = {name for name in meant if any(one.fullmatch(name) for one in (_EXPERT, _FUSED, _OSS))}
    plain = {own_name(name, arch): (tensor, name) for name, tensor in meant.items() if name not in inside}
    for seed, (own, (tensor, name)) in enumerate({**plain, **of_experts}.items()):
        array, parts = tensor.numpy(), name.split(".")
        count = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}.get(parts[-2], 0)
        count = count if arch in INTERLEAVED else 0
        array = interleaved(array, count) if count else array
        # Norms of Gemma and Qwen3.5 are stored as the weights that are multiplied.
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        offset = 1 if arch.startswith(("gemma3", "qwen35")) and is_norm else 0
        array = array + offset
        if arch.startswith("qwen35"):
            array = tiled(name, array.squeeze(1) if "conv1d" in name else array, config)
            array = -np.exp(array) if name.endswith("A_log") else array
        # llama.cpp leaves routers as they are.
        kind = kind_of(name) if array.ndim > 1 and not re.search("ffn_gate_inp|conv1d|bias", own) else "F32"
        data = random_blocks(kind, array.shape, seed) if kind in RANDOM else gguf.quants.quantize(array, Kind[kind])
        if without not in (name, own):
            writer.add_tensor(own, data.squeeze(0) if own.endswith("inp_shexp.weight") else data, raw_dtype=Kind[kind])
        numbers = gguf.quants.dequantize(data, Kind[kind]).astype(np.float32)
        numbers = halved(numbers, count) if count else numbers - offset
        if arch.startswith("qwen35"):
            numbers = tiled(name, np.log(-numbers) if name.endswith("A_log") else numbers, config, back=True)
        tensor.copy_(torch.from_numpy(numbers).view(tensor.shape))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def tokenizer_header(folder: Path, pre: str) -> dict[str, Any]:
    """Return the keys of a byte-level tokenizer of transformers."""
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    special = {token["content"]: token["id"] for token in settings["added_tokens"]}
    texts = sorted(vocabulary | special, key=(vocabulary | special).__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in settings["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": special[names["bos_token"]],
        "tokenizer.ggml.eos_token_id": special[names["eos_token"]],
        "tokenizer.ggml.padding_token_id": special[names["pad_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": names["chat_template"],
    }


def transformers_model(file: Path, folder: Path) -> torch.nn.Module:
    """Load the model by transformers.

    From a copy without the vocabulary, which takes its reader seconds, and with one table of names for all modules.
    """
    whole = read_gguf(file)
    architecture = whole.values["general.architecture"]
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_vocab_size(whole.tensors["token_embd.weight"].shape[0])
    for key, value in whole.values.items():
        if key.startswith(f"{architecture}.") and key != f"{architecture}.vocab_size":
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, tensor in whole.tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=gguf.GGMLQuantizationType[tensor.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
