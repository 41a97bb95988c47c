"""What stands between the fused projection and attention, as one value: for backends that do it themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Norms of heads, rotary embedding and slots of a layer, as `rope_and_write_kv` takes them.

    slot_mapping_T: int64 [T], where the token's key and value go; -1 for nowhere
    rotary_PD:      float32, cosines, then sines, of each position's D/2 angles (pairs d, d + D/2)
    qk_norm:        [H + K, D], weights of the heads' norms, query heads first, with `eps`; or None
    """

    slot_mapping_T: torch.Tensor
    rotary_PD: torch.Tensor
    qk_norm: torch.Tensor | None
    eps: float
