"""Fields of config.json of Gemma 4, which has its text model in a wrapper."""

from __future__ import annotations

from typing import Any

ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}


def _gemma4(num_layers: int, every: int, *, sound: bool = False, **fields: Any) -> dict[str, Any]:
    """Return a configuration whose layers of each `every`-th place have full attention."""
    kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "expert_intermediate_size": None,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": ROPES,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        **fields,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": {"model_type": "gemma4_audio"} if sound else None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "text_config": text,
        "tie_word_embeddings": True,
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    }


DENSE = _gemma4(
    60,
    6,
    attention_k_eq_v=True,
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_global_key_value_heads=4,
    num_key_value_heads=16,
)
EXPERTS = _gemma4(
    30,
    6,
    attention_k_eq_v=True,
    enable_moe_block=True,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_attention_heads=16,
    num_experts=128,
    num_global_key_value_heads=2,
    num_key_value_heads=8,
    top_k_experts=8,
)
SMALL = _gemma4(
    35,
    5,
    sound=True,
    hidden_size=1536,
    hidden_size_per_layer_input=256,
    intermediate_size=6144,
    max_position_embeddings=131072,
    num_attention_heads=8,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    sliding_window=512,
    use_bidirectional_attention=None,
    use_double_wide_mlp=True,
)
