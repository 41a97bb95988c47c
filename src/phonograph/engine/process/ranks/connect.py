"""Connection of a rank with the others, by the kind of their devices."""

from __future__ import annotations

from pathlib import Path

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.kernels.torch.gloo_ranks import GlooRanks


def connect(plan: EnginePlan, folder: Path, rank: int) -> GlooRanks:
    """Return the connection of a rank. On GPUs its number is that of its device, which becomes the current one.

    Args:
        plan: of the engine.
        folder: empty folder, through which the ranks find each other.
        rank: number of this rank.

    Raises:
        RankError: another rank has ended, or NCCL does not connect the GPUs.
    """
    size = plan.config.tensor_parallel_size
    if plan.device.kind == "cpu":
        return GlooRanks(folder, rank, size)
    # Imports Triton, which CPU installations may lack.
    from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return PeerRanks(
        folder,
        rank,
        size,
        device,
        width=plan.model.hidden_size,
        dtype=getattr(torch, plan.dtype),
        max_rows=plan.limits.max_num_batched_tokens,
        batch_invariant=plan.config.batch_invariant,
    )
