"""Parameters that turn products of queries and keys into weights, and the steps that all kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, kw_only=True)
class Scoring:
    """Arithmetic of one layer, in this order: scale, softcap, ALiBi bias, mask, sinks.

    scale:    factor of the products
    softcap:  x becomes softcap * tanh(x / softcap); 0 leaves it
    left, right: keys visible before and after the query's own position; -1 is unbounded
    slopes_H: ALiBi adds slope * (key position - query position)
    sinks_H:  one more logit in the denominator, without a value
    k_scale_K, v_scale_K: factors of stored keys and values
    """

    scale: float
    softcap: float
    left: int
    right: int
    slopes_H: torch.Tensor | None
    sinks_H: torch.Tensor | None
    k_scale_K: torch.Tensor | None
    v_scale_K: torch.Tensor | None


def softcap_(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Cap scores in place."""
    return scores.div_(cap).tanh_().mul_(cap) if cap > 0.0 else scores


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Add sinks to a finished softmax's denominator: scale `out` [..., D] in place, return the new LSE [...].

    `lse` must be finite; `sinks` broadcasts with it. out / (1 + e^(sink - lse)) is out * sigmoid(lse - sink).
    """
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
    return torch.logaddexp(lse, sinks)


def gather_blocks(kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Copy blocks [N] out of the cache [2, B, S, K, D] as float32 [2, N, S, K, D]."""
    if kv_cache.dtype.itemsize == 1:
        # index_select takes not every one-byte float, but its bytes.
        return kv_cache.view(torch.uint8).index_select(1, blocks).view(kv_cache.dtype).float()
    return kv_cache.index_select(1, blocks).float()
