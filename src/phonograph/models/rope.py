"""Rotary frequencies from a configuration, as transformers computes them."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phonograph.errors import ModelError, UnsupportedModelError

# The other variants choose their frequencies by the length of the sequence, so that keys already in the cache would
# have to be rotated again, or rotate only a part of the head.
SUPPORTED_SCALING = ("linear", "llama3", "yarn")


def rope_frequencies(config: PreTrainedConfig, head_size: int) -> tuple[tuple[float, ...], float]:
    """Angle per position of each of the head_size / 2 pairs (exact float32 values), and the factor on cos and sin.

    Raises:
        UnsupportedModelError: a variant that is not implemented.
        ModelError: the variant's parameters are incomplete.
    """
    parameters = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    kind = parameters.get("rope_type")
    if kind is None:
        raise UnsupportedModelError(
            f"rope_parameters={parameters!r}: rotary parameters that differ between layers are not supported"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']!r}: only whole heads can be rotated (1.0)"
        )
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0
    if kind not in SUPPORTED_SCALING:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported; supported are default, {', '.join(SUPPORTED_SCALING)}"
        )
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"the parameters of rope_type={kind!r} cannot be used: {parameters!r} ({error!r})") from error
    return tuple(frequencies.tolist()), float(factor)
