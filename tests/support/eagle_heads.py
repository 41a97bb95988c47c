"""EAGLE heads of random weights, and plain implementations of their forward passes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import PreTrainedModel

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8, "vocab_size": 300, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
HEAD = {
    **TARGET, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "num_key_value_heads": 4,
    "draft_vocab_size": 120,
}  # fmt: skip
DRAFTS = 120
FIRST = {**TARGET, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
"""Configuration of an EAGLE-1 head."""


def head_tensors(config: dict[str, Any], layer: str, *, owns_embedding: bool, states: int) -> dict[str, torch.Tensor]:
    """Random weights under the names of the authors' files."""
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    width = config["head_dim"]
    drafts = config.get("draft_vocab_size", config["vocab_size"])
    shapes = {
        "fc.weight": (size, states * config["hidden_size"]),
        f"{layer}.self_attn.q_proj.weight": (size, 2 * size),
        f"{layer}.self_attn.k_proj.weight": (heads * width, 2 * size),
        f"{layer}.self_attn.v_proj.weight": (heads * width, 2 * size),
        f"{layer}.self_attn.o_proj.weight": (size, size),
        f"{layer}.mlp.gate_proj.weight": (inner, size),
        f"{layer}.mlp.up_proj.weight": (inner, size),
        f"{layer}.mlp.down_proj.weight": (size, inner),
        "lm_head.weight": (drafts, size),
    }
    if owns_embedding:
        shapes["embed_tokens.weight"] = (config["vocab_size"], size)
    if config.get("fc_bias"):
        shapes["fc.bias"] = (size,)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    norms = (f"{layer}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(size) for name in (*norms, "norm")}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.5 * torch.randn(states * config["hidden_size"])
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{state}.weight": 1 + 0.5 * torch.randn(config["hidden_size"]) for state in range(states)}
    if drafts < config["vocab_size"]:
        chosen = torch.randperm(config["vocab_size"])[:drafts].sort().values
        tensors["d2t"] = chosen - torch.arange(drafts)
        tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), chosen)
    return tensors


def first_tensors(config: dict[str, Any], *, owns_embedding: bool, bias: bool) -> dict[str, torch.Tensor]:
    """Random weights of an EAGLE-1 head under the names of the authors' files."""
    third = head_tensors(config, "layers.0", owns_embedding=owns_embedding, states=2)
    third |= {f"layers.0.self_attn.{name}_proj.weight": third[f"layers.0.self_attn.{name}_proj.weight"][
        :, : config["hidden_size"]].contiguous() for name in "qkv"}  # fmt: skip
    absent = ("lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
    tensors = {name: tensor for name, tensor in third.items() if name not in absent}
    return tensors | ({"fc.bias": torch.randn(config["hidden_size"])} if bias else {})


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x_HTD: torch.Tensor) -> torch.Tensor:
    length, size = x_HTD.shape[1:]
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    first, second = x_HTD.chunk(2, -1)
    return x_HTD * cos + torch.cat([-second, first], -1) * sin


def reference(
    tensors: dict[str, torch.Tensor],
    layer: str,
    config: dict[str, Any],
    states: torch.Tensor,
    embedded: torch.Tensor,
    own: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next features and the logits of one whole sequence.

    `own` are the features of the last entries, which follow those of `states`.
    """
    if config.get("norm_before_fc"):
        states = norm(states, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        parts = states.split(config["hidden_size"], -1)
        states = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    feature = states
    if "fc.weight" in tensors:
        feature = functional.linear(states, tensors["fc.weight"], tensors.get("fc.bias"))
    feature = torch.cat([feature, *(one[None] for one in own)])
    normed = norm(feature, tensors[f"{layer}.hidden_norm.weight"])
    both = torch.cat([norm(embedded, tensors[f"{layer}.input_layernorm.weight"]), normed], -1)
    stream = _behind_layer(tensors, layer, config, normed if config.get("norm_before_residual") else feature, both)
    said = norm(stream, tensors["norm.weight"])
    return said if config.get("norm_output") else stream, functional.linear(said, tensors["lm_head.weight"])


def first_reference(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    features: torch.Tensor,
    embedded: torch.Tensor,
    head: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next features and the logits of an EAGLE-1 head, by the target's matrix of logits."""
    both = torch.cat([embedded, features], -1)
    stream = functional.linear(both, tensors["fc.weight"], tensors.get("fc.bias"))
    stream = _behind_layer(tensors, "layers.0", config, stream, stream)
    return stream, functional.linear(stream, head)


class Chain(NamedTuple):
    """A plain head behind a whole sequence: the logits of each draft by the target's tokens, and the last feature."""

    logits: list[torch.Tensor]
    feature: torch.Tensor


@torch.inference_mode()
def plain_chain(
    target: PreTrainedModel,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    known: Sequence[int],
    drafts: Sequence[int],
) -> Chain:
    """Return what a head says in each step of drafting, if it has drafted `drafts` behind the tokens `known`.

    Args:
        target: transformers' model, in float32.
        config: of a head with its layer named midlayer, or of an EAGLE-1 head.
        tensors: weights of the head, without an embedding.
        known: all tokens of the sequence; the target has not computed the last one.
        drafts: tokens of the target.
    """
    is_first = config["architectures"] == FIRST["architectures"]
    vocab_size, hidden = config["vocab_size"], target.config.num_hidden_layers
    table, logits_of = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    states = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    # The last of transformers' states is behind the final norm.
    taps = [hidden] if is_first else config["eagle_aux_hidden_state_layer_ids"]
    features = torch.cat([states[tap][0] for tap in taps], -1)
    targets = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else torch.arange(vocab_size)
    tokens, own, said = [*known[1:]], list[torch.Tensor](), list[torch.Tensor]()
    for draft in drafts:
        embedded = table[torch.tensor(tokens)]
        if is_first:
            entries = torch.cat([features, *(one[None] for one in own)])
            following, logits = first_reference(tensors, config, entries, embedded, logits_of)
        else:
            following, logits = reference(tensors, "midlayer", config, features, embedded, own)
        said.append(torch.full((vocab_size,), -torch.inf).index_copy(0, targets, logits[-1]))
        tokens, own = [*tokens, draft], [*own, following[-1]]
    return Chain(said, own[-1])


def make_head(
    folder: Path, method: str, sizes: dict[str, Any], changes: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Write a head of random weights, without an embedding; return its configuration and weights.

    Args:
        folder: of the files.
        method: "eagle3", whose head drafts 50 tokens by the states 0, 1 and 3, or "eagle".
        sizes: of the target.
        changes: more fields of EAGLE-3 heads.
    """
    if method == "eagle":
        config = FIRST | sizes | changes
        tensors = first_tensors(config, owns_embedding=False, bias=True)
    else:
        config = HEAD | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "draft_vocab_size": 50} | sizes | changes
        tensors = head_tensors(config, "midlayer", owns_embedding=False, states=3)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def _behind_layer(
    tensors: dict[str, torch.Tensor], layer: str, config: dict[str, Any], stream: torch.Tensor, read: torch.Tensor
) -> torch.Tensor:
    """Return the stream behind a decoder layer whose attention reads `read`."""
    attention = f"{layer}.self_attn"
    q, k, v = (
        functional.linear(read, tensors[f"{layer}.self_attn.{name}_proj.weight"])
        .unflatten(-1, (-1, config["head_dim"]))
        .transpose(0, 1)
        for name in "qkv"
    )
    attended = functional.scaled_dot_product_attention(
        rotated(q), rotated(k).repeat_interleave(len(q) // len(k), 0), v.repeat_interleave(len(q) // len(v), 0),
        is_causal=True, scale=1 / math.sqrt(config["head_dim"]),
    )  # fmt: skip
    stream = stream + functional.linear(attended.transpose(0, 1).flatten(1), tensors[f"{attention}.o_proj.weight"])
    rows = norm(stream, tensors[f"{layer}.post_attention_layernorm.weight"])
    gates, ups = (functional.linear(rows, tensors[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return stream + functional.linear(functional.silu(gates) * ups, tensors[f"{layer}.mlp.down_proj.weight"])
