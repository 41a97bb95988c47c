"""Falcon-H1: each layer has attention and Mamba 2, which read the same rows, and factors at many places.

The factors are folded into weights and biases when these are loaded, as each of them is at the rows of a projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from phonograph.models.config_fields import (
    FLAG,
    NUMBER,
    POSITIVE_INT,
    UNREAD,
    Field,
    FieldKind,
    is_number,
)
from phonograph.models.families.family import Family, Settings, TensorFactors
from phonograph.models.families.hybrids.bamba import CHUNK, DECODER_FIELDS, NORM_NAMES, attention_layer, mamba_of
from phonograph.models.layer_spec import Factors, LayerSpec
from phonograph.models.layers.states.mamba_mixer import MambaMixer

_MULTIPLIERS = "embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"


def _numbers(count: int) -> FieldKind:
    def accepts(value: object) -> bool:
        return isinstance(value, list) and [is_number(one) for one in cast("list[object]", value)] == [True] * count

    return FieldKind(f"null or a list of {count} numbers", lambda value: value is None or accepts(value))


def _mixer(settings: Settings) -> MambaMixer:
    """Return the mixer beside the attention, which has the norm of both.

    Raises:
        ModelError: the numbers do not go together.
    """
    normed = settings["mamba_rms_norm"]
    return replace(
        mamba_of(
            settings,
            norm_groups=settings["mamba_n_groups"] if normed else 0,
            gates_last=normed and settings["mamba_norm_before_gate"],
        ),
        input_norm=None,
    )


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    layer = replace(attention_layer(settings), beside=_mixer(settings))
    return (layer,) * settings["num_hidden_layers"]


def _tensor_factors(settings: Settings) -> TensorFactors:
    """Return the factors of the rows of weights and biases. Those of an input multiply weights alone."""
    layer = _layers(settings)[0]
    outputs = {name: part.num_outputs for name, part, _ in layer.modules()}
    gate, down = settings["mlp_multipliers"] or (1.0, 1.0)
    columns, of_input = settings["ssm_multipliers"] or (1.0,) * 5, settings["attention_in_multiplier"]
    by_name: dict[str, tuple[float, float]] = {
        "self_attn.q_proj": (of_input, 1.0),
        "self_attn.k_proj": (of_input, settings["key_multiplier"]),
        "self_attn.v_proj": (of_input, 1.0),
        "self_attn.o_proj": (1.0, settings["attention_out_multiplier"]),
        "mamba.out_proj": (1.0, settings["ssm_out_multiplier"]),
        "feed_forward.gate_proj": (1.0, gate),
        "feed_forward.down_proj": (1.0, down),
    }
    found: dict[str, tuple[tuple[tuple[int, float], ...], float]] = {
        name: (((outputs[name], of_output),), factor) for name, (factor, of_output) in by_name.items()
    }
    sizes = _mixer(settings).sizes
    keys = sizes.groups * sizes.key_size
    rows = sizes.inner, sizes.inner, keys, keys, sizes.heads
    found["mamba.in_proj"] = tuple(zip(rows, columns, strict=True)), settings["ssm_in_multiplier"]
    tensors = {f"{name}.bias": pieces for name, (pieces, _) in found.items()}
    for name, (pieces, of_input) in found.items():
        tensors[f"{name}.weight"] = tuple((count, of_input * factor) for count, factor in pieces)
    return tuple((name, pieces) for name, pieces in tensors.items() if any(factor != 1 for _, factor in pieces))


def _factors(settings: Settings) -> Factors:
    return Factors(embedding=settings["embedding_multiplier"], logits=settings["lm_head_multiplier"])


FALCON_H1 = Family(
    model_type="falcon_h1",
    fields={
        **DECODER_FIELDS,
        "mamba_d_ssm": Field(1024, POSITIVE_INT.or_null()),
        "mamba_norm_before_gate": Field(True, FLAG),
        "mamba_rms_norm": Field(False, FLAG),
        "projectors_bias": Field(False, FLAG),
        "max_position_embeddings": Field(8192, POSITIVE_INT),
        **{f"{name}_multiplier": Field(1.0, NUMBER) for name in _MULTIPLIERS},
        "mlp_multipliers": Field(None, _numbers(2)),
        "ssm_multipliers": Field(None, _numbers(5)),
    },
    ignored={
        **CHUNK,
        **dict.fromkeys(("num_logits_to_keep", "layers_block_type", "layer_types", "attn_layer_indices"), UNREAD),
        # Fields of published files.
        **dict.fromkeys(("mamba_use_mlp", "mlp_expansion_factor", "attn_rotary_emb", "z_loss_coefficient"), UNREAD),
        **dict.fromkeys(("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"), UNREAD),
    },
    layers=_layers,
    factors=_factors,
    renames=NORM_NAMES,
    tensor_factors=_tensor_factors,
)
