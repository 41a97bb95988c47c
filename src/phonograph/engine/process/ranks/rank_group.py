"""The other ranks, as rank 0 sees them: their processes, the messages to them, and how they end."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.ranks.lead_runner import LeadRunner
from phonograph.engine.process.ranks.rank_process import POLL_SECONDS, STOPPED_POLLS, Place, is_stopped, run_rank
from phonograph.engine.process.ranks.rank_step import Capture, Command, Failed, Verify
from phonograph.errors import RankError
from phonograph.graphs.verification import Mismatch
from phonograph.kernels.torch.gloo_ranks import GlooRanks

_OTHERS_SECONDS = 0.5
"""Time in which other ranks may report errors after the first one was noticed, which may follow from theirs."""
_CAUSE_SECONDS = 4.0
"""Longest wait for the reason of a failed operation."""
_CLOSE_SECONDS = 2.0


class RankGroup:
    """Ranks 1 and above, each in a process of its own. One thread uses it.

    ranks: connection of rank 0 with the others

    Args:
        plan: of the engine; each rank gets it.
        on_failure: called on another thread with the reason when a rank has ended by itself and all are killed.
        last_words: connection by which ranks say why the engine ends, if rank 0's process has only the engine. They
            then kill a stopped rank 0.
    """

    def __init__(
        self, plan: EnginePlan, *, on_failure: Callable[[str], None] | None = None, last_words: Connection | None = None
    ) -> None:
        size = plan.config.tensor_parallel_size
        self._folder = Path(tempfile.mkdtemp(prefix="phonograph-ranks-"))
        self._on_failure = on_failure
        self._answers: SimpleQueue[object] = SimpleQueue()
        self._failure: str | None = None
        self._failed, self._closing = threading.Event(), threading.Event()
        self._commands: list[Connection] = []
        self._replies: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._end = Finalize(self, _end_all, (self._processes, self._folder), exitpriority=10)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, size):
            theirs, commands = context.Pipe(duplex=False)
            replies, answers = context.Pipe(duplex=False)
            place = Place(rank, size, str(self._folder))
            process = context.Process(
                target=run_rank, args=(place, theirs, answers, last_words), name=f"phonograph-rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            answers.close()
            self._processes.append(process)
            self._commands.append(commands)
            self._replies.append(replies)
        self._watcher = threading.Thread(target=self._watch, name="phonograph-ranks", daemon=True)
        self._watcher.start()
        with self._closed_on_error(), self.first_error():
            self.send(plan)
            self.ranks = GlooRanks(self._folder, 0, size)

    def send(self, message: Command | EnginePlan) -> None:
        """Send a message to each rank."""
        words = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for commands in self._commands:
            commands.send_bytes(words)

    def make_runner(self, **parts: Any) -> LeadRunner:
        """Make the runner of rank 0 of these parts."""
        return LeadRunner(self, **parts)

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Return a context for the captures of rank 0, which begin when all ranks have loaded their weights."""
        with self.first_error():
            self.answers()
            self.send(Capture())
            yield

    @contextmanager
    def verifying(self, num_replays: int, seed: int) -> Generator[list[Mismatch]]:
        """Return a context in which every rank runs `verify`, with the list that gets the mismatches of the others."""
        found: list[Mismatch] = []
        with self.first_error():
            self.send(Verify(num_replays, seed))
            with self.ranks.checking():
                yield found
            found += itertools.chain(*self.answers())

    def answers(self) -> list[Any]:
        """Wait for an answer of each rank; raises RankError if one ends."""
        found: list[Any] = []
        while len(found) < len(self._processes):
            if self._failed.is_set():
                raise RankError(self._failure or "a rank ended")
            with suppress(Empty):
                found.append(self._answers.get(timeout=POLL_SECONDS))
        return found

    @contextmanager
    def first_error(self) -> Generator[None]:
        """Return a context that raises the error by which a rank ended, in place of errors that follow from it."""
        try:
            yield
        except (RankError, OSError) as error:
            if isinstance(error, RankError) and not error.of_another:
                raise
            self._failed.wait(_CAUSE_SECONDS)
            raise RankError(self._failure or str(error)) from error

    def close(self) -> None:
        """End the ranks."""
        self._closing.set()
        for commands in self._commands:
            commands.close()
        until = time.monotonic() + _CLOSE_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        self._end()
        self._watcher.join()

    @contextmanager
    def _closed_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _watch(self) -> None:
        """Take the answers of the ranks until one of them ends or `close` is called."""
        failures: dict[int, Failed] = {}
        stopped = [0] * len(self._processes)
        sources = {replies: rank for rank, replies in enumerate(self._replies, 1)}
        while not self._closing.is_set():
            wait([*sources, *(process.sentinel for process in self._processes)], POLL_SECONDS)
            self._take(sources, failures)
            for index, process in enumerate(self._processes):
                stopped[index] = stopped[index] + 1 if is_stopped(process.pid) else 0
            dead = [index for index, process in enumerate(self._processes) if not process.is_alive()]
            if (failures or dead or max(stopped) >= STOPPED_POLLS) and not self._closing.is_set():
                time.sleep(_OTHERS_SECONDS)
                self._take(sources, failures)
                self._fail(_cause(self._processes, failures, dead, stopped))
                return

    def _take(self, sources: dict[Connection, int], failures: dict[int, Failed]) -> None:
        for replies, rank in list(sources.items()):
            try:
                while replies.poll():
                    message = replies.recv()
                    if isinstance(message, Failed):
                        failures[rank] = message
                    else:
                        self._answers.put(message)
            except (EOFError, OSError):
                del sources[replies]

    def _fail(self, reason: str) -> None:
        if self._closing.is_set():
            return
        self._failure = reason
        for process in self._processes:
            process.kill()
        self._failed.set()
        if self._on_failure is not None:
            self._on_failure(reason)


def _cause(processes: Sequence[SpawnProcess], failures: dict[int, Failed], dead: list[int], stopped: list[int]) -> str:
    """Return the reason of the end: a rank's own error, a rank that was killed or stopped, or what ranks noticed."""
    for rank, failed in sorted(failures.items(), key=lambda one: one[1].of_another):
        if not failed.of_another:
            return f"rank {rank} failed: {failed.problem}"
    for index in dead:
        code = processes[index].exitcode
        if index + 1 not in failures:
            how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            return f"the process of rank {index + 1} ended {how}"
    for index, polls in enumerate(stopped):
        if polls:
            return f"the process of rank {index + 1} was stopped (SIGSTOP), so that the others waited for it"
    return next(iter(failures.values())).problem if failures else "a rank ended"


def _end_all(processes: Sequence[SpawnProcess], folder: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    shutil.rmtree(folder, ignore_errors=True)
