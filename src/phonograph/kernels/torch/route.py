"""Routing of tokens to experts in torch, the reference of the GPU's kernel.

Shapes: T tokens, X experts, k experts of a token.
"""

from __future__ import annotations

import torch

from phonograph.kernels.routing import LEAST, Routing


def route(
    logits_TX: torch.Tensor, routing: Routing, bias_X: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, int64 [T, k], highest score first, and their weights, float32 [T, k].

    Args:
        logits_TX: logits of the router.
        routing: rule of the choice.
        bias_X: float32, added to the scores for the choice only.
    """
    logits_TX = logits_TX.float()
    scores_TX = logits_TX.sigmoid() if routing.sigmoid else logits_TX.softmax(-1)
    choice_TX = scores_TX if routing.sigmoid else logits_TX
    if bias_X is not None:
        choice_TX = choice_TX + bias_X
    choice_TX = choice_TX.nan_to_num(LEAST, neginf=LEAST).clamp(min=LEAST)
    if routing.num_groups > 1:
        grouped_TGX = choice_TX.unflatten(1, (routing.num_groups, -1))
        best_TG = grouped_TGX.sort(-1, descending=True).values[..., :2].sum(-1)
        chosen_Tg = best_TG.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        in_group_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, chosen_Tg, True)
        choice_TX = grouped_TGX.masked_fill(~in_group_TG.unsqueeze(-1), -torch.inf).flatten(1)
    experts_Tk = choice_TX.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights_Tk = scores_TX.gather(1, experts_Tk)
    if routing.renormalised:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return experts_Tk, weights_Tk * routing.scale
