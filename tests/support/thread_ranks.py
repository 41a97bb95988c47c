"""Ranks on threads of one process: their operations, and an engine whose other ranks are threads.

They cost no processes, each of which would import torch for seconds.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from phonograph.engine.build import Engine, build_engine
from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.ranks.follow_rank import serve_rank
from phonograph.engine.process.ranks.rank_group import RankGroup
from phonograph.kernels.torch.gloo_ranks import CpuRanks

Result = TypeVar("Result")
SECONDS = 30.0
_capturing = threading.Lock()
"""Captures go in turn: a process crashed inside torch when two threads recorded a graph each."""


class ThreadRanks(CpuRanks):
    """Connection of a rank with the others. `shared` has the tensors of all ranks at a barrier."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(shared))
        self.num_sums = 0
        self._shared, self._barrier = shared, barrier

    def sum(self, x_TE: torch.Tensor) -> None:
        super().sum(x_TE)
        self.num_sums += 1

    @contextmanager
    def recording(self) -> Generator[None]:
        with _capturing, super().recording():
            yield

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.is_contiguous()
        self._shared[self.rank] = x.clone()
        self._barrier.wait(SECONDS)
        found = list(self._shared)
        with suppress(threading.BrokenBarrierError):  # by a rank that went on, and failed
            self._barrier.wait(SECONDS)
        return found

    def abort(self) -> None:
        self._barrier.abort()


def thread_ranks(size: int) -> list[ThreadRanks]:
    shared, barrier = [None] * size, threading.Barrier(size)
    return [ThreadRanks(rank, shared, barrier) for rank in range(size)]


def on_ranks(size: int, run: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Return what a function returns on each of several ranks."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, thread_ranks(size)))


class ThreadGroup(RankGroup):
    """The other ranks of an engine, on threads."""

    def __init__(self, plan: EnginePlan) -> None:
        self.ranks, *others = thread_ranks(plan.config.tensor_parallel_size)
        self._pool = ThreadPoolExecutor(len(others))
        self._commands, self._replies, self.runs = [], [], list[Future[None]]()
        for ranks in others:
            theirs, commands = multiprocessing.Pipe(duplex=False)
            replies, answers = multiprocessing.Pipe(duplex=False)
            # As a process gets it.
            copied: EnginePlan = pickle.loads(pickle.dumps(plan))
            self.runs.append(self._pool.submit(_serve, copied, ranks, theirs, answers))
            self._commands.append(commands)
            self._replies.append(replies)

    def answers(self) -> list[Any]:
        while not all(replies.poll(0.02) for replies in self._replies):
            for run in self.runs:
                if run.done():
                    run.result()
        return [replies.recv() for replies in self._replies]

    def check(self) -> None:
        """Check nothing: operations raise."""

    def first_error(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        for commands in self._commands:
            commands.close()
        self._pool.shutdown()


def _serve(plan: EnginePlan, ranks: ThreadRanks, *connections: Any) -> None:
    try:
        serve_rank(plan, ranks, *connections)
    except BaseException:
        ranks.abort()
        raise


@contextmanager
def engine_on_threads(plan: EnginePlan) -> Generator[Engine]:
    """Yield an engine whose other ranks are threads."""
    group = ThreadGroup(plan)
    try:
        yield build_engine(plan, group=group)
    except BaseException as error:
        group.ranks.abort()
        group.close()
        if isinstance(error, threading.BrokenBarrierError):
            # Another rank failed first: its error says why.
            for run in group.runs:
                run.result()
        raise
    group.close()
    for run in group.runs:
        run.result()
