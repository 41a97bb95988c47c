"""GLM-4.5, 4.6 and 4.7: sigmoid routing with a correction bias, a shared expert, and dense first layers.

Layers for multi-token prediction, which follow the last one in a checkpoint, are not run.
"""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.errors import ModelError
from phonograph.kernels.routing import Routing
from phonograph.models.config_fields import (
    COMMON,
    COUNT,
    FLAG,
    INT,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    TENSORS,
    Field,
)
from phonograph.models.families.family import EXPERT_LOSS, Family, Settings, layer_sizes
from phonograph.models.layer_spec import LayerFeedForward, LayerSpec, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.rope_parameters import PARTIAL, RopeParameters, read_rope

_SHARE = 0.5
_NAMES = ExpertNames(shared="shared_experts")


def group_routing(settings: Settings) -> Routing:
    """Return the sigmoid of the logits, in groups.

    Raises:
        ModelError: the numbers do not go together.
    """
    name = "n_routed_experts" if settings["num_local_experts"] is None else "num_local_experts"
    num_experts, top_k = settings[name], settings["num_experts_per_tok"]
    num_groups, top_groups = settings["n_group"], settings["topk_group"]
    if num_experts % num_groups or num_experts // num_groups < 2 <= num_groups:
        raise ModelError(f"n_group={num_groups} must divide {name}={num_experts} into groups of two or more")
    if top_groups > num_groups:
        raise ModelError(f"topk_group={top_groups} must be at most n_group={num_groups}")
    if top_k > num_experts // num_groups * top_groups:
        raise ModelError(
            f"num_experts_per_tok={top_k} must be at most the {num_experts // num_groups * top_groups} experts of "
            f"topk_group={top_groups} of {num_groups} groups of {name}={num_experts}"
        )
    return Routing(
        num_experts,
        top_k,
        sigmoid=True,
        renormalised=settings["norm_topk_prob"],
        scale=settings["routed_scaling_factor"],
        num_groups=num_groups,
        top_groups=top_groups,
    )


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes, routing, inner = layer_sizes(settings), group_routing(settings), settings["moe_intermediate_size"]
    shared_size = inner * settings["n_shared_experts"]
    dense = decoder_layer(sizes, qkv_bias=settings["attention_bias"], head_norms=settings["use_qk_norm"])
    shared = decoder_layer(sizes._replace(intermediate_size=shared_size)).feed_forward if shared_size else None
    assert shared is None or isinstance(shared, LayerFeedForward)
    sparse = with_experts(dense, routing, inner, names=_NAMES, shared=shared, choice_bias=True)
    first = min(settings["first_k_dense_replace"], settings["num_hidden_layers"])
    return (dense,) * first + (sparse,) * (settings["num_hidden_layers"] - first)


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    """Return ropes of half of each head, if the file gives no other share."""
    share = settings["partial_rotary_factor"] or _SHARE
    return (read_rope({**settings, "partial_rotary_factor": share}),) * settings["num_hidden_layers"]


def _later_layers(settings: Settings) -> tuple[str, ...]:
    count = settings["num_nextn_predict_layers"]
    count = settings["num_mtp_layers"] if count is None else count
    return tuple(f"model.layers.{settings['num_hidden_layers'] + extra}." for extra in range(count or 0))


GLM4_MOE = Family(
    model_type="glm4_moe",
    fields={
        **COMMON,
        "vocab_size": Field(151552, POSITIVE_INT),
        "intermediate_size": Field(10944, POSITIVE_INT),
        "num_hidden_layers": Field(46, COMMON["num_hidden_layers"].kind),
        "num_attention_heads": Field(96, POSITIVE_INT),
        "num_key_value_heads": Field(8, POSITIVE_INT),
        "max_position_embeddings": Field(131072, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
        "attention_bias": Field(False, FLAG),
        "use_qk_norm": Field(False, FLAG),
        "partial_rotary_factor": PARTIAL,
        "moe_intermediate_size": Field(1408, POSITIVE_INT),
        "num_experts_per_tok": Field(8, POSITIVE_INT),
        "n_shared_experts": Field(1, COUNT),
        "n_routed_experts": Field(128, POSITIVE_INT),
        "num_local_experts": Field(None, POSITIVE_INT.or_null()),
        "routed_scaling_factor": Field(1.0, POSITIVE_NUMBER),
        "n_group": Field(1, POSITIVE_INT),
        "topk_group": Field(1, POSITIVE_INT),
        "first_k_dense_replace": Field(1, COUNT),
        "norm_topk_prob": Field(True, FLAG),
        "num_nextn_predict_layers": Field(None, INT.or_null()),
        "num_mtp_layers": Field(1, INT.or_null()),
    },
    ignored={**EXPERT_LOSS, "mlp_bias": TENSORS},
    layers=_layers,
    ropes=_ropes,
    skipped=_later_layers,
)
