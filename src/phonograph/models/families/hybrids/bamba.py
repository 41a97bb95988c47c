"""Bamba: most layers are Mamba 2, the others attention; and what it shares with Granite 4 and Falcon-H1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.models.config_fields import (
    ANY,
    COMMON,
    FLAG,
    INT,
    INTS,
    POSITIVE_INT,
    TAPS,
    TRAINING,
    UNREAD,
    Field,
    FieldKind,
)
from phonograph.models.families.family import Family, Settings, layer_sizes
from phonograph.models.layer_spec import LayerFeedForward, LayerSpec, decoder_layer
from phonograph.models.layers.states.mamba_mixer import MambaMixer, mamba_mixer
from phonograph.models.rope_parameters import PARTIAL, RopeParameters, read_rope

NO_LIMIT = (0.0, math.inf)
"""Limits of times that limit none. transformers keeps others in prefills only."""


def _is_no_limit(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return value is None
    items = [float(item["__float__"]) if isinstance(item, dict) else item for item in cast("list[object]", value)]
    return tuple(items) == NO_LIMIT


_HEAD = FieldKind("a positive integer or auto", lambda value: value == "auto" or POSITIVE_INT.accepts(value))
_LIMIT = FieldKind("null or 0 and infinity, as others are not supported", _is_no_limit)
MAMBA_FIELDS = {
    "mamba_n_heads": Field(128, POSITIVE_INT),
    "mamba_d_head": Field("auto", _HEAD),
    "mamba_n_groups": Field(1, POSITIVE_INT),
    "mamba_d_state": Field(256, POSITIVE_INT),
    "mamba_d_conv": Field(4, TAPS),
    "mamba_expand": Field(2, POSITIVE_INT),
    "mamba_conv_bias": Field(True, FLAG),
    "mamba_proj_bias": Field(False, FLAG),
    "time_step_limit": Field(NO_LIMIT, _LIMIT),
}
NORM_NAMES = (
    (r"^model\.final_layernorm\.", "model.norm."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
)
"""Names of norms in files, with what stands for them."""
DECODER_FIELDS = {
    **COMMON,
    **MAMBA_FIELDS,
    "vocab_size": Field(128000, POSITIVE_INT),
    "intermediate_size": Field(14336, POSITIVE_INT),
    "num_key_value_heads": Field(8, POSITIVE_INT.or_null()),
    "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
    "pad_token_id": Field(0, INT.or_null()),
    "bos_token_id": Field(1, INT.or_null()),
    "eos_token_id": Field(2, ANY),
    "attention_bias": Field(False, FLAG),
    "mlp_bias": Field(False, FLAG),
}
"""Fields of Bamba and Falcon-H1."""
CHUNK = {"mamba_chunk_size": "tokens of a chunk, which the result does not depend on"}


def mamba_of(settings: Settings, *, norm_groups: int = 1, gates_last: bool = False) -> MambaMixer:
    """Return the mixer of layers with a state.

    Args:
        settings: of the model.
        norm_groups: as in `MambaSizes`; so is the next one.
        gates_last: see there.

    Raises:
        ModelError: the numbers do not go together.
    """
    heads, groups, inner = settings["mamba_n_heads"], settings["mamba_n_groups"], settings.get("mamba_d_ssm")
    source = "mamba_d_ssm"
    if inner is None:
        inner, source = settings["mamba_expand"] * settings["hidden_size"], "mamba_expand * hidden_size"
    size = inner // heads if settings["mamba_d_head"] == "auto" else settings["mamba_d_head"]
    if size * heads != inner:
        raise ModelError(f"mamba_n_heads={heads} heads of mamba_d_head={size} must have {source} = {inner} numbers")
    if heads % groups:
        raise ModelError(f"mamba_n_heads={heads} must be a multiple of mamba_n_groups={groups}")
    return mamba_mixer(
        MambaSizes(heads, size, groups, settings["mamba_d_state"], norm_groups, int(gates_last)),
        hidden_size=settings["hidden_size"],
        taps=settings["mamba_d_conv"],
        conv_bias=settings["mamba_conv_bias"],
        bias=settings["mamba_proj_bias"],
        output_bias=settings.get("projectors_bias"),
    )


def _attention_layers(settings: Settings) -> set[int]:
    """Return the layers with attention.

    Raises:
        UnsupportedModelError: there are none.
    """
    found = {*(settings["attn_layer_indices"] or ())} & {*range(settings["num_hidden_layers"])}
    if not found:
        raise UnsupportedModelError(
            f"attn_layer_indices={shortened(repr(settings['attn_layer_indices']))} must name one layer or more; models "
            "without attention are not supported"
        )
    return found


def attention_layer(settings: Settings) -> LayerSpec:
    """Return a layer with attention."""
    bias = settings["attention_bias"]
    attention = decoder_layer(layer_sizes(settings), qkv_bias=bias, o_bias=bias, mlp_bias=settings["mlp_bias"])
    dense = attention.feed_forward
    assert isinstance(dense, LayerFeedForward)
    # Weight formats name modules as the file does.
    gate_up, down = (replace(matrix, module="feed_forward") for matrix in dense.matrices)
    return replace(attention, feed_forward=replace(dense, gate_up=gate_up, down=down))


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    attention, attentions = attention_layer(settings), _attention_layers(settings)
    state = replace(attention, mixer=mamba_of(settings))
    return tuple(attention if index in attentions else state for index in range(settings["num_hidden_layers"]))


def _ropes(settings: Settings) -> Sequence[RopeParameters | None]:
    """Return ropes of half of each head."""
    rope, attentions = read_rope({**settings, "partial_rotary_factor": 0.5}), _attention_layers(settings)
    return [rope if index in attentions else None for index in range(settings["num_hidden_layers"])]


BAMBA = Family(
    model_type="bamba",
    fields={
        **DECODER_FIELDS,
        # transformers rotates half of each head, whatever the file says.
        "partial_rotary_factor": PARTIAL,
        "max_position_embeddings": Field(262144, POSITIVE_INT),
        "attn_layer_indices": Field(None, INTS.or_null()),
    },
    ignored={
        **CHUNK,
        "num_logits_to_keep": UNREAD,
        "z_loss_coefficient": TRAINING,
        "attn_rotary_emb": UNREAD,
        "layer_types": UNREAD,
        "layers_block_type": UNREAD,
    },
    layers=_layers,
    ropes=_ropes,
    renames=NORM_NAMES,
)
