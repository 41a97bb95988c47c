"""Buffers of several ranks in one process, for kernels that exchange rows over peer memory."""

from __future__ import annotations

import pytest
import torch

peer_buffers = pytest.importorskip("phonograph.kernels.triton.ranks.peer_buffers")


class FakePeers:
    """Buffers of all ranks in one process.

    A rank waits for the others inside its kernel. Here each runs alone, so that the rows of the others are put into its
    buffer first (`put`), as their kernels do later.
    """

    def __init__(self, num_ranks: int, max_rows: int, width: int, dtype: torch.dtype) -> None:
        shape = peer_buffers.PARTS, num_ranks, max_rows, width
        self.own = [torch.full(shape, -0.0, dtype=dtype) for _ in range(num_ranks)]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.own])
        assert (addresses % 16 == 0).all()
        self.ranks = [
            peer_buffers.PeerBuffers(
                own=buffer,
                offsets=(addresses - addresses[rank]) // dtype.itemsize,
                counters=torch.zeros(max_rows, dtype=torch.int32),
                limit=torch.tensor([3], dtype=torch.int32),
                rank=rank,
            )
            for rank, buffer in enumerate(self.own)
        ]

    def put(self, rank: int, rows_of: dict[int, torch.Tensor], turns: list[int]) -> None:
        """Put rows of other ranks into the buffer of a rank, each in its turn."""
        for other, rows in rows_of.items():
            for row, turn in enumerate(turns):
                self.own[rank][turn, other, row] = rows[row] + 0.0

    def check(self, rank: int, sent_to: dict[int, torch.Tensor], turns: list[int]) -> None:
        """Check what a rank has sent to others, and what it leaves in its buffer."""
        for other, rows in sent_to.items():
            for row, turn in enumerate(turns):
                assert torch.equal(self.own[other][turn, rank, row], rows[row])
                cleared = self.own[rank][(turn + 2) % 3, other, row]
                assert (cleared == 0).all() and cleared.signbit().all()
