"""Table of cosines and sines for the rotary embedding."""

from __future__ import annotations

import torch

from phonograph.models.spec import ModelSpec


def rotary_table(spec: ModelSpec, num_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [positions, D]: cosines of each position's angles, then sines; angles in float32 as in transformers."""
    frequencies = torch.tensor(spec.rope_frequencies, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), frequencies)
    table = torch.empty(num_positions, spec.head_size, dtype=dtype, device=device)
    table[:, : frequencies.numel()] = angles.cos() * spec.rope_factor
    table[:, frequencies.numel() :] = angles.sin() * spec.rope_factor
    return table
