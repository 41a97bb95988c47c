"""Nemotron-H, Nemotron Nano 2 and 3: layers of one part each, which is Mamba 2, attention, a feed-forward or experts.

Feed-forwards and experts have no gates: their activation is the square of max(x, 0). Attention has no rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    COUNT,
    EPSILON,
    FLAG,
    FULL,
    INT,
    NULL,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    TAPS,
    TENSORS,
    TEXT,
    TEXTS,
    TRAINING,
    UNREAD,
    Field,
)
from phonograph.models.families.family import Family, Settings, layer_sizes
from phonograph.models.families.glm_moe import group_routing
from phonograph.models.families.hybrids.bamba import MAMBA_FIELDS
from phonograph.models.layer_spec import LayerFeedForward, LayerSpec, decoder_layer
from phonograph.models.layers.expert_spec import ExpertNames, with_experts
from phonograph.models.layers.layer_matrix import MatrixPart
from phonograph.models.layers.states.mamba_mixer import mamba_mixer
from phonograph.models.rope_parameters import RopeParameters

_MODULE, _NORMS = "mixer", ("norm", None)
_MAMBA, _DENSE, _EXPERTS = "linear_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": FULL, "-": _DENSE, "E": _EXPERTS}
"""Kinds of layers in hybrid_override_pattern."""
_OLD = {"mamba": _MAMBA, "attention": FULL}
"""Kinds in layers_block_type of older files."""
_NAMES = ExpertNames(_MODULE, gate="", up="up_proj", down="down_proj", shared="shared_experts")


def _kinds(settings: Settings) -> list[str]:
    """Return the kind of each layer.

    Raises:
        UnsupportedModelError: there are other kinds, or no attention.
    """
    types, pattern = cast("list[str] | None", settings["layers_block_type"]), settings["hybrid_override_pattern"]
    field, value = ("layers_block_type", types) if types is not None else ("hybrid_override_pattern", pattern)
    kinds = [_OLD.get(kind, kind) for kind in types or ()] or [_LETTERS.get(letter, "") for letter in pattern or ""]
    if not {*_LETTERS.values()} >= set(kinds) or FULL not in kinds:
        raise UnsupportedModelError(
            f"{field}={shortened(repr(value))} must name {_MAMBA} (M), {FULL} (*), {_DENSE} (-) or {_EXPERTS} (E) for "
            f"each layer, and {FULL} for one or more"
        )
    return kinds


def _ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    return (None,) * len(_kinds(settings))


def _ungated(settings: Settings, size: int) -> LayerFeedForward:
    """Return a feed-forward without gates."""
    sizes = layer_sizes(settings, ("relu2",), "mlp_hidden_act")._replace(intermediate_size=size)
    bias = settings["mlp_bias"]
    dense = decoder_layer(sizes, mlp_bias=bias, activation="relu2", feed_forward_norms=_NORMS).feed_forward
    assert isinstance(dense, LayerFeedForward)
    up = replace(dense.gate_up, name="up", module=_MODULE, parts=(MatrixPart("up_proj", size),), gated=False)
    return replace(dense, gate_up=up, down=replace(dense.down, module=_MODULE))


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return the layers.

    Raises:
        ModelError: the numbers do not go together.
    """
    kinds, heads, groups = _kinds(settings), settings["mamba_num_heads"], settings["n_groups"]
    if heads % groups:
        raise ModelError(f"mamba_num_heads={heads} must be a multiple of n_groups={groups}")
    mamba = mamba_mixer(
        MambaSizes(heads, settings["mamba_head_dim"], groups, settings["ssm_state_size"], groups),
        hidden_size=settings["hidden_size"],
        taps=settings["conv_kernel"],
        conv_bias=settings["use_conv_bias"],
        bias=settings["use_bias"],
        input_norm="norm",
    )
    projection, output = (replace(matrix, module=_MODULE) for matrix in mamba.matrices)
    sizes = layer_sizes(settings, ("relu2",), "mlp_hidden_act")
    attention = decoder_layer(sizes, attention_norms=_NORMS).attention
    qkv, attended = (replace(matrix, module=_MODULE) for matrix in attention.matrices)
    layers = {
        _MAMBA: LayerSpec(replace(mamba, projection=projection, output=output), None),
        FULL: LayerSpec(replace(attention, qkv=qkv, output=attended), None),
        _DENSE: LayerSpec(None, _ungated(settings, settings["intermediate_size"])),
    }
    if _EXPERTS in kinds:
        layers[_EXPERTS] = with_experts(
            layers[_DENSE],
            group_routing(settings),
            settings["moe_intermediate_size"],
            names=_NAMES,
            activation="relu2",
            shared=_ungated(settings, settings["moe_shared_expert_intermediate_size"]),
            choice_bias=True,
        )
    return tuple(layers[kind] for kind in kinds)


NEMOTRON_H = Family(
    model_type="nemotron_h",
    fields={
        **{name: field for name, field in COMMON.items() if name not in ("hidden_act", "num_hidden_layers")},
        "vocab_size": Field(131072, POSITIVE_INT),
        "intermediate_size": Field(21504, POSITIVE_INT),
        "num_key_value_heads": Field(8, POSITIVE_INT.or_null()),
        "head_dim": Field(128, POSITIVE_INT.or_null()),
        "max_position_embeddings": Field(4096, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, EPSILON),
        "pad_token_id": Field(0, INT.or_null()),
        "bos_token_id": Field(1, INT.or_null()),
        "eos_token_id": Field(2, ANY),
        "layers_block_type": Field(None, TEXTS.or_null()),
        "hybrid_override_pattern": Field(None, TEXT.or_null()),
        "mlp_hidden_act": Field("relu2", TEXT),
        "mlp_bias": Field(False, FLAG),
        "mamba_num_heads": Field(128, POSITIVE_INT),
        "mamba_head_dim": Field(64, POSITIVE_INT),
        "n_groups": Field(8, POSITIVE_INT),
        "ssm_state_size": Field(128, POSITIVE_INT),
        "conv_kernel": Field(4, TAPS),
        "use_conv_bias": Field(True, FLAG),
        "use_bias": Field(False, FLAG),
        "time_step_limit": MAMBA_FIELDS["time_step_limit"],
        "n_routed_experts": Field(8, POSITIVE_INT),
        "num_local_experts": Field(None, POSITIVE_INT.or_null()),
        "moe_intermediate_size": Field(7688, POSITIVE_INT),
        "moe_shared_expert_intermediate_size": Field(7688, POSITIVE_INT),
        # Experts of a projected input are not implemented.
        "moe_latent_size": Field(None, NULL),
        "num_experts_per_tok": Field(2, POSITIVE_INT),
        "routed_scaling_factor": Field(1.0, POSITIVE_NUMBER),
        "n_group": Field(1, POSITIVE_INT),
        "topk_group": Field(1, POSITIVE_INT),
        "norm_topk_prob": Field(True, FLAG),
        "num_nextn_predict_layers": Field(0, COUNT),
    },
    ignored={
        "num_hidden_layers": "layers, which the pattern has",
        "attention_bias": TENSORS,
        "chunk_size": "tokens of a chunk, which the result does not depend on",
        **dict.fromkeys(
            (
                *("expand", "mamba_hidden_act", "mamba_proj_bias", "mamba_ssm_cache_dtype", "mtp_layers_block_type"),
                *("moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "n_shared_experts", "norm_eps"),
                *("num_logits_to_keep", "residual_in_fp32", "sliding_window", "use_mamba_kernels"),
            ),
            UNREAD,
        ),
        **dict.fromkeys(
            ("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min"),
            TRAINING,
        ),
    },
    layers=_layers,
    ropes=_ropes,
    skipped=lambda _: ("mtp.",),
    aliases={"layer_norm_epsilon": "rms_norm_eps", "layer_types": "layers_block_type"},
    renames=(
        (r"^backbone\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"\.mixer\.(conv1d\.weight|conv1d\.bias|A_log|D|dt_bias|norm\.weight)$", r".mamba.\1"),
    ),
)
