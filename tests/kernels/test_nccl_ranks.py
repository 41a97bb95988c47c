"""Operations of ranks on GPUs, with torch's process group of gloo in place of NCCL's, which takes the same calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

peer_ranks = pytest.importorskip("phonograph.kernels.triton.ranks.peer_ranks")
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

    def alltoall_base(
        self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int], sizes: list[int], options: Any
    ) -> Any:
        assert not options.asyncOp
        return self.group.alltoall_base(out, x, out_sizes, sizes, options)

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


def test_a_second_abort_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for graphs, which are there when a rank is found dead, and are gone when the engine is closed."""
    graphs_gone, [ranks] = threading.Event(), on_ranks(tmp_path, 1, lambda ranks: ranks)
    abort = ranks._nccl.abort
    monkeypatch.setattr(ranks._nccl, "abort", lambda: (graphs_gone.wait(10), time.sleep(0.2), abort()))
    monkeypatch.setattr(nccl_ranks, "_ABORT_SECONDS", 0.05)
    ranks.abort()
    assert ranks._nccl.aborted == 0
    monkeypatch.setattr(nccl_ranks, "_ABORT_SECONDS", 5)
    graphs_gone.set()
    ranks.abort()
    assert ranks._nccl.aborted == 1


def test_nothing_runs_while_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [ranks] = on_ranks(tmp_path, 1, lambda ranks: ranks)
    monkeypatch.setattr(nccl_ranks, "is_compiling", lambda: True)
    monkeypatch.setattr(ranks, "_nccl", SimpleNamespace())
    x = torch.ones(2, 2)
    ranks.sum(x)
    ranks.broadcast(x)
    ranks.gather(x, None)
    assert (x == 1).all()


class Memory:
    """Memory of all ranks, in place of torch's symmetric memory, and sums over it, in place of the kernel."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: dict[int, torch.Tensor] = {}
        self.own: dict[int, torch.Tensor] = {}
        self.ranks: dict[str, list[int]] = {}
        self.groups: dict[str, Any] = {}
        self.num_launches, self.broken = [0] * size, False
        self.rank = threading.local()

    def set_group_info(self, name: str, rank: int, size: int, store: Any) -> None:
        self.ranks.setdefault(name, []).append(rank)
        self.rank.number = rank

    def empty_strided_p2p(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        assert self.groups[name].size() == self.barrier.parties
        if self.broken:
            raise RuntimeError("invalid argument\nwith a trace")
        self.own[self.rank.number] = tensor
        self.barrier.wait(10)
        return SimpleNamespace(buffer_ptrs=[own.data_ptr() for _, own in sorted(self.own.items())])

    def sum_rows(self, x_TE: torch.Tensor, buffers: Any, hidden_TE: Any = None, **arguments: Any) -> None:
        addresses = buffers.offsets * x_TE.element_size() + buffers.own.data_ptr()
        assert addresses.tolist() == [own.data_ptr() for _, own in sorted(self.own.items())]
        assert 0 < len(x_TE) <= buffers.max_rows
        self.parts[buffers.rank] = x_TE.clone()
        self.num_launches[buffers.rank] += 1
        self.barrier.wait(10)
        total = sum(part for _, part in sorted(self.parts.items()))
        self.barrier.wait(10)
        if hidden_TE is None:
            x_TE.copy_(total)
        else:
            hidden_TE += arguments["factor"] * total
            arguments["normed"].copy_(hidden_TE * arguments["weight_E"])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory(2)
    monkeypatch.setattr(peer_ranks.c10d, "_SymmetricMemory", made)
    # Ranks have processes of their own, and each process a group of a name.
    monkeypatch.setattr(peer_ranks.c10d, "_register_process_group", made.groups.__setitem__)
    monkeypatch.setattr(peer_ranks, "sum_rows", made.sum_rows)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one != other)
    return made


def peers(folder: Path, run: Callable[[Any], Any], *, in_parts: bool = False, **divided: Any) -> list[Any]:
    def start(rank: int) -> Any:
        settings = {"width": 8, "dtype": torch.float32, "max_rows": 4, "in_parts": in_parts, **divided}
        return run(peer_ranks.PeerRanks(folder, rank, 2, torch.device("cpu"), **settings))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


@pytest.mark.parametrize("in_parts", [False, True])
def test_rows_that_go_over_peer_memory(in_parts: bool, tmp_path: Path, memory: Memory) -> None:
    def run(ranks: Any) -> tuple[list[int], list[torch.Tensor]]:
        assert not ranks.sums_by_nccl and ranks.notes == ()
        launches, sums = [], []
        for rows in (1, 4, 9):
            before = memory.num_launches[ranks.rank]
            x = torch.full((rows, 8), 1.0 + ranks.rank)
            ranks.sum(x)
            launches.append(memory.num_launches[ranks.rank] - before)
            sums.append(x)
        # Another width.
        x = torch.full((2, 4), 1.0 + ranks.rank)
        ranks.sum(x)
        part, hidden, out = torch.full((9, 8), 1.0 + ranks.rank), torch.ones(9, 8), torch.zeros(9, 8)
        done = ranks.add_and_norm(part, hidden, torch.full((8,), 2.0), 1e-5, out, 0.5)
        assert done is in_parts
        assert (hidden == (2.5 if done else 1.0)).all() and (out == (5.0 if done else 0.0)).all()
        return launches, [*sums, x]

    for launches, sums in peers(tmp_path, run, in_parts=in_parts):
        assert launches == ([1, 1, 3] if in_parts else [1, 1, 0])
        assert all((one == 3).all() for one in sums)
    assert memory.ranks and sorted(*memory.ranks.values()) == [0, 1]


def test_neighbours_share_heads_by_buffers_of_their_own(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each buffer has the address that the other rank writes to, is empty, and takes rows of its size only."""
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(peer_ranks, "share_rows", lambda x, buffers, out: launched.append((len(x), len(out))))

    def run(ranks: Any) -> list[tuple[int, int]]:
        buffers = ranks._memory
        shapes = [tuple(one.own.shape) for one in buffers]
        assert shapes == [(3, 2, 4, 8), (3, 2, 4, 6), (3, 2, 4, 6), (3, 2, 4, 2)]
        places = []
        for one in buffers:
            assert (one.own == 0).all() and one.own.signbit().all() and one.rank == ranks.rank
            places.append((one.own.data_ptr(), one.own.data_ptr() + 4 * int(one.offsets[1 - ranks.rank])))
        ranks.share(torch.ones(9, 2, 3), torch.zeros(9, 4, 3))
        assert not ranks.merge_heads(torch.ones(1, 2, 3), torch.ones(2, 1), torch.ones(1, 1, 3), None, None)
        # By NCCL: other heads than those of the buffers.
        ranks.share(torch.full((2, 1, 3), float(ranks.rank)), out := torch.zeros(2, 2, 3))
        assert (out[:, 0] == 0).all() and (out[:, 1] == 1).all()
        return places

    first, second = peers(tmp_path, run, neighbours=2, heads=(2, 3))
    assert first == [(other, own) for own, other in second]
    assert sorted(launched) == [(1, 1)] * 2 + [(4, 4)] * 4


def test_an_abort_ends_the_wait_for_parts(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a copy from the host: sums that wait may leave no multiprocessor for a kernel."""
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda place: nullcontext())

    def run(ranks: Any) -> list[int]:
        limits = [int(ranks._memory.sums.limit)]
        limit = SimpleNamespace(copy_=lambda numbers: limits.extend(numbers.tolist()))
        ranks._memory = ranks._memory._replace(sums=ranks._memory.sums._replace(limit=limit))
        ranks.abort()
        assert ranks._nccl.aborted == 1
        return limits

    assert peers(tmp_path, run) == [[peer_ranks._LIMIT, 0]] * 2


@pytest.mark.parametrize("fault", ["access", "rendezvous", "sum"])
def test_ranks_without_peer_memory_sum_by_nccl(
    fault: str, tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {
        "access": "on rank 0: GPU 0 has no access to the memory of GPU 1",
        "rendezvous": "on rank 0: RuntimeError: invalid argument",
        "sum": "on rank 0: a sum that should be 1 is ",
    }
    if fault == "access":
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    memory.broken = fault == "rendezvous"
    if fault == "sum":
        monkeypatch.setattr(peer_ranks, "sum_rows", lambda *arguments, **settings: None)

    def run(ranks: Any) -> str:
        x = torch.full((1, 8), 1.0 + ranks.rank)
        ranks.sum(x)
        assert (x == 3).all() and ranks.sums_by_nccl
        [note] = ranks.notes
        return note

    for note in peers(tmp_path, run):
        assert note.startswith(f"sums over ranks run by NCCL alone, because {words[fault]}")
