"""Rotary frequencies from the parameters of a configuration, equal to transformers'.

Importing transformers' functions takes seconds; tests compare the results.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from phonograph.errors import ModelError
from phonograph.models.rope_parameters import RopeParameters


def rope_frequencies(rope: RopeParameters, head_size: int) -> tuple[tuple[float, ...], float]:
    """Return the angle per position of each of the head_size / 2 pairs, and the factor on cos and sin.

    The angles are exact float32 values.

    Raises:
        ModelError: the parameters have no finite result.
    """
    problem = "a frequency is not finite"
    try:
        wavelengths = rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        factor = 1.0
        if rope.kind == "default":
            frequencies = 1.0 / wavelengths
        elif rope.kind == "linear":
            frequencies = 1.0 / wavelengths / rope.values["factor"]
        elif rope.kind == "llama3":
            frequencies = _llama3(1.0 / wavelengths, rope.values)
        else:
            frequencies, factor = _yarn(wavelengths, rope.theta, rope.values)
        if math.isfinite(factor) and bool(frequencies.isfinite().all()):
            return tuple(frequencies.tolist()), float(factor)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        problem = str(error)
    raise ModelError(f"{rope.field}={rope.raw!r} with rope_theta={rope.theta!r} cannot be used: {problem}")


def _llama3(frequencies: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
    """Scale as Llama 3.1: divide low frequencies by the factor, keep high ones, interpolate between by wavelength."""
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    length = values["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    mixed = (1 - share) * scaled / factor + share * scaled
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, mixed, scaled)


def _yarn(wavelengths: torch.Tensor, theta: float, values: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Scale as YaRN (Peng et al. 2023, arXiv 2309.00071): interpolate pairs with few turns in the original length.

    `wavelengths` are in units of 2 pi.
    """
    length, scale = values["original_max_position_embeddings"], values["factor"]
    pairs = len(wavelengths)

    def pair_that_turns(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first = pair_that_turns(values["beta_fast"] or 32)
    last = pair_that_turns(values["beta_slow"] or 1)
    if values["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    interpolated = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - interpolated
    frequencies = 1.0 / (scale * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_factor(values, scale)


def _yarn_factor(values: dict[str, Any], scale: float) -> float:
    factor, all_dims = values["attention_factor"], values["mscale_all_dim"]
    if factor is not None:
        return factor

    def magnitude(weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    weight = values["mscale"]
    return magnitude(weight) / magnitude(all_dims) if weight and all_dims else magnitude(1.0)
