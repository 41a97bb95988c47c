"""Ranks on one machine's CPU, connected by gloo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from phonograph.errors import RankError
from phonograph.kernels.ranks import Ranks, register

SECONDS = 60.0
"""Longest time that an operation waits for another rank. Processes that end or are stopped are found earlier."""
_TEXT_BYTES = 1000


class CpuRanks(Ranks):
    """Connection of a rank on a CPU; see `Ranks`. The subclass exchanges tensors."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.number = register(self)
        self._num_operations = 0
        self._recording = self._checking = False

    def sum(self, x_TE: torch.Tensor) -> None:
        if self._recording:
            return
        self._check("sum", x_TE)
        first, *others = self._all(x_TE)
        x_TE.copy_(first)
        for other in others:
            x_TE.add_(other)

    def gather(self, part_NP: torch.Tensor, out_NV: torch.Tensor | None) -> None:
        if self._recording:
            return
        self._check("gather", part_NP)
        parts = self._all(part_NP)
        if out_NV is not None:
            size = part_NP.shape[1]
            for rank, part in enumerate(parts):
                into = out_NV[:, rank * size : (rank + 1) * size]
                into.copy_(part[:, : into.shape[1]])

    def share(self, part_THD: torch.Tensor, out_TXD: torch.Tensor) -> None:
        if self._recording:
            return
        self._check("share", part_THD)
        count = out_TXD.shape[1] // part_THD.shape[1]
        torch.cat(self._neighbours(part_THD.contiguous(), count), 1, out=out_TXD)

    def exchange(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._recording:
            return
        self._check("exchange", x)
        torch.stack([other[self.rank % len(x)] for other in self._neighbours(x, len(x))], out=out)

    def broadcast(self, words: torch.Tensor) -> None:
        if self._recording:
            return
        self._check("broadcast", words)
        words.copy_(self._all(words)[0])

    def agree(self, text: str) -> list[str]:
        encoded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        words = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in self._all(words)]

    @contextmanager
    def recording(self) -> Generator[None]:
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def checking(self) -> Generator[None]:
        self._checking = True
        try:
            yield
        finally:
            self._checking = False

    def _check(self, name: str, x: torch.Tensor) -> None:
        """Count an operation; while `checking`, compare it with those of the other ranks."""
        self._num_operations += 1
        if not self._checking:
            return
        operations = self.agree(f"operation {self._num_operations}, {name} of {list(x.shape)}")
        for rank, operation in enumerate(operations):
            if operation != operations[self.rank]:
                raise RankError(
                    f"rank {self.rank} is at {operations[self.rank]}, and rank {rank} at {operation}: one of them left "
                    "an operation out"
                )

    def _neighbours(self, x: torch.Tensor, count: int) -> list[torch.Tensor]:
        first = self.rank // count * count
        return [*self._all(x)[first : first + count]]

    def abort(self) -> None:
        """End operations that wait for a rank which is not there any more. Here they end by themselves."""

    @abstractmethod
    def _all(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the contiguous tensors of all ranks, which have equal shapes."""


class GlooRanks(CpuRanks):
    """Connection of a rank with the others; see `Ranks`. The constructor waits for all of them.

    A process group of its own, and not torch's default one: a process may have several engines.

    Args:
        folder: empty folder, through which the ranks find each other.
        rank: number of this rank.
        size: number of ranks.
        seconds: longest time that an operation waits.
    """

    def __init__(self, folder: Path, rank: int, size: int, *, seconds: float = SECONDS) -> None:
        super().__init__(rank, size)
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore
        device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
        for name, value in (("_devices", [device]), ("_timeout", timedelta(seconds=seconds))):
            setattr(options, name, value)
        try:
            # The stubs of torch have few of its methods.
            self._group: Any = ProcessGroupGloo(FileStore(str(folder / "store"), size), rank, size, options)
        except RuntimeError as error:
            raise _unanswered(rank, error) from error

    def _all(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = x.new_empty((self.size, *x.shape)).unbind()
        try:
            self._group.allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise _unanswered(self.rank, error) from error
        return parts


def _unanswered(rank: int, error: RuntimeError) -> RankError:
    return RankError(f"rank {rank} got no answer from another rank: {str(error).splitlines()[0]}", of_another=True)
