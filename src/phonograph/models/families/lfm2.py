"""LFM2, dense and with experts: most layers are short convolutions, the others attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.kernels.routing import Routing
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    COUNT,
    FLAG,
    FULL,
    INT,
    INTS,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    TEXTS,
    UNREAD,
    Field,
    FieldKind,
)
from phonograph.models.families.family import Family, Settings, layer_sizes
from phonograph.models.layer_spec import LayerAttention, LayerFeedForward, LayerSpec, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.layers.layer_matrix import MatrixPart
from phonograph.models.layers.states.short_convolution import short_convolution
from phonograph.models.rope_parameters import RopeParameters, read_rope

_CONV = "conv"
"""Layers with a short convolution, in layer_types."""
_NORM, _MODULE = "operator_norm", "feed_forward"
_EXPERTS = ExpertNames(_MODULE, gate="w1", up="w3", down="w2")


def _types(settings: Settings) -> list[str]:
    """Return the kind of each layer.

    Raises:
        UnsupportedModelError: there are other kinds, or no attention.
    """
    count, types = settings["num_hidden_layers"], cast("list[str] | None", settings["layer_types"])
    if types is None:
        attending = cast("list[int] | None", settings.get("full_attn_idxs"))
        types = [FULL if attending is None or layer in attending else _CONV for layer in range(count)]
    if len(types) != count or not {_CONV, FULL} >= set(types) or FULL not in types:
        raise UnsupportedModelError(
            f"layer_types={shortened(repr(types))} must name {_CONV} or {FULL} for each of {count} layers, and {FULL} "
            "for one or more"
        )
    return types


def _ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    rope = read_rope(settings)
    return [rope if kind == FULL else None for kind in _types(settings)]


def _layers(settings: Settings, intermediate_size: int) -> list[LayerSpec]:
    """Return the layers with dense feed-forwards."""
    sizes = layer_sizes(settings)._replace(intermediate_size=intermediate_size)
    layer = decoder_layer(sizes, head_norms=True, attention_norms=(_NORM, None), feed_forward_norms=("ffn_norm", None))
    mixer, dense = layer.mixer, layer.feed_forward
    assert isinstance(mixer, LayerAttention) and isinstance(dense, LayerFeedForward)
    parts = tuple(MatrixPart(name, intermediate_size) for name in ("w1", "w3"))
    down = MatrixPart("w2", settings["hidden_size"])
    dense = replace(
        dense,
        gate_up=replace(dense.gate_up, module=_MODULE, parts=parts),
        down=replace(dense.down, module=_MODULE, parts=(down,)),
    )
    output = replace(mixer.output, parts=(MatrixPart("out_proj", settings["hidden_size"]),))
    conv = short_convolution(settings["hidden_size"], taps=settings["conv_L_cache"], input_norm=_NORM)
    mixers = {FULL: replace(mixer, output=output), _CONV: conv}
    kinds = {kind: replace(layer, mixer=one, feed_forward=dense) for kind, one in mixers.items()}
    return [kinds[kind] for kind in _types(settings)]


def _lfm2(settings: Settings) -> tuple[LayerSpec, ...]:
    size = settings["block_ff_dim"] or settings["intermediate_size"]
    if settings["block_auto_adjust_ff_dim"]:
        size, factor, step = int(2 * size / 3), settings["block_ffn_dim_multiplier"], settings["block_multiple_of"]
        if factor is not None:
            size = -(-int(factor * size) // step) * step
    return tuple(_layers(settings, size))


def _lfm2_moe(settings: Settings) -> tuple[LayerSpec, ...]:
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
        with_experts(layer, routing, size, names=_EXPERTS, choice_bias=biased)
        if index >= settings["num_dense_layers"]
        else layer
        for index, layer in enumerate(_layers(settings, settings["intermediate_size"]))
    )


_NO_BIAS = FieldKind("false, as biases of this family are not supported", lambda value: value is False)
_TAPS = FieldKind("an integer of 2 or more", lambda value: type(value) is int and value > 1)
_FIELDS = {
    **COMMON,
    "vocab_size": Field(65536, POSITIVE_INT),
    "num_key_value_heads": Field(8, POSITIVE_INT),
    "max_position_embeddings": Field(128000, POSITIVE_INT),
    "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
    "tie_word_embeddings": Field(True, FLAG),
    "rope_theta": Field(1000000.0, POSITIVE_NUMBER.or_null()),
    "pad_token_id": Field(0, INT.or_null()),
    "bos_token_id": Field(1, INT.or_null()),
    "eos_token_id": Field(2, ANY),
    "layer_types": Field(None, TEXTS.or_null()),
    "conv_L_cache": Field(3, _TAPS),
    "conv_bias": Field(False, _NO_BIAS),
}
_ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
_RENAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.expert_bias$", ".feed_forward.gate.e_score_correction_bias"),
)
LFM2 = Family(
    model_type="lfm2",
    fields={
        **_FIELDS,
        "hidden_size": Field(2560, POSITIVE_INT),
        "intermediate_size": Field(12288, POSITIVE_INT),
        "block_ff_dim": Field(None, POSITIVE_INT.or_null()),
        "block_multiple_of": Field(256, POSITIVE_INT),
        "block_ffn_dim_multiplier": Field(1.0, POSITIVE_NUMBER.or_null()),
        "block_auto_adjust_ff_dim": Field(True, FLAG),
        "full_attn_idxs": Field(None, INTS.or_null()),
    },
    ignored=dict.fromkeys(
        (
            *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
            *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
            "use_pos_enc",
        ),
        UNREAD,
    ),
    layers=_lfm2,
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
        "norm_topk_prob": Field(True, FLAG),
        "routed_scaling_factor": Field(1.0, POSITIVE_NUMBER),
    },
    layers=_lfm2_moe,
    ropes=_ropes,
    aliases=_ALIASES,
    renames=_RENAMES,
)
