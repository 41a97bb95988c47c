"""Attention of several ranks to parts of the keys: results that travel, and their merge by log-sum-exps.

Shapes: N ranks, T tokens, H query heads of a rank, D head size, F = D + 1.
"""

from __future__ import annotations

import torch


def pack_parts(found_TXD: torch.Tensor, lse_XT: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return results for the heads of each rank, float32 [N, T, H, F]: an output, and its log-sum-exp after it.

    Args:
        found_TXD: outputs of the heads of all ranks, X = N * H.
        lse_XT: float32.
        num_ranks: N.
    """
    packed_TXF = torch.cat([found_TXD.float(), lse_XT.t().unsqueeze(-1)], -1)
    return packed_TXF.unflatten(1, (num_ranks, -1)).transpose(0, 1).contiguous()


def merge_parts(
    parts_NTHF: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Merge results over the keys of each rank, and over other keys.

    Args:
        parts_NTHF: see `pack_parts`. A log-sum-exp of minus infinity has no keys, and then any output.
        out_THD: receives the outputs; 0 without any keys.
        lse_HT: receives the log-sum-exps, or None.
        own: outputs [T, H, D] and log-sum-exps [H, T], float32, over other keys.
    """
    all_XTHF = parts_NTHF
    if own is not None:
        own_THD, own_HT = own
        own_THF = torch.cat([own_THD.float(), own_HT.t().unsqueeze(-1)], -1)
        all_XTHF = torch.cat([parts_NTHF, own_THF.unsqueeze(0)])
    lse_XTH = all_XTHF[..., -1]
    total_TH = lse_XTH.logsumexp(0)
    # Rows of padding have no keys, and any numbers.
    weights_XTH = (lse_XTH - total_TH).exp().nan_to_num(0.0)
    values_XTHD = all_XTHF[..., :-1].masked_fill(weights_XTH.unsqueeze(-1) == 0, 0.0)
    out_THD.copy_((values_XTHD * weights_XTH.unsqueeze(-1)).sum(0))
    if lse_HT is not None:
        lse_HT.copy_(total_TH.t())
