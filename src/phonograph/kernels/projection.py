"""What makes queries and keys of a raw projection, for those who do it on the way into attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshTokens:
    """Beside the projection [T, F] of a step's tokens, F = (H + 2K) * D: queries, keys, values, as they come.

    positions_T:    [T] int64
    rotary_PD:      [P, D] float32, contiguous: cosines, then sines, of each position's D/2 angles (pairs d, d + D/2)
    slot_mapping_T: [T] int64, where keys and values go; -1 writes nothing. May be shorter: behind it is padding
    qk_norm:        [H + K, D] weights of the heads' norms, queries first, or None for no norm
    eps:            of the norms
    """

    positions_T: torch.Tensor
    rotary_PD: torch.Tensor
    slot_mapping_T: torch.Tensor
    qk_norm: torch.Tensor | None
    eps: float
