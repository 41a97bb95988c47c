"""Ranks on GPUs that are not here, for programs that record which kernels are launched."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.kernels import ranks
from phonograph.kernels.torch.gloo_ranks import CpuRanks
from phonograph.kernels.triton.ranks.peer_buffers import PARTS, PeerBuffers
from phonograph.kernels.triton.ranks.peer_ranks import PeerMemory, PeerRanks

_META = torch.device("meta")
_library = torch.library.Library("phonograph", "FRAGMENT")
_NOTHING = SimpleNamespace(
    **dict.fromkeys(("allreduce", "_allgather_base", "broadcast", "alltoall_base"), lambda *_: None)
)


def pretend_ranks() -> None:
    """Run the operations of ranks on tensors without memory, and the kernels of a GPU with them."""
    for name in ("sum", "gather", "share", "exchange"):
        _library.impl(f"{name}_ranks", getattr(ranks, f"_{name}"), "Meta")


class FarRanks(PeerRanks):
    """A rank that launches its sums over peer memory, and whose NCCL does nothing."""

    def __init__(self, plan: EnginePlan, rank: int) -> None:
        size, first = plan.config.tensor_parallel_size, plan.sums[0]
        assert first.kernel == "one-shot" and first.max_rows is not None
        CpuRanks.__init__(self, rank, size)
        self._nccl = self._near = _NOTHING
        self._in_parts = plan.sums[-1].kernel == "one-shot"
        most, dtype, neighbours = first.max_rows, getattr(torch, plan.dtype), plan.config.decode_context_parallel_size

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=_META)

        def buffers(num_ranks: int, width: int, dtype: torch.dtype) -> PeerBuffers:
            own = numbers(PARTS, num_ranks, most, width, dtype=dtype)
            return PeerBuffers(own, numbers(num_ranks, dtype=torch.int64), numbers(most), numbers(1), rank % num_ranks)

        self._memory = PeerMemory(buffers(size, plan.model.hidden_size, dtype))
        if neighbours > 1:
            heads = plan.attention.num_query_heads
            rows = [buffers(neighbours, heads * plan.attention.head_size, dtype) for _ in range(2)]
            self._memory = self._memory._replace(
                queries=rows[0], outputs=rows[1], lses=buffers(neighbours, heads, torch.float32)
            )
