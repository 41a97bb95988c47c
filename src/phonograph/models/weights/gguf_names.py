"""Names of tensors in GGUF files, and the names of the same tensors in transformers' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
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
_WITH_BOTH_NORMS = frozenset({"gemma3"})
FUSED: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}
"""Fused matrix of each part."""
PARTS = frozenset({*FUSED, "o_proj", "down_proj"})
"""Projections of a layer."""


def hugging_face_name(name: str, architecture: str) -> str:
    """Return the name in transformers' checkpoints; a name that is not known is returned as it is."""
    match, inside = _LAYER.fullmatch(name), _inside(architecture)
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
    part, _, end = rest.rpartition(".")
    return f"blk.{layer}.{inside[part]}.{end}"


def _inside(architecture: str) -> Mapping[str, str]:
    return {**_INSIDE, **_BOTH_NORMS} if architecture in _WITH_BOTH_NORMS else _INSIDE
