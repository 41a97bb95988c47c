"""Names of tensors in GGUF files, and the names of the same tensors in transformers' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"blk\.(\d+)\.(?:(\w+)\.(weight|bias)|ssm_a)")
_OUTSIDE: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BOTH_NORMS: Mapping[str, str] = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms of architectures with norms on both sides."""
_OF_STATES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "gemma3": _BOTH_NORMS,
    "qwen35": _OF_STATES,
    "qwen35moe": _OF_STATES,
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""Names of single architectures."""
_WHOLE: Mapping[str, str] = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "attn_sinks.weight": "self_attn.sinks",
}
"""Names of tensors of a layer that have other ends in checkpoints."""
FUSED: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "gates"),
}
"""Fused matrix of each part."""
PARTS = frozenset({*FUSED, "o_proj", "out_proj", "down_proj"})
"""Projections of a layer."""


def hugging_face_name(name: str, architecture: str) -> str:
    """Return the name in transformers' checkpoints; a name that is not known is returned as it is."""
    match, inside = _LAYER.fullmatch(name), _inside(architecture)
    whole = None if match is None else _WHOLE.get(name.removeprefix(f"blk.{match[1]}."))
    if match is not None and whole is not None:
        return f"model.layers.{match[1]}.{whole}"
    if match is None or match[2] not in inside:
        return _OUTSIDE.get(name, name)
    return f"model.layers.{match[1]}.{inside[match[2]]}.{match[3]}"


def gguf_name(name: str, architecture: str) -> str:
    """Return the name in GGUF files of a tensor of transformers' checkpoints."""
    outside = {theirs: own for own, theirs in _OUTSIDE.items()}
    if name in outside:
        return outside[name]
    inside = {theirs: own for own, theirs in _inside(architecture).items()}
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    whole = {theirs: own for own, theirs in _WHOLE.items()}.get(rest)
    if whole is not None:
        return f"blk.{layer}.{whole}"
    part, _, end = rest.rpartition(".")
    return f"blk.{layer}.{inside[part]}.{end}"


def _inside(architecture: str) -> Mapping[str, str]:
    return {**_INSIDE, **_OWN.get(architecture, {})}
