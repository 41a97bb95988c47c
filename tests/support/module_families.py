"""Tiny random checkpoints of families that have no file here, which modules of transformers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import VOCAB_SIZE, draw_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_HEADS = {"head_dim": 16}
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODULE_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "glm4": _HEADS,
    "cohere": {},
    "phi": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 9},
    "cohere2": {**_HEADS, **_WINDOWS},
    "olmo": {},
    "nemotron": _HEADS,
    "ernie4_5": _HEADS,
    "exaone4": _WINDOWS,
    "hunyuan_v1_dense": _HEADS,
    "apertus": {},
    "seed_oss": _HEADS,
    "arcee": _HEADS,
    "helium": _HEADS,
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "glm4_moe_lite": _LATENT,
    "dots1": {**_EXPERTS, **_HEADS, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "phimoe": {**_EXPERTS, "num_local_experts": 5, "intermediate_size": 40},
}
"""Settings of each family's configuration, by its model type."""


def make_module_checkpoint(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint to `folder` and return transformers' model of it: float32, in eval mode."""
    config = AutoConfig.for_model(family, **{**_COMMON, **MODULE_FAMILIES[family], **overrides})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    draw_weights(model, family, 64, 0)
    model.save_pretrained(folder)
    return model
