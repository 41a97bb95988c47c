"""Rotary frequencies from the parameters of a configuration, equal to transformers'.

Importing transformers' functions takes seconds; tests compare the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phonograph.errors import ModelError
from phonograph.models.layer_spec import LayerSpec, RopeTable
from phonograph.models.rope_parameters import ORIGINAL, RopeParameters


def with_ropes(layers: Sequence[LayerSpec], ropes: Sequence[RopeTable | None]) -> tuple[LayerSpec, ...]:
    """Return layers with these rotary embeddings; equal layers are one object."""
    made: dict[LayerSpec, LayerSpec] = {}
    found = [layer if rope is None else layer.with_rope(rope) for layer, rope in zip(layers, ropes, strict=True)]
    return tuple(made.setdefault(layer, layer) for layer in found)


def rope_tables(ropes: Sequence[RopeParameters | None], layers: Iterable[LayerSpec]) -> list[RopeTable | None]:
    """Return the rotary embedding of each layer; equal parameters are one object.

    Raises:
        ModelError: as `rope_table`.
    """
    made: dict[tuple[int, int], RopeTable] = {}
    found: list[RopeTable | None] = []
    for rope, layer in zip(ropes, layers, strict=True):
        if rope is None:
            found.append(None)
            continue
        key = id(rope), layer.attention.head_size
        if key not in made:
            made[key] = rope_table(rope, layer.attention.head_size)
        found.append(made[key])
    return found


def rope_table(rope: RopeParameters, head_size: int) -> RopeTable:
    """Return the rotary embedding of heads. The angles are exact float32 values.

    Raises:
        ModelError: the parameters have no finite result.
    """
    problem = "a frequency is not finite"
    proportional = rope.kind == "proportional"
    size = 2 * int(rope.share * head_size // 2) if proportional else int(head_size * rope.share)
    if not size or size % 2:
        raise ModelError(
            f"partial_rotary_factor={rope.share!r} leaves {size} of {head_size} numbers of a head; an even number of 2 "
            "or more is rotated"
        )
    try:
        # Those of the whole head, if pairs are the first of it.
        whole = head_size if proportional else size
        wavelengths = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / whole)
        factor, long_frequencies, original = 1.0, torch.empty(0), 0
        if rope.kind == "default":
            frequencies = 1.0 / wavelengths
        elif rope.kind in ("linear", "proportional"):
            frequencies = 1.0 / wavelengths / rope.values["factor"]
        elif rope.kind == "llama3":
            frequencies = _llama3(1.0 / wavelengths, rope.values)
        elif rope.kind == "longrope":
            original = rope.values[ORIGINAL]
            frequencies, long_frequencies = (
                1.0 / (_factors(rope, name, size // 2) * wavelengths) for name in ("short_factor", "long_factor")
            )
            factor = _longrope_factor(rope.values)
        else:
            frequencies, factor = _yarn(wavelengths, rope.theta, rope.values)
        if math.isfinite(factor) and bool(frequencies.isfinite().all() and long_frequencies.isfinite().all()):
            return RopeTable(
                frequencies=tuple(frequencies.tolist()),
                factor=float(factor),
                distance=head_size // 2 if size < whole else 0,
                original_length=original,
                long_frequencies=tuple(long_frequencies.tolist()),
                query_beta=rope.query_beta,
                query_length=rope.values[ORIGINAL] if rope.query_beta else 0,
            )
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


def _factors(rope: RopeParameters, name: str, count: int) -> torch.Tensor:
    """Return LongRoPE's factors of wavelengths."""
    factors = rope.values[name]
    if len(factors) != count:
        raise ModelError(f"{name} in {rope.field} has {len(factors)} numbers; the heads have {count} pairs that rotate")
    return torch.tensor(factors, dtype=torch.float32)


def _longrope_factor(values: dict[str, Any]) -> float:
    """Return the factor of LongRoPE (Ding et al. 2024, arXiv 2402.13753) on cos and sin."""
    if values["attention_factor"] is not None:
        return values["attention_factor"]
    scale, length = values["factor"], values["original_max_position_embeddings"]
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(length))


def _yarn_factor(values: dict[str, Any], scale: float) -> float:
    factor, all_dims = values["attention_factor"], values["mscale_all_dim"]
    if factor is not None:
        return factor

    def magnitude(weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    weight = values["mscale"]
    return magnitude(weight) / magnitude(all_dims) if weight and all_dims else magnitude(1.0)
