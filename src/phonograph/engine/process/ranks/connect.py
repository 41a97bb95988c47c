"""Connection of a rank with the others, by the kind of their devices."""

from __future__ import annotations

from pathlib import Path

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError
from phonograph.kernels.torch.gloo_ranks import GlooRanks
from phonograph.kernels.triton.ranks.choose_sum import SumChoice


def connect(plan: EnginePlan, folder: Path, rank: int) -> GlooRanks:
    """Return the connection of a rank. On GPUs its number is that of its device, which becomes the current one.

    Args:
        plan: of the engine.
        folder: empty folder, through which the ranks find each other.
        rank: number of this rank.

    Raises:
        ConfigError: batch_invariant, and sums of three or more ranks run by NCCL.
        RankError: another rank has ended, or NCCL does not connect the GPUs.
    """
    size = plan.config.tensor_parallel_size
    if plan.device.kind == "cpu":
        ranks = GlooRanks(folder, rank, size)
        ranks.sums = plan.sums
        return ranks
    # Imports Triton, which CPU installations may lack.
    from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks
    from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    first, neighbours = plan.sums[0], plan.config.decode_context_parallel_size
    if first.kernel == "one-shot" and first.max_rows is not None:
        ranks = PeerRanks(
            folder,
            rank,
            size,
            device,
            width=plan.model.hidden_size,
            dtype=getattr(torch, plan.dtype),
            max_rows=first.max_rows,
            in_parts=plan.sums[-1].kernel == "one-shot",
            neighbours=neighbours,
            heads=(plan.attention.num_query_heads, plan.attention.head_size),
        )
    else:
        ranks = NcclRanks(folder, rank, size, device, neighbours=neighbours)
    # Notes of a connection are those on peer memory that does not work.
    ranks.sums = tuple(SumChoice("nccl", 1, None, note) for note in ranks.notes) or plan.sums
    # Of two ranks all orders give the same sum.
    if plan.config.batch_invariant and size > 2 and ranks.sums_by_nccl:
        raise ConfigError("batch_invariant", True, f"needs sums over ranks by one kernel; {ranks.sums[0].reason}")
    return ranks
