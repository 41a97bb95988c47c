"""Ministral 3: Mistral with YaRN and a scale of queries by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phonograph.models.config_fields import POSITIVE_INT, Field
from phonograph.models.families.family import Family, Settings
from phonograph.models.families.llama import MISTRAL
from phonograph.models.rope_parameters import RopeParameters, read_rope

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Parameters of files without any; `rope_scaling` takes precedence."""


def _ropes(settings: Settings) -> Sequence[RopeParameters]:
    if settings["rope_parameters"] is None:
        settings = {**settings, "rope_parameters": _ROPE}
    return (read_rope(settings, has_beta=True),) * settings["num_hidden_layers"]


MINISTRAL3 = Family(
    model_type="ministral3",
    fields={
        **{name: field for name, field in MISTRAL.fields.items() if name != "layer_types"},
        "vocab_size": Field(131072, POSITIVE_INT),
        "num_hidden_layers": Field(34, MISTRAL.fields["num_hidden_layers"].kind),
        "head_dim": Field(128, POSITIVE_INT.or_null()),
        "max_position_embeddings": Field(262144, POSITIVE_INT),
        "rms_norm_eps": Field(1e-5, MISTRAL.fields["rms_norm_eps"].kind),
        "pad_token_id": Field(11, MISTRAL.fields["pad_token_id"].kind),
        "sliding_window": Field(None, POSITIVE_INT.or_null()),
    },
    ignored=MISTRAL.ignored,
    layers=MISTRAL.layers,
    ropes=_ropes,
)
