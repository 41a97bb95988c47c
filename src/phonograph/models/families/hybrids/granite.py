"""Granite 3 and 4 without layers that have a state: Llama with factors of embeddings, scores, layers and logits.

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
from phonograph.models.layer_spec import Factors, LayerFeedForward, LayerSpec, MatrixPart, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.rope_parameters import RopeParameters, read_rope
from phonograph.models.weights.expert_tensors import ExpertTensors

_NAMES = ExpertNames(
    "block_sparse_moe", "router.layer", experts="", gate="input_linear", down="output_linear", shared=None
)
_ATTENTION = (FULL, "attention")
"""Names of layers without a state in layer_types, today's and an older one."""


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


def _hybrid(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return the layers of Granite 4.

    Raises:
        UnsupportedModelError: a layer has a state.
        ModelError: the numbers do not go together.
    """
    types, count = cast("list[str] | None", settings["layer_types"]), settings["num_hidden_layers"]
    if types is None or not set(types) <= {*_ATTENTION}:
        raise UnsupportedModelError(
            f"layer_types={shortened(repr(types))} has layers with a state (Mamba), which are not implemented; models "
            "of this architecture are supported if each layer is an attention layer"
        )
    if len(types) != count:
        raise ModelError(f"layer_types={shortened(repr(types))} must have a type for each of {count} layers")
    if settings["num_local_experts"]:
        if not settings["num_experts_per_tok"]:
            raise ModelError("num_experts_per_tok=0 must be positive, as num_local_experts is")
        return _with_experts(settings, _shared(settings))
    return (replace(_dense(settings), feed_forward=_shared(settings)),) * count


def _hybrid_ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    """Return ropes for position_embedding_type rope, and none for others."""
    rope = read_rope(settings) if settings["position_embedding_type"] == "rope" else None
    return (rope,) * settings["num_hidden_layers"]


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
_STATE = "for layers with a state, which the model does not have"
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
        "time_step_limit": _STATE,
        **dict.fromkeys(
            (
                *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
                *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"),
            ),
            _STATE,
        ),
    },
    layers=_hybrid,
    ropes=_hybrid_ropes,
    factors=_factors,
)
