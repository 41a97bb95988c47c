"""Phi-3, Phi-3.5 and Phi-4, whose checkpoints have queries, keys and values in one tensor, and gates and ups in one."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.models.config_fields import ANY, COMMON, INT, POSITIVE_INT, TENSORS, UNREAD, Field
from phonograph.models.families.family import Family, Settings, layer_sizes, windows
from phonograph.models.layer_spec import LayerSpec, decoder_layer
from phonograph.models.rope_parameters import PARTIAL, RopeParameters, read_rope

_LONGROPE_NAMES = ("su", "yarn")
"""Older names of longrope in files of this family."""


def _layers(settings: Settings) -> tuple[LayerSpec, ...]:
    sizes = layer_sizes(settings)
    return tuple(decoder_layer(sizes, fused_names=True, window=window) for window in windows(settings))


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    field = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    raw = settings[field] or {}
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind in _LONGROPE_NAMES:
        settings = {**settings, field: {**raw, "rope_type": "longrope"}}
    return (read_rope(settings, kinds=("default", "longrope")),) * settings["num_hidden_layers"]


PHI3 = Family(
    model_type="phi3",
    fields={
        **COMMON,
        "vocab_size": Field(32064, POSITIVE_INT),
        "hidden_size": Field(3072, POSITIVE_INT),
        "intermediate_size": Field(8192, POSITIVE_INT),
        "max_position_embeddings": Field(4096, POSITIVE_INT),
        "original_max_position_embeddings": Field(4096, POSITIVE_INT.or_null()),
        "rms_norm_eps": Field(1e-5, COMMON["rms_norm_eps"].kind),
        "bos_token_id": Field(1, INT.or_null()),
        "eos_token_id": Field(32000, ANY),
        "pad_token_id": Field(32000, INT.or_null()),
        "partial_rotary_factor": PARTIAL,
        "sliding_window": Field(None, POSITIVE_INT.or_null()),
    },
    ignored={
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), TENSORS),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), UNREAD),
    },
    layers=_layers,
    ropes=_ropes,
)
