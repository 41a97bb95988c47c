"""Tiny random checkpoints of every supported family, in the transformers format, with the model that wrote them.

Weights are drawn so that every one of them matters (norms are not 1, biases not 0) and the logits have a standard
deviation of about 2, so that the two most likely tokens are rarely close.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kernel_sets import bind_torch
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from phonograph.models.spec import ModelSpec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import begin_loading

VOCAB_SIZE = 211
LOGITS_STD = 2.0

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}
GRANITE = {
    "num_key_value_heads": 2,
    "attention_multiplier": 0.4,
    "embedding_multiplier": 7.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}
GRANITE_HYBRID = {
    **GRANITE,
    "shared_intermediate_size": 40,
    "layer_types": ["full_attention", "full_attention"],
    "mamba_n_heads": 8,
}
GEMMA = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True, "pad_token_id": None}
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    # Many query heads as KV heads, as Llama 2.
    "llama2": (LlamaConfig, LlamaForCausalLM, {"rms_norm_eps": 1e-5}),
    # Grouped heads, and a rotary scaling that the tests' lengths reach.
    "llama3": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE}),
    # Every bias, tied, an odd ratio of heads.
    "llama_bias": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    # Heads that are larger than their share of the hidden size, all on one KV head.
    "llama_head": (
        LlamaConfig,
        LlamaForCausalLM,
        {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 26},
    ),
    # A window shorter than the sequences.
    "mistral": (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 9}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2}),
    # A window on the upper layers only.
    "qwen2_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    # Fused names, and half of each head rotated.
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {"num_key_value_heads": 2, "pad_token_id": None, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, GRANITE),
    # Dense, with gates and ups in one tensor.
    "granite4": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {**GRANITE_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
    ),
    # A layer without rope between two with it, and a window on that layer.
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "pad_token_id": None,
            "rope_parameters": ROPE,
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"num_key_value_heads": 2, "rope_parameters": ROPE}),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 9,
            "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    # Queries are scaled from the 16th position on.
    "ministral3": (
        Ministral3Config,
        Ministral3ForCausalLM,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pad_token_id": None,
            "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.3},
        },
    ),
    "gemma": (GemmaConfig, GemmaForCausalLM, {**GEMMA, "head_dim": 32}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            # Other implementations of attention leave the cap out.
            "attn_implementation": "eager",
        },
    ),
    # Linear scaling of the layers with full attention alone.
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    # Wider heads in the full layers, on fewer KV heads; their values are their keys.
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **GEMMA,
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
    ),
    # Values of their own everywhere, biases, and ropes of whole heads.
    "gemma4_values": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **GEMMA,
            **GEMMA4,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    # The last three of six layers read the keys of others, in wider feed-forwards; embeddings in each layer.
    "gemma4_shared": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **GEMMA,
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE + 2,
        },
    ),
}

EXPERT_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    # Each second layer has experts; a shared expert with a gate; weights are not renormalised.
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_key_value_heads": 2,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    # More experts than most steps have tokens; the first layer is dense.
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
            "moe_intermediate_size": 20,
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    # Names of their own, a window, one expert a token.
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_key_value_heads": 2, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "olmoe": (
        OlmoeConfig,
        OlmoeForCausalLM,
        {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
    # All experts of a layer in one tensor.
    "granitemoe": (
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        {**GRANITE, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "granitemoeshared": (
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        {
            **GRANITE,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    # Without rotary embedding.
    "granite4_moe": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {**GRANITE_HYBRID, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    # Groups, a bias for the choice, a shared expert without a gate, half of each head rotated.
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    # Experts beside the dense feed-forward; heads as in the dense model.
    "gemma4_moe": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **GEMMA,
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "moe_intermediate_size": 24,
            "num_experts": 7,
            "top_k_experts": 3,
        },
    ),
    # Sinks, a window on every other layer, biases everywhere, tensors of all experts together.
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "pad_token_id": None,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
}
"""Families with experts. Of random seeds, some have two logits of a router that differ by rounding only."""


_DELTA: dict[str, Any] = {
    # Outputs of heads may be near 0, and their norm then multiplies errors of rounding.
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 2048,
}
_DELTA_EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
_LFM: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "conv", "full_attention"],
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
_MAMBA: dict[str, Any] = {
    # Outputs of heads may be near 0, and their norm then multiplies errors of rounding.
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "pad_token_id": None,
}
_FALCON: dict[str, Any] = {
    **_MAMBA,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_rms_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "projectors_bias": True,
    "mamba_proj_bias": True,
    "attention_in_multiplier": 0.75,
    "attention_out_multiplier": 1.25,
    "key_multiplier": 1.5,
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.9, 1.7],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
}
DELTA_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    # The columns of projections are in the order of heads; the second layer is dense.
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**_DELTA, "linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**_DELTA, **_DELTA_EXPERTS}),
}
STATE_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    **DELTA_FAMILIES,
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, {**_LFM, "conv_bias": True, "block_multiple_of": 8}),
    # The first two layers are dense.
    "lfm2_moe": (
        Lfm2MoeConfig,
        Lfm2MoeForCausalLM,
        {**_LFM, "conv_L_cache": 4, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    # Attention and Mamba 2 in each layer, and factors that differ from one another.
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, _FALCON),
    "bamba": (BambaConfig, BambaForCausalLM, {**_MAMBA, "attn_layer_indices": [3], "mamba_proj_bias": True}),
    # Without rotary embedding.
    "granite4_h": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            **GRANITE_HYBRID,
            **_MAMBA,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mamba_conv_bias": False,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    # Layers of one part each; attention has no rotary embedding, and feed-forwards have no gates.
    "nemotron_h": (
        NemotronHConfig,
        NemotronHForCausalLM,
        {
            "layer_norm_epsilon": 1e-3,
            "layers_block_type": [*["linear_attention"] * 3, "full_attention", "mlp", "moe"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "mlp_bias": True,
            "use_bias": True,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 8,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
}
"""Families with state layers; see `FAMILIES`. The first three layers have a state, and the last one attention."""


def make_checkpoint(
    family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> PreTrainedModel:
    """Write a checkpoint of `family` to `folder` and return transformers' model of it: float32, in eval mode.

    `overrides` are settings of its configuration; `max_shard_size` splits the file, as in save_pretrained.
    """
    config_class, model_class, settings = (FAMILIES | EXPERT_FAMILIES | STATE_FAMILIES)[family]
    config = config_class(**{**COMMON, **settings, **overrides})
    model = model_class(config).to(torch.float32).eval()
    draw_weights(model, family, config.hidden_size, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def draw_weights(model: PreTrainedModel, family: str, hidden_size: int, seed: int) -> None:
    """Draw the weights of a model; other parts than the decoder get some too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5, generator=generator)
                has_offset = ("gemma" in family and "gemma4" not in family) or family in DELTA_FAMILIES
                if has_offset and "linear_attn.norm" not in name:
                    parameter.sub_(1.0)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 2.0, generator=generator)
            elif name.endswith("gate_up_proj") and family == "gpt_oss":
                # Many gates and ups are beyond their limits.
                parameter.normal_(0.0, 5 * hidden_size**-0.5, generator=generator)
            elif name.endswith("down_proj") and family == "gpt_oss":
                parameter.normal_(0.0, 0.1 * parameter.shape[1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, LOGITS_STD * hidden_size**-0.5, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)


def load_model(spec: ModelSpec, folder: Path, *, max_positions: int | None = None, **settings: Any) -> Transformer:
    """Return a model on torch's operators with all of its weights, by the settings of `begin_loading`."""
    with begin_loading(spec, folder, **settings) as loading:
        loading.finish()
        return bind_torch(loading.model, max_positions)


@contextmanager
def without_norms(folder: Path) -> Generator[None]:
    """Take the norms out of a checkpoint's file until the end of the block."""
    path = folder / "model.safetensors"
    whole = load_file(path)
    save_file({name: tensor for name, tensor in whole.items() if "norm" not in name}, path)
    yield
    save_file(whole, path)
