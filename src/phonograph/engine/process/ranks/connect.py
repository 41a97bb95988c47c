"""Connection of a rank with the others, by the kind of their devices."""

from __future__ import annotations

from pathlib import Path

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError
from phonograph.kernels.torch.gloo_ranks import GlooRanks
from phonograph.kernels.triton.ranks.choose_sum import choose_sum


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
        return GlooRanks(folder, rank, size)
    # Imports Triton, which CPU installations may lack.
    from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks
    from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    neighbours = plan.config.decode_context_parallel_size
    width, dtype = plan.model.hidden_size, getattr(torch, plan.dtype)
    kernel = choose_sum(width, dtype.itemsize, size)
    if kernel.max_rows:
        ranks = PeerRanks(
            folder,
            rank,
            size,
            device,
            width=width,
            dtype=dtype,
            max_rows=min(kernel.max_rows, plan.limits.max_num_batched_tokens),
            batch_invariant=plan.config.batch_invariant,
            neighbours=neighbours,
        )
    else:
        ranks = NcclRanks(folder, rank, size, device, neighbours=neighbours)
    # Of two ranks all orders give the same sum.
    if plan.config.batch_invariant and size > 2 and ranks.sums_by_nccl:
        reason = ranks.notes[0] if ranks.notes else f"they run by NCCL, because {kernel.reason}"
        raise ConfigError("batch_invariant", True, f"needs sums over ranks by one kernel; {reason}")
    return ranks
