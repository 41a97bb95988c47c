"""LFM2, dense and with experts: most layers are short convolutions, the others attention.

Files name norms and projections in their own way, and a choice of experts is as in GLM-4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from phonograph.errors import ModelError
from phonograph.kernels.routing import Routing
from phonograph.models.config_fields import (
    COMMON,
    COUNT,
    EPSILON,
    FLAG,
    FULL,
    INT,
    INTS,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    TAPS,
    TENSORS,
    TEXTS,
    UNREAD,
    Field,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, layer_sizes
from phonograph.models.families.hybrids.layer_kinds import check_kinds
from phonograph.models.layer_spec import LayerAttention, LayerFeedForward, LayerSpec, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.layers.layer_matrix import MatrixPart
from phonograph.models.layers.states.short_conv import short_conv
from phonograph.models.rope_parameters import RopeParameters, read_rope

_CONV = "conv"
"""Layers with a short convolution, in layer_types."""
_NAMES = ExpertNames("feed_forward", gate="w1", up="w3", down="w2")


def _types(settings: Settings) -> list[str]:
    """Return the kind of each layer.

    Raises:
        UnsupportedModelError: there are other kinds, or no attention.
    """
    count, types = settings["num_hidden_layers"], cast("list[str] | None", settings["layer_types"])
    indices = cast("list[int] | None", settings.get("full_attn_idxs"))
    if types is None:
        types = [FULL if indices is None or layer in indices else _CONV for layer in range(count)]
    check_kinds(types, _CONV, count)
    return types


def _ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    rope = read_rope(settings)
    return [rope if kind == FULL else None for kind in _types(settings)]


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return the layers with dense feed-forwards. Projections have the names of the file, as weight formats do."""
    hidden_size, size = settings["hidden_size"], settings["intermediate_size"]
    layer = decoder_layer(layer_sizes({**settings, "hidden_act": "silu"}), head_norms=True)
    attention, dense = layer.mixer, layer.feed_forward
    assert isinstance(attention, LayerAttention) and isinstance(dense, LayerFeedForward)
    output = replace(attention.output, parts=(MatrixPart("out_proj", hidden_size),))
    parts = MatrixPart(_NAMES.gate, size), MatrixPart(_NAMES.up, size)
    gate_up = replace(dense.gate_up, module=_NAMES.module, parts=parts)
    down = replace(dense.down, module=_NAMES.module, parts=(MatrixPart(_NAMES.down, hidden_size),))
    layer = LayerSpec(replace(attention, output=output), replace(dense, gate_up=gate_up, down=down))
    taps, bias = settings["conv_L_cache"], settings["conv_bias"]
    convolution = replace(layer, mixer=short_conv(hidden_size, taps=taps, bias=bias))
    return tuple(convolution if kind == _CONV else layer for kind in _types(settings))


def _dense(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return layers whose feed-forward has the size in the file, or two thirds of it rounded up to a multiple."""
    size = settings["block_ff_dim"] or settings["intermediate_size"]
    if settings["block_auto_adjust_ff_dim"]:
        multiple = settings["block_multiple_of"]
        size = int(settings["block_ffn_dim_multiplier"] * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return _layers({**settings, "intermediate_size": size})


def _sparse(settings: Settings) -> tuple[LayerSpec, ...]:
    num_experts, top_k = settings["num_experts"], settings["num_experts_per_tok"]
    if top_k > num_experts:
        raise ModelError(f"num_experts_per_tok={top_k} must be at most num_experts={num_experts}")
    routing = Routing(
        num_experts,
        top_k,
        sigmoid=True,
        renormalised=settings["norm_topk_prob"],
        scale=settings["routed_scaling_factor"],
    )
    size, biased = settings["moe_intermediate_size"], settings["use_expert_bias"]
    return tuple(
        layer
        if index < settings["num_dense_layers"]
        else with_experts(layer, routing, size, names=_NAMES, choice_bias=biased)
        for index, layer in enumerate(_layers(settings))
    )


_FIELDS = {
    **{name: field for name, field in COMMON.items() if name != "hidden_act"},
    "vocab_size": Field(65536, POSITIVE_INT),
    "num_key_value_heads": Field(8, POSITIVE_INT),
    "max_position_embeddings": Field(128000, POSITIVE_INT),
    "rms_norm_eps": Field(1e-5, EPSILON),
    "tie_word_embeddings": Field(True, FLAG),
    "rope_theta": Field(1000000.0, COMMON["rope_theta"].kind),
    "pad_token_id": Field(0, INT.or_null()),
    "bos_token_id": Field(1, INT.or_null()),
    "eos_token_id": Field(2, COMMON["eos_token_id"].kind),
    "conv_bias": Field(False, FLAG),
    "conv_L_cache": Field(3, TAPS),
    "layer_types": Field(None, TEXTS.or_null()),
}
_ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
_RENAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.expert_bias$", ".feed_forward.gate.e_score_correction_bias"),
)
_UNREAD = dict.fromkeys(
    (
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
        "use_pos_enc",
    ),
    UNREAD,
)
"""Fields of published files that transformers leaves out as well."""

LFM2 = Family(
    model_type="lfm2",
    fields={
        **_FIELDS,
        "hidden_size": Field(2560, POSITIVE_INT),
        "intermediate_size": Field(12288, POSITIVE_INT),
        "block_ff_dim": Field(None, POSITIVE_INT.or_null()),
        "block_auto_adjust_ff_dim": Field(True, FLAG),
        "block_ffn_dim_multiplier": Field(1.0, POSITIVE_NUMBER),
        "block_multiple_of": Field(256, POSITIVE_INT),
        "full_attn_idxs": Field(None, INTS.or_null()),
    },
    ignored={**_UNREAD, "mlp_bias": TENSORS},
    layers=_dense,
    ropes=_ropes,
    aliases=_ALIASES,
    renames=_RENAMES,
)
LFM2_MOE = Family(
    model_type="lfm2_moe",
    fields={
        **_FIELDS,
        "hidden_size": Field(2048, POSITIVE_INT),
        "intermediate_size": Field(7168, POSITIVE_INT),
        "moe_intermediate_size": Field(1792, POSITIVE_INT),
        "num_dense_layers": Field(2, COUNT),
        "num_experts": Field(32, POSITIVE_INT),
        "num_experts_per_tok": Field(4, POSITIVE_INT),
        "use_expert_bias": Field(True, FLAG),
        "routed_scaling_factor": Field(1.0, POSITIVE_NUMBER),
        "norm_topk_prob": Field(True, FLAG),
    },
    ignored={**EXPERT_LOSS, **_UNREAD, "mlp_bias": TENSORS},
    layers=_sparse,
    ropes=_ropes,
    aliases=_ALIASES,
    renames=_RENAMES,
)
