"""Feed-forward of experts in torch, one expert after another, the reference of the GPU's kernels.

A CPU runs it inside one operator. It may read on the host which experts have tokens, because the tape replays operators
on the CPU; so an expert without tokens costs nothing.

Shapes: T tokens, k experts of a token, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FeedForward = Callable[[int, torch.Tensor], torch.Tensor]
"""Feed-forward of an expert on its rows."""


def add_experts(
    x_TE: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_experts: int,
    feed_forward: FeedForward,
    total_TE: torch.Tensor,
) -> None:
    """Add the weighted results of each token's experts to `total`, float32, in the order of the experts.

    A token's experts are different, so that each addition has one result of a row.
    """
    top_k = experts_Tk.shape[1]
    pairs = experts_Tk.flatten().sort(dim=0, stable=True).indices
    counts = torch.bincount(experts_Tk.flatten(), minlength=num_experts).tolist()
    end = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        own = pairs[end : end + count]
        end += count
        tokens = own // top_k
        result = feed_forward(expert, x_TE.index_select(0, tokens)).float()
        total_TE.index_add_(0, tokens, result.mul_(weights_Tk.flatten()[own].unsqueeze(1)))
