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
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.ranks.connect import connect
from phonograph.engine.process.ranks.lead_runner import LeadRunner
from phonograph.engine.process.ranks.lead_sleeper import LeadSleeper
from phonograph.engine.process.ranks.rank_process import POLL_SECONDS, STOPPED_POLLS, Place, is_stopped, run_rank
from phonograph.engine.process.ranks.rank_step import Capture, Command, Failed, RankSleep, RankWakeUp, Verify
from phonograph.errors import PhonographError, RankError, cause_text
from phonograph.graphs.verification import Mismatch

_OTHERS_SECONDS = 0.5
"""Time in which other ranks may report errors after the first one was noticed, which may follow from theirs."""
_CAUSE_SECONDS = 4.0
"""Longest wait for the reason of a failed operation."""
_CLOSE_SECONDS = 2.0


class _Watch:
    """Thread that takes the answers of the ranks, until one of them ends by itself or `closing` is set.

    It has no reference to the group, so that a group that nothing uses is collected, and its processes end.

    answers:     of the ranks
    failure:     reason of the end of a rank; set before `failed`
    abort:       ends what rank 0 waits for when a rank has ended
    """

    def __init__(
        self,
        processes: Sequence[SpawnProcess],
        replies: Sequence[Connection],
        on_failure: Callable[[str], None] | None,
    ) -> None:
        self.answers: SimpleQueue[object] = SimpleQueue()
        self.failure: str | None = None
        self.abort: Callable[[], None] | None = None
        self.failed, self.closing = threading.Event(), threading.Event()
        self._processes, self._on_failure = processes, on_failure
        self._sources = {connection: rank for rank, connection in enumerate(replies, 1)}
        self._failures: dict[int, Failed] = {}
        self.thread = threading.Thread(target=self._run, name="phonograph-ranks", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        stopped = [0] * len(self._processes)
        while not self.closing.is_set():
            wait([*self._sources, *(process.sentinel for process in self._processes)], POLL_SECONDS)
            self._take()
            for index, process in enumerate(self._processes):
                stopped[index] = stopped[index] + 1 if is_stopped(process.pid) else 0
            dead = [index for index, process in enumerate(self._processes) if not process.is_alive()]
            if (self._failures or dead or max(stopped) >= STOPPED_POLLS) and not self.closing.is_set():
                time.sleep(_OTHERS_SECONDS)
                self._take()
                self.fail(_cause(self._processes, self._failures, dead, stopped))
                return

    def _take(self) -> None:
        for replies, rank in list(self._sources.items()):
            try:
                while replies.poll():
                    message = replies.recv()
                    if isinstance(message, Failed):
                        self._failures[rank] = message
                    else:
                        self.answers.put(message)
            except (EOFError, OSError):
                del self._sources[replies]

    def fail(self, reason: str) -> None:
        """End all ranks, unless they have ended."""
        if self.closing.is_set() or self.failed.is_set():
            return
        self.failure = reason
        for process in self._processes:
            process.kill()
        self.failed.set()
        if self.abort is not None:
            self.abort()
        if self._on_failure is not None:
            self._on_failure(reason)


class RankGroup:
    """Ranks 1 and above, each in a process of its own. One thread uses it.

    ranks: connection of rank 0 with the others

    Args:
        plan: of the engine; each rank gets it.
        on_failure: called with the reason when a rank has ended by itself and all are killed, mostly on another
            thread.
        last_words: connection by which ranks say why the engine ends, if rank 0's process has only the engine. They
            then kill a stopped rank 0.
    """

    def __init__(
        self, plan: EnginePlan, *, on_failure: Callable[[str], None] | None = None, last_words: Connection | None = None
    ) -> None:
        size = plan.config.tensor_parallel_size
        folder = Path(tempfile.mkdtemp(prefix="phonograph-ranks-"))
        replies: list[Connection] = []
        self._commands: list[Connection] = []
        self._runner: weakref.ref[LeadRunner] | None = None
        self._processes: list[SpawnProcess] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(1, size):
            theirs, commands = context.Pipe(duplex=False)
            answers_of_rank, answers = context.Pipe(duplex=False)
            place = Place(rank, str(folder), plan.device.kind != "cpu")
            process = context.Process(
                target=run_rank, args=(place, theirs, answers, last_words), name=f"phonograph-rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            answers.close()
            self._processes.append(process)
            self._commands.append(commands)
            replies.append(answers_of_rank)
        self._watch = _Watch(self._processes, replies, on_failure)
        self._end = Finalize(self, _end_all, (self._processes, self._watch, folder), exitpriority=10)
        with self._closed_on_error(), self.first_error():
            self.send(plan)
            self.ranks = connect(plan, folder, 0)
            self._watch.abort = self.ranks.abort

    def send(self, message: Command | EnginePlan) -> None:
        """Send a message to each rank."""
        words = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for commands in self._commands:
            commands.send_bytes(words)

    def make_runner(self, **parts: Any) -> LeadRunner:
        """Make the runner of rank 0 of these parts."""
        runner = LeadRunner(self, **parts)
        self._runner = weakref.ref(runner)
        return runner

    def make_sleeper(self, *parts: Any) -> LeadSleeper:
        """Make the sleeper of rank 0 of these parts."""
        return LeadSleeper(self, *parts)

    def check(self) -> None:
        """Raise RankError if a rank has ended by itself, so that results of rank 0 are arbitrary."""
        if self._watch.failed.is_set():
            raise RankError(self._watch.failure or "a rank ended")

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

    @contextmanager
    def executing(self, verb: RankSleep | RankWakeUp) -> Generator[list[PhonographError]]:
        """Return a context in which every rank executes a verb, with the list that gets the errors of the others.

        Any other error ends all ranks, also one of rank 0.
        """
        errors: list[PhonographError] = []
        with self.first_error():
            self.send(verb)
            try:
                yield errors
                errors += [error for error in self.answers() if error is not None]
            except BaseException as error:
                if not isinstance(error, RankError):
                    self.fail(f"rank 0 failed: {cause_text(error)}")
                raise

    def fail(self, reason: str) -> None:
        """End all ranks for an error that rank 0 found."""
        self._watch.fail(reason)

    def answers(self) -> list[Any]:
        """Wait for an answer of each rank; raises RankError if one ends."""
        found: list[Any] = []
        while len(found) < len(self._processes):
            self.check()
            with suppress(Empty):
                found.append(self._watch.answers.get(timeout=POLL_SECONDS))
        return found

    @contextmanager
    def first_error(self) -> Generator[None]:
        """Return a context that raises the error by which a rank ended, in place of errors that follow from it."""
        try:
            yield
        except (RankError, OSError) as error:
            if isinstance(error, RankError) and not error.of_another:
                raise
            self._watch.failed.wait(_CAUSE_SECONDS)
            raise RankError(self._watch.failure or str(error)) from error

    def close(self) -> None:
        """End the ranks."""
        self._watch.closing.set()
        for commands in self._commands:
            commands.close()
        until = time.monotonic() + _CLOSE_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        runner = None if self._runner is None else self._runner()
        if runner is not None:
            runner.drop_graphs()
        if self._watch.abort is not None:
            # Before the folder goes, which threads of the connection read.
            self._watch.abort()
        self._end()
        self._watch.thread.join()

    @contextmanager
    def _closed_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


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


def _end_all(processes: Sequence[SpawnProcess], watch: _Watch, folder: Path) -> None:
    watch.closing.set()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    shutil.rmtree(folder, ignore_errors=True)
