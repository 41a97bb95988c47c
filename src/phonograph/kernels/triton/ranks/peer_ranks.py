"""Ranks on GPUs that reach each other's memory: sums of few rows by `sum_rows`, all else by NCCL."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phonograph.kernels.fp8_activations import Rows, rows_of
from phonograph.kernels.triton.launch.precompile import is_compiling
from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks, c10d
from phonograph.kernels.triton.ranks.sum_rows import PARTS, PeerBuffers, sum_rows

_RENDEZVOUS_SECONDS = 20.0
_TEST_LIMIT = 1 << 23
"""Times that the test at the start looks for a part: some seconds."""
_LIMIT = 1 << 25
"""Times that a sum looks for a part. A look takes about 1 µs."""
_TEST_ROWS = 3
_EMPTY = {2: -0x7FFF8000, 4: -0x80000000}
"""Numbers of -0.0 in a word of 32 bits, by the bytes of a number."""


class PeerRanks(NcclRanks):
    """Connection of a rank with the others; see `Ranks`. The constructor waits for all of them.

    It sums by NCCL alone if a GPU does not reach another one. `notes` has the reason.

    Args:
        folder: empty folder, through which the ranks find each other.
        rank: number of this rank.
        size: number of ranks.
        device: GPU of this rank, with its index. It must be the current device.
        width: numbers of the rows of the stream.
        dtype: their type.
        max_rows: most rows that are summed over peer memory at a time.
        in_parts: sum more rows over peer memory too, in parts; else by NCCL.
        neighbours: ranks of `share` and `exchange`.
    """

    _buffers: PeerBuffers | None = None

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        device: torch.device,
        *,
        width: int,
        dtype: torch.dtype,
        max_rows: int,
        in_parts: bool,
        neighbours: int = 1,
    ) -> None:
        super().__init__(folder, rank, size, device, neighbours=neighbours)
        self._in_parts = in_parts
        self._side = torch.cuda.Stream(device)
        problem, shape = None, (PARTS, size, max_rows, width)
        for find in (self._peer_problem, partial(self._connect, folder, shape, dtype), self._fill, self._test):
            problem = problem or self._agreed(find)
        if problem is not None:
            self._buffers = None
            self.notes = (f"sums over ranks run by NCCL alone, because {problem}",)

    @property
    def sums_by_nccl(self) -> bool:
        """True if NCCL sums rows in place of the kernel."""
        return self._buffers is None

    def sum(self, x_TE: torch.Tensor) -> None:
        buffers = self._buffers_for(x_TE)
        if buffers is None:
            super().sum(x_TE)
            return
        for rows_TE in x_TE.split(buffers.max_rows):
            sum_rows(rows_TE, buffers)

    def add_and_norm(
        self,
        x_TE: torch.Tensor,
        hidden_TE: torch.Tensor,
        weight_E: torch.Tensor | None,
        eps: float,
        normed: Rows | None,
        factor: float,
    ) -> bool:
        buffers = self._buffers_for(x_TE)
        if buffers is None:
            return False
        for start in range(0, len(x_TE), buffers.max_rows):
            rows = slice(start, start + buffers.max_rows)
            part = None if normed is None else rows_of(normed, rows)
            sum_rows(x_TE[rows], buffers, hidden_TE[rows], factor=factor, weight_E=weight_E, eps=eps, normed=part)
        return True

    def _buffers_for(self, x_TE: torch.Tensor) -> PeerBuffers | None:
        """Return the buffers if rows are summed over peer memory; the sum is then counted as an operation."""
        buffers = self._buffers
        if buffers is None or not buffers.take(x_TE) or not (self._in_parts or len(x_TE) <= buffers.max_rows):
            return None
        if not is_compiling():
            self._check("sum", x_TE)
        return buffers

    def abort(self) -> None:
        if self._buffers is not None:
            with torch.cuda.device(self.device), torch.cuda.stream(self._side):
                # A copy, because a kernel would wait for multiprocessors, all of which the sums may have.
                self._buffers.limit.copy_(torch.zeros(1, dtype=torch.int32))
        super().abort()

    def _agreed(self, find_problem: Any) -> str | None:
        """Return the problem of the first rank that has one; None if none has."""
        try:
            problem = find_problem()
        except (RuntimeError, AttributeError, TypeError) as error:  # also of a torch without these private names
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        for rank, text in enumerate(self.agree(problem or "")):
            if text:
                return f"on rank {rank}: {text}"
        return None

    def _peer_problem(self) -> str | None:
        for other in range(self.size):
            if other != self.rank and not torch.cuda.can_device_access_peer(self.rank, other):
                return f"GPU {self.rank} has no access to the memory of GPU {other}"
        return None

    def _connect(self, folder: Path, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        """Make this rank's buffer, and find those of the others."""
        symmetric = c10d._SymmetricMemory
        name = f"phonograph-{folder.name}"
        store = c10d.PrefixStore(f"memory-{name}", c10d.FileStore(str(folder / "store"), self.size))
        store.set_timeout(timedelta(seconds=_RENDEZVOUS_SECONDS))
        group = c10d.ProcessGroup(store, self.rank, self.size)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        symmetric.set_group_info(name, self.rank, self.size, store)
        stride = torch.empty(shape, device="meta").stride()
        own: torch.Tensor = symmetric.empty_strided_p2p(shape, stride, dtype, self.device)
        # The memory of all ranks lives as long as this.
        self._memory = symmetric.rendezvous(own, name)
        addresses = torch.tensor([int(address) for address in self._memory.buffer_ptrs], dtype=torch.int64)
        offsets = (addresses - own.data_ptr()) // dtype.itemsize
        self._buffers = PeerBuffers(
            own=own,
            offsets=offsets.to(self.device),
            counters=torch.zeros(shape[2], dtype=torch.int32, device=self.device),
            limit=torch.ones(1, dtype=torch.int32, device=self.device),
            rank=self.rank,
        )
        # Compiles the kernel, which takes the ranks unlike times; `_fill` follows when all have done it.
        sum_rows(self._test_rows(0), self._buffers)
        torch.cuda.synchronize(self.device)

    def _fill(self) -> None:
        """Fill the buffer when no other rank writes."""
        assert self._buffers is not None
        self._buffers.own.view(torch.int32).fill_(_EMPTY[self._buffers.own.element_size()])
        self._buffers.counters.zero_()
        self._buffers.limit.fill_(_TEST_LIMIT)
        torch.cuda.synchronize(self.device)

    def _test_rows(self, turn: int) -> torch.Tensor:
        assert self._buffers is not None
        _, _, rows, width = self._buffers.own.shape
        numbers = torch.full((min(_TEST_ROWS, rows), width), float(turn + self.rank), device=self.device)
        return numbers.to(self._buffers.own.dtype)

    def _test(self) -> str | None:
        """Sum rows of each rank, so that each pair is tested both ways."""
        assert self._buffers is not None
        for turn in range(2 * PARTS):
            x_TE = self._test_rows(turn)
            sum_rows(x_TE, self._buffers)
            expected = sum(turn + rank for rank in range(self.size))
            if not bool((x_TE == expected).all()):
                return f"a sum that should be {expected} is {float(x_TE[0, 0])}"
        self._buffers.limit.fill_(_LIMIT)
        torch.cuda.synchronize(self.device)
        return None
