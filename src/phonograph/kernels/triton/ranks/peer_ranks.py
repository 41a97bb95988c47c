"""Ranks on GPUs that reach each other's memory, by which they sum rows, share queries and merge results of attention.

All else goes by NCCL.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from phonograph.kernels.fp8_activations import Rows, rows_of
from phonograph.kernels.triton.launch.precompile import is_compiling
from phonograph.kernels.triton.ranks.merge_heads import merge_heads
from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks, c10d
from phonograph.kernels.triton.ranks.peer_buffers import PARTS, PeerBuffers
from phonograph.kernels.triton.ranks.share_rows import share_rows
from phonograph.kernels.triton.ranks.sum_rows import sum_rows

_RENDEZVOUS_SECONDS = 20.0
_TEST_LIMIT = 1 << 23
"""Times that the test at the start looks for a part: some seconds."""
_LIMIT = 1 << 25
"""Times that a sum looks for a part. A look takes about 1 µs."""
_TEST_ROWS = 3
_EMPTY = {2: -0x7FFF8000, 4: -0x80000000}
"""Numbers of -0.0 in a word of 32 bits, by the bytes of a number."""
_ALIGN = 256


class PeerMemory(NamedTuple):
    """Buffers of what ranks exchange; the last three are None if no ranks share the tokens of a KV head.

    Attributes:
        sums: rows of the stream.
        queries: heads of this rank, for its neighbours.
        outputs: results of attention for the heads of a neighbour.
        lses: their log-sum-exps.
    """

    sums: PeerBuffers
    queries: PeerBuffers | None = None
    outputs: PeerBuffers | None = None
    lses: PeerBuffers | None = None


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
        neighbours: ranks of `share`, `exchange` and `merge_heads`.
        heads: query heads of a rank and their size, if it has neighbours.
    """

    _memory: PeerMemory | None = None

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
        heads: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(folder, rank, size, device, neighbours=neighbours)
        self._in_parts = in_parts
        self._side = torch.cuda.Stream(device)
        regions = [(dtype, (PARTS, size, max_rows, width))]
        if neighbours > 1:
            few = PARTS, neighbours, max_rows
            row = (*few, heads[0] * heads[1])
            regions += [(dtype, row), (dtype, row), (torch.float32, (*few, heads[0]))]
        problem = None
        for find in (self._peer_problem, partial(self._connect, folder, regions), self._fill, self._test):
            problem = problem or self._agreed(find)
        if problem is not None:
            self._memory = None
            self.notes = (f"sums over ranks run by NCCL alone, because {problem}",)

    @property
    def sums_by_nccl(self) -> bool:
        """True if NCCL sums rows in place of the kernel."""
        return self._memory is None

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
        for rows in _parts(len(x_TE), buffers.max_rows):
            part = None if normed is None else rows_of(normed, rows)
            sum_rows(x_TE[rows], buffers, hidden_TE[rows], factor=factor, weight_E=weight_E, eps=eps, normed=part)
        return True

    def _buffers_for(self, x_TE: torch.Tensor) -> PeerBuffers | None:
        """Return the buffers if rows are summed over peer memory; the sum is then counted as an operation."""
        buffers = None if self._memory is None else self._memory.sums
        if buffers is None or not buffers.take(x_TE) or not (self._in_parts or len(x_TE) <= buffers.max_rows):
            return None
        self._count("sum", x_TE)
        return buffers

    def share(self, part_THD: torch.Tensor, out_TXD: torch.Tensor) -> None:
        buffers = None if self._memory is None else self._memory.queries
        # A view, unless heads lie apart.
        part_TF = part_THD.reshape(len(part_THD), -1)
        if buffers is None or not buffers.take(part_TF):
            super().share(part_THD, out_TXD)
            return
        self._count("share", part_THD)
        for rows in _parts(len(part_TF), buffers.max_rows):
            share_rows(part_TF[rows], buffers, out_TXD[rows])

    def merge_heads(
        self,
        found_TXD: torch.Tensor,
        lse_XT: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None,
        own: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> bool:
        memory = self._memory
        if memory is None or memory.outputs is None or memory.lses is None:
            return False
        num_tokens, num_heads, head_size = out_THD.shape
        # Heads of another group may have another size.
        if (num_heads * head_size, num_heads) != (memory.outputs.own.shape[3], memory.lses.own.shape[3]):
            return False
        self._count("merge", found_TXD)
        for rows in _parts(num_tokens, memory.outputs.max_rows):
            lse = None if lse_HT is None else lse_HT[:, rows]
            part = None if own is None else (own[0][rows], own[1][:, rows])
            merge_heads(found_TXD[rows], lse_XT[:, rows], memory.outputs, memory.lses, out_THD[rows], lse, part)
        return True

    def _count(self, name: str, x: torch.Tensor) -> None:
        if not is_compiling():
            self._check(name, x)

    def abort(self) -> None:
        if self._memory is not None:
            with torch.cuda.device(self.device), torch.cuda.stream(self._side):
                # A copy, because a kernel would wait for multiprocessors, all of which the sums may have.
                self._memory.sums.limit.copy_(torch.zeros(1, dtype=torch.int32))
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

    def _connect(self, folder: Path, regions: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Make this rank's buffers, and find those of the others.

        Args:
            folder: see the class.
            regions: type and shape of each buffer.
        """
        symmetric = c10d._SymmetricMemory
        name = f"phonograph-{folder.name}"
        store = c10d.PrefixStore(f"memory-{name}", c10d.FileStore(str(folder / "store"), self.size))
        store.set_timeout(timedelta(seconds=_RENDEZVOUS_SECONDS))
        group = c10d.ProcessGroup(store, self.rank, self.size)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        symmetric.set_group_info(name, self.rank, self.size, store)
        sizes = [-(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN for dtype, shape in regions]
        starts = list(accumulate(sizes, initial=0))
        own: torch.Tensor = symmetric.empty_strided_p2p((starts[-1],), (1,), torch.uint8, self.device)
        # The memory of all ranks lives as long as this.
        self._shared = symmetric.rendezvous(own, name)
        addresses = torch.tensor([int(address) for address in self._shared.buffer_ptrs], dtype=torch.int64)
        offsets = addresses - own.data_ptr()
        limit = torch.ones(1, dtype=torch.int32, device=self.device)
        found: list[PeerBuffers] = []
        for start, (dtype, shape) in zip(starts, regions, strict=False):
            first = self.rank // shape[1] * shape[1]
            of_ranks = offsets[first : first + shape[1]] // dtype.itemsize
            buffer = own[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            counters = torch.zeros(shape[2], dtype=torch.int32, device=self.device)
            found.append(PeerBuffers(buffer, of_ranks.to(self.device), counters, limit, self.rank - first))
        self._memory = PeerMemory(*found)
        # Compiles the kernel, which takes the ranks unlike times; `_fill` follows when all have done it.
        sum_rows(self._test_rows(0), self._memory.sums)
        torch.cuda.synchronize(self.device)

    def _fill(self) -> None:
        """Fill the buffers when no other rank writes."""
        assert self._memory is not None
        for buffers in self._memory:
            if buffers is not None:
                buffers.own.view(torch.int32).fill_(_EMPTY[buffers.own.element_size()])
                buffers.counters.zero_()
        self._memory.sums.limit.fill_(_TEST_LIMIT)
        torch.cuda.synchronize(self.device)

    def _test_rows(self, turn: int) -> torch.Tensor:
        assert self._memory is not None
        _, _, rows, width = self._memory.sums.own.shape
        numbers = torch.full((min(_TEST_ROWS, rows), width), float(turn + self.rank), device=self.device)
        return numbers.to(self._memory.sums.own.dtype)

    def _test(self) -> str | None:
        """Sum rows of each rank, so that each pair is tested both ways."""
        assert self._memory is not None
        for turn in range(2 * PARTS):
            x_TE = self._test_rows(turn)
            sum_rows(x_TE, self._memory.sums)
            expected = sum(turn + rank for rank in range(self.size))
            if not bool((x_TE == expected).all()):
                return f"a sum that should be {expected} is {float(x_TE[0, 0])}"
        self._memory.sums.limit.fill_(_LIMIT)
        torch.cuda.synchronize(self.device)
        return None


def _parts(num_rows: int, max_rows: int) -> list[slice]:
    return [slice(start, start + max_rows) for start in range(0, num_rows, max_rows)]
