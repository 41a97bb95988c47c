"""Rotary frequencies from the parameters in a configuration: the same numbers as transformers computes.

The formulas are written down here because importing transformers' takes seconds; tests compare the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from phonograph.errors import ModelError, UnsupportedModelError

# The other variants choose their frequencies by the length of the sequence, so that keys already in the cache would
# have to be rotated again, or rotate only a part of the head.
SUPPORTED_SCALING = ("linear", "llama3", "yarn")


def rope_frequencies(
    parameters: dict[str, Any], head_size: int, max_position_embeddings: int
) -> tuple[tuple[float, ...], float]:
    """Angle per position of each of the head_size / 2 pairs (exact float32 values), and the factor on cos and sin.

    `parameters` are transformers' `rope_parameters`: rope_type, rope_theta, and those of the type.

    Raises:
        UnsupportedModelError: a variant that is not implemented.
        ModelError: the variant's parameters are incomplete.
    """
    kind = parameters.get("rope_type")
    if kind is None:
        raise UnsupportedModelError(
            f"rope_parameters={parameters!r}: rotary parameters that differ between layers are not supported"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']!r}: only whole heads can be rotated (1.0)"
        )
    if kind != "default" and kind not in SUPPORTED_SCALING:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not supported; supported are default, {', '.join(SUPPORTED_SCALING)}"
        )
    try:
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        wavelengths = parameters["rope_theta"] ** exponents
        factor = 1.0
        if kind == "default":
            frequencies = 1.0 / wavelengths
        elif kind == "linear":
            frequencies = 1.0 / wavelengths / parameters["factor"]
        elif kind == "llama3":
            frequencies = _llama3(1.0 / wavelengths, parameters)
        else:
            frequencies, factor = _yarn(wavelengths, parameters, max_position_embeddings)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"the parameters of rope_type={kind!r} cannot be used: {parameters!r} ({error!r})") from error
    return tuple(frequencies.tolist()), float(factor)


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Of Llama 3.1: low frequencies divided by the factor, high ones kept, those between mixed by wavelength."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    length = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    mixed = (1 - share) * scaled / factor + share * scaled
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, mixed, scaled)


def _yarn(
    wavelengths: torch.Tensor, parameters: dict[str, Any], max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation of those pairs that turn few times in the first length.

    `wavelengths` in units of 2 pi.
    """
    length, base = parameters["original_max_position_embeddings"], parameters["rope_theta"]
    scale = parameters["factor"]
    if scale is None:
        scale = max_position_embeddings / length
    pairs = len(wavelengths)

    def pair_that_turns(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    first = pair_that_turns(parameters.get("beta_fast") or 32)
    last = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    interpolated = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - interpolated
    frequencies = 1.0 / (scale * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_factor(parameters, scale)


def _yarn_factor(parameters: dict[str, Any], scale: float) -> float:
    factor, all_dims = parameters.get("attention_factor"), parameters.get("mscale_all_dim")
    if factor is not None:
        return factor

    def magnitude(weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    weight = parameters.get("mscale")
    return magnitude(weight) / magnitude(all_dims) if weight and all_dims else magnitude(1.0)
