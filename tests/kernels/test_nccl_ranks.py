"""Operations of ranks on GPUs, with torch's process group of gloo in place of NCCL's, which takes the same calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

nccl_ranks = pytest.importorskip("phonograph.kernels.triton.ranks.nccl_ranks")


class Group:
    """A process group as NCCL's; its options must have no time of their own."""

    class Options:
        _timeout: Any

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        made = ProcessGroupGloo._Options()
        made._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        made._timeout = options._timeout
        self.group = ProcessGroupGloo(store, rank, size, made)
        self.aborted = 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        assert not options.asyncOp
        return self.group.allreduce(tensors, options)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        assert not options.asyncOp
        return self.group._allgather_base(out, x, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        assert not options.asyncOp
        return self.group.broadcast(tensors, options)

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ranks.c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def on_ranks(folder: Path, size: int, run: Callable[[Any], Any]) -> list[Any]:
    def start(rank: int) -> Any:
        return run(nccl_ranks.NcclRanks(folder, rank, size, torch.device("cpu")))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(start, range(size)))


def test_sums_gathers_and_broadcasts(tmp_path: Path) -> None:
    def run(ranks: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        x = torch.full((2, 3), 1.0 + ranks.rank)
        words = torch.arange(4, dtype=torch.int32) * (1 - ranks.rank)
        part = torch.full((2, 4), float(ranks.rank))
        # Of 11 tokens the last rank has one less than the others.
        out = torch.zeros(2, 11) if ranks.rank == 0 else None
        ranks.sum(x)
        ranks.broadcast(words)
        with ranks.checking():
            ranks.gather(part, out)
        ranks.abort()
        ranks.abort()
        assert ranks._nccl.aborted == 1
        return x, out, words

    found = on_ranks(tmp_path, 3, run)
    for x, _, words in found:
        assert (x == 6).all() and words.tolist() == [0, 1, 2, 3]
    assert found[0][1].tolist() == [[0.0] * 4 + [1.0] * 4 + [2.0] * 3] * 2


def test_nothing_runs_while_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [ranks] = on_ranks(tmp_path, 1, lambda ranks: ranks)
    monkeypatch.setattr(nccl_ranks, "is_compiling", lambda: True)
    monkeypatch.setattr(ranks, "_nccl", SimpleNamespace())
    x = torch.ones(2, 2)
    ranks.sum(x)
    ranks.broadcast(x)
    ranks.gather(x, None)
    assert (x == 1).all()
