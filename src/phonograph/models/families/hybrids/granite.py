"""Granite 3 and 4: Llama with factors of embeddings, scores, layers and logits; most layers of Granite 4 are Mamba 2.

Models with experts have all experts of a layer in one tensor. Granite 4 has a shared feed-forward next to the experts,
or in place of them, and may do without a rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    COUNT,
    FLAG,
    FULL,
    INT,
    NUMBER,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    TENSORS,
    TEXT,
    TEXTS,
    TRAINING,
    Field,
    FieldKind,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, layer_sizes, softmax_routing
from phonograph.models.families.hybrids.bamba import CHUNK, MAMBA_FIELDS, mamba_of
from phonograph.models.layer_spec import Factors, LayerFeedForward, LayerSpec, MatrixPart, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.rope_parameters import RopeParameters, read_rope
from phonograph.models.weights.expert_tensors import ExpertTensors

_NAMES = ExpertNames(
    "block_sparse_moe", "router.layer", experts="", gate="input_linear", down="output_linear", shared=None
)
_ATTENTION, _MAMBA = (FULL, "attention"), ("linear_attention", "mamba")
"""Names of layers in layer_types, today's and older ones."""


def _dense(settings: Settings) -> LayerSpec:
    bias = settings["attention_bias"]
    return decoder_layer(
        layer_sizes(settings),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=settings.get("mlp_bias", False),
        scale=settings["attention_multiplier"],
    )


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    return (_dense(settings),) * settings["num_hidden_layers"]


def _with_experts(settings: Settings, shared: LayerFeedForward | None) -> tuple[LayerSpec, ...]:
    routing, size = softmax_routing(settings, "num_local_experts", renormalised=True), settings["intermediate_size"]
    tensors = ExpertTensors(routing.num_experts)
    layer = with_experts(_dense(settings), routing, size, names=_NAMES, fused=(tensors, tensors), shared=shared)
    return (layer,) * settings["num_hidden_layers"]


def _shared(settings: Settings) -> LayerFeedForward:
    """Return the shared feed-forward, whose gates and ups are one tensor of a checkpoint."""
    size, dense = settings["shared_intermediate_size"], _dense(settings).feed_forward
    assert isinstance(dense, LayerFeedForward)
    gate_up, down = MatrixPart("input_linear", 2 * size), MatrixPart("output_linear", settings["hidden_size"])
    module = "shared_mlp"
    return replace(
        dense,
        gate_up=replace(dense.gate_up, module=module, parts=(gate_up,)),
        down=replace(dense.down, module=module, parts=(down,), num_inputs=size),
    )


def _moe_shared(settings: Settings) -> tuple[LayerSpec, ...]:
    return _with_experts(settings, _shared(settings) if settings["shared_intermediate_size"] else None)


def _has_attention(settings: Settings) -> list[bool]:
    """Return True for each layer of Granite 4 with attention, and False for one with Mamba 2.

    Raises:
        UnsupportedModelError: there are other kinds, or no attention.
        ModelError: a layer has no kind.
    """
    types, count = cast("list[str] | None", settings["layer_types"]), settings["num_hidden_layers"]
    if types is None or not {*_ATTENTION, *_MAMBA} >= set(types) or not set(types) & {*_ATTENTION}:
        raise UnsupportedModelError(
            f"layer_types={shortened(repr(types))} must name {_MAMBA[1]} or {_ATTENTION[1]} for each layer, and "
            f"{_ATTENTION[1]} for one or more"
        )
    if len(types) != count:
        raise ModelError(f"layer_types={shortened(repr(types))} must have a type for each of {count} layers")
    return [kind in _ATTENTION for kind in types]


def _hybrid(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return the layers of Granite 4.

    Raises:
        ModelError: the numbers do not go together.
    """
    has_attention = _has_attention(settings)
    if settings["num_local_experts"]:
        if not settings["num_experts_per_tok"]:
            raise ModelError("num_experts_per_tok=0 must be positive, as num_local_experts is")
        attention, *_ = _with_experts(settings, _shared(settings))
    else:
        attention = replace(_dense(settings), feed_forward=_shared(settings))
    state = attention if all(has_attention) else replace(attention, mixer=mamba_of(settings))
    return tuple(attention if one else state for one in has_attention)


def _hybrid_ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    """Return ropes for position_embedding_type rope, and none for others."""
    rope = read_rope(settings) if settings["position_embedding_type"] == "rope" else None
    return [rope if one else None for one in _has_attention(settings)]


def _factors(settings: Settings) -> Factors:
    return Factors(
        embedding=settings["embedding_multiplier"],
        residual=settings["residual_multiplier"],
        logits=1 / settings["logits_scaling"],
    )


_FIELDS = {
    **COMMON,
    "bos_token_id": Field(1, INT.or_null()),
    "eos_token_id": Field(2, ANY),
    "attention_bias": Field(False, FLAG),
    "attention_multiplier": Field(1.0, NUMBER),
    "embedding_multiplier": Field(1.0, NUMBER),
    "residual_multiplier": Field(1.0, NUMBER),
    "logits_scaling": Field(1.0, POSITIVE_NUMBER),
}
_EXPERT_FIELDS = {
    **_FIELDS,
    "num_local_experts": Field(8, POSITIVE_INT),
    "num_experts_per_tok": Field(2, POSITIVE_INT),
}
_RMSNORM = FieldKind("rmsnorm or null", lambda value: value in ("rmsnorm", None))

GRANITE = Family(
    model_type="granite",
    fields={**_FIELDS, "mlp_bias": Field(False, FLAG)},
    layers=_layers,
    factors=_factors,
)
GRANITE_MOE = Family(
    model_type="granitemoe",
    fields=_EXPERT_FIELDS,
    ignored={**EXPERT_LOSS, "mlp_bias": TENSORS},
    layers=lambda settings: _with_experts(settings, None),
    factors=_factors,
)
GRANITE_MOE_SHARED = Family(
    model_type="granitemoeshared",
    fields={**_EXPERT_FIELDS, "shared_intermediate_size": Field(0, COUNT)},
    ignored={**EXPERT_LOSS, "mlp_bias": TENSORS},
    layers=_moe_shared,
    factors=_factors,
)
GRANITE_MOE_HYBRID = Family(
    model_type="granitemoehybrid",
    fields={
        **_FIELDS,
        **MAMBA_FIELDS,
        "num_local_experts": Field(8, COUNT),
        "num_experts_per_tok": Field(2, COUNT),
        "shared_intermediate_size": Field(1024, POSITIVE_INT),
        "position_embedding_type": Field(None, TEXT.or_null()),
        "layer_types": Field(None, TEXTS.or_null()),
        "normalization_function": Field(None, _RMSNORM),
    },
    ignored={
        **EXPERT_LOSS,
        "mlp_bias": TENSORS,
        "init_method": TRAINING,
        **CHUNK,
    },
    layers=_hybrid,
    ropes=_hybrid_ropes,
    factors=_factors,
)
