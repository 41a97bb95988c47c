"""Factor and softcap of logits, in place, by torch's operators, which both kernel sets record."""

from __future__ import annotations

import torch

from phonograph.models.layer_spec import Factors


def finish_logits(logits_NV: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Multiply logits by their factor and cap them, in place. Returns them."""
    scale = factors.logits / (factors.softcap or 1.0)
    if scale != 1:
        logits_NV.mul_(scale)
    return logits_NV.tanh_().mul_(factors.softcap) if factors.softcap else logits_NV
