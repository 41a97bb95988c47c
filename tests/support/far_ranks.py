"""Ranks on GPUs that are not here, for programs that record which kernels are launched."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.kernels import ranks
from phonograph.kernels.torch.attention import merge_parts as torch_merge_parts
from phonograph.kernels.torch.gloo_ranks import CpuRanks
from phonograph.kernels.triton.attention import merge_parts
from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks
from phonograph.kernels.triton.ranks.sum_rows import PARTS, PeerBuffers

_META = torch.device("meta")
_library = torch.library.Library("phonograph", "FRAGMENT")
_NOTHING = SimpleNamespace(
    **dict.fromkeys(("allreduce", "_allgather_base", "broadcast", "alltoall_base"), lambda *_: None)
)


def pretend_ranks() -> None:
    """Run the operations of ranks on tensors without memory, and the kernels of a GPU with them."""
    for name in ("sum", "gather", "share", "exchange"):
        _library.impl(f"{name}_ranks", getattr(ranks, f"_{name}"), "Meta")
    for name in ("pack_parts", "merge_parts"):
        setattr(torch_merge_parts, name, getattr(merge_parts, name))


class FarRanks(PeerRanks):
    """A rank that launches its sums over peer memory, and whose NCCL does nothing."""

    def __init__(self, plan: EnginePlan, rank: int) -> None:
        size, first = plan.config.tensor_parallel_size, plan.sums[0]
        assert first.kernel == "one-shot" and first.max_rows is not None
        CpuRanks.__init__(self, rank, size)
        self._nccl = self._near = _NOTHING
        self._in_parts = plan.sums[-1].kernel == "one-shot"

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=_META)

        own = numbers(PARTS, size, first.max_rows, plan.model.hidden_size, dtype=getattr(torch, plan.dtype))
        offsets, counters = numbers(size, dtype=torch.int64), numbers(first.max_rows)
        self._buffers = PeerBuffers(own, offsets, counters, numbers(1), rank)
