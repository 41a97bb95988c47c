"""Ranks on GPUs of one host, connected by NCCL.

Operations run on the current stream, so that a capture records them. Host values travel by gloo.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d  # pyright: ignore[reportPrivateUsage]

from phonograph.errors import RankError
from phonograph.kernels.torch.gloo_ranks import GlooRanks
from phonograph.kernels.triton.launch.precompile import is_compiling

_SECONDS = 600.0
"""Time after which torch ends the process for an operation that was not captured and did not end."""
_ABORT_SECONDS = 2.0

_WARM_UP_SIZES = 1 << 22, 1 << 18, 1 << 14, 1 << 8
"""Numbers of sums, for each of which NCCL may choose another algorithm."""

c10d: Any = _distributed_c10d
"""torch's operations over processes, of which `torch.distributed` has a part."""


class NcclRanks(GlooRanks):
    """Connection of a rank with the others; see `Ranks`. The constructor waits for all of them.

    Args:
        folder: empty folder, through which the ranks find each other.
        rank: number of this rank.
        size: number of ranks.
        device: GPU of this rank, with its index. It must be the current device.
        neighbours: ranks of `share` and `exchange`.
    """

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, *, neighbours: int = 1) -> None:
        super().__init__(folder, rank, size)
        self.device = device
        nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)
        if nccl is None:
            raise RankError("ranks on GPUs need a torch with NCCL, which this one lacks")
        # A thread of torch would look each second into the folder, which is gone at the end.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        options = nccl.Options()
        options._timeout = timedelta(seconds=_SECONDS)
        store = c10d.PrefixStore("nccl", c10d.FileStore(str(folder / "store"), size))
        self._num_neighbours = neighbours
        try:
            self._nccl: Any = nccl(store, rank, size, options)
            self._near: Any = self._nccl
            if 1 < neighbours < size:
                near = c10d.PrefixStore(f"near {rank // neighbours}", store)
                self._near = nccl(near, rank % neighbours, neighbours, options)
            end, begin, thread = _aborting(*{id(one): one for one in (self._nccl, self._near)}.values())
            self._end, self._ending = weakref.finalize(self, end, begin, thread), thread
            self._warm_up()
        except RuntimeError as error:
            raise RankError(f"rank {rank} cannot reach the others by NCCL: {str(error).splitlines()[0]}") from error

    def _warm_up(self) -> None:
        """Run each operation, because NCCL connects the GPUs at the first one, which a capture must not hold.

        It does so for each algorithm.
        """
        for size in _WARM_UP_SIZES:
            self.sum(torch.zeros(size, device=self.device))
        numbers = torch.ones(self.size, 1, device=self.device)
        self.sum(numbers)
        self.gather(numbers, torch.empty(self.size, self.size, device=self.device))
        self.broadcast(numbers)
        if self._num_neighbours > 1:
            shared = torch.empty(1, self._num_neighbours, 1, device=self.device)
            self.share(numbers[:1].view(1, 1, 1), shared)
            self.exchange(shared.view(-1, 1).clone(), shared.view(-1, 1))
        torch.cuda.synchronize(self.device)
        if float(numbers[0]) != self.size:
            raise RuntimeError(f"a sum of ones over {self.size} ranks gave {float(numbers[0])}")

    @property
    def sums_by_nccl(self) -> bool:
        """True if NCCL sums rows, in an order that may go by their number."""
        return True

    def sum(self, x_TE: torch.Tensor) -> None:
        if is_compiling():
            return
        self._check("sum", x_TE)
        _enqueue(self._nccl.allreduce, c10d.AllreduceOptions(), [x_TE])

    def gather(self, part_NP: torch.Tensor, out_NV: torch.Tensor | None) -> None:
        if is_compiling():
            return
        self._check("gather", part_NP)
        parts_SNP = part_NP.new_empty(self.size, *part_NP.shape)
        _enqueue(self._nccl._allgather_base, c10d.AllgatherOptions(), parts_SNP.view(-1), part_NP.view(-1))
        if out_NV is not None:
            size = part_NP.shape[1]
            for rank, part in enumerate(parts_SNP):
                into = out_NV[:, rank * size : (rank + 1) * size]
                into.copy_(part[:, : into.shape[1]])

    def broadcast(self, words: torch.Tensor) -> None:
        if is_compiling():
            return
        self._check("broadcast", words)
        _enqueue(self._nccl.broadcast, c10d.BroadcastOptions(), [words])

    def share(self, part_THD: torch.Tensor, out_TXD: torch.Tensor) -> None:
        if is_compiling():
            return
        self._check("share", part_THD)
        num_tokens, num_heads, head_size = part_THD.shape
        parts_NTHD = part_THD.new_empty(self._num_neighbours, num_tokens, num_heads, head_size)
        own = part_THD.reshape(-1)
        _enqueue(self._near._allgather_base, c10d.AllgatherOptions(), parts_NTHD.view(-1), own)
        out_TXD.view(num_tokens, -1, num_heads, head_size).copy_(parts_NTHD.transpose(0, 1))

    def exchange(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if is_compiling():
            return
        self._check("exchange", x)
        # Without sizes each rank has as many rows.
        _enqueue(partial(self._near.alltoall_base, out, x, [], []), c10d.AllToAllOptions())

    @contextmanager
    def recording(self) -> Generator[None]:
        """Return a context that does nothing: a capture runs no operation."""
        yield

    def abort(self) -> None:
        """End operations that wait for a rank which is not there any more, and the connection.

        A further call waits too: by then the graphs may be gone.
        """
        if self._end.alive:
            self._end()
        else:
            self._ending.join(_ABORT_SECONDS)


def _aborting(*groups: Any) -> tuple[Callable[..., None], threading.Event, threading.Thread]:
    """Return a function that ends operations and connections of torch's process groups, and its arguments.

    It waits no longer than some seconds, because NCCL waits for the graphs that hold its operations. The thread starts
    here: none can start at the end of Python.
    """
    begin = threading.Event()

    def abort() -> None:
        begin.wait()
        for group in groups:
            group.abort()

    thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
    thread.start()
    return _abort, begin, thread


def _abort(begin: threading.Event, thread: threading.Thread) -> None:
    begin.set()
    thread.join(_ABORT_SECONDS)


def _enqueue(operation: Any, options: Any, *tensors: Any) -> None:
    """Run an operation of torch's process group on the current stream."""
    options.asyncOp = False
    work = operation(*tensors, options)
    if work is not None:
        work.wait()
