"""Checkpoints in small files, and the export to the Hugging Face layout.

A checkpoint is weights in float32 (two files), AdamW's two moments in bfloat16 (two files) and state.json. No random
state is needed: there is no dropout, and a batch is a function of the seed and the step.
"""

import json
from pathlib import Path
from typing import Any

import torch
from model import Decoder, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor


def save(directory: Path, model: Decoder, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write a checkpoint; state.json last, so that a directory that has one is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters())
    names = sorted(parameters)
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: parameters[name].detach().cpu() for name in chosen}, directory / f"weights-{part}.safetensors")
    for moment in ("exp_avg", "exp_avg_sq"):
        tensors = {name: optimizer.state[parameters[name]][moment].bfloat16().cpu() for name in names}
        save_file(tensors, directory / f"{moment}.safetensors")
    (directory / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Return the float32 weights of a checkpoint."""
    return load_file(directory / "weights-0.safetensors") | load_file(directory / "weights-1.safetensors")


def load(directory: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill model and optimizer, and return the state that was saved."""
    model.load_state_dict(load_weights(directory))
    state = json.loads((directory / "state.json").read_text())
    moments = {moment: load_file(directory / f"{moment}.safetensors") for moment in ("exp_avg", "exp_avg_sq")}
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state["step"]), device=parameter.device),
            **{moment: tensors[name].to(parameter) for moment, tensors in moments.items()},
        }
    return state


def export(directory: Path, weights: dict[str, Tensor], shape: Shape) -> None:
    """Write config.json, generation_config.json and bfloat16 model.safetensors; the tokenizer is there already."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: weights[name].bfloat16().contiguous() for name in sorted(weights)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
