"""The other ranks, as rank 0 sees them: their processes, the messages to them, and how they end."""

from __future__ import annotations

import itertools
import pickle
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty
from typing import Any

from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.ranks.connect import connect
from phonograph.engine.process.ranks.lead_runner import LeadRunner
from phonograph.engine.process.ranks.lead_sleeper import LeadSleeper
from phonograph.engine.process.ranks.rank_process import POLL_SECONDS
from phonograph.engine.process.ranks.rank_processes import RankProcesses
from phonograph.engine.process.ranks.rank_step import Capture, Command, RankSleep, RankWakeUp, Verify
from phonograph.errors import PhonographError, RankError, cause_text
from phonograph.graphs.verification import Mismatch

_CAUSE_SECONDS = 4.0
"""Longest wait for the reason of a failed operation."""
_CLOSE_SECONDS = 2.0


class RankGroup:
    """Ranks 1 and above, each in a process of its own. One thread uses it.

    ranks: connection of rank 0 with the others

    Args:
        plan: of the engine; each rank gets it.
        processes: of the other ranks; None starts them.
        on_failure: of processes that are started here; see `RankProcesses`.
    """

    def __init__(
        self,
        plan: EnginePlan,
        processes: RankProcesses | None = None,
        *,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        started = processes or RankProcesses(
            plan.config.tensor_parallel_size, on_gpu=plan.device.kind != "cpu", on_failure=on_failure
        )
        self._commands, self._processes = started.commands, started.processes
        self._runner: weakref.ref[LeadRunner] | None = None
        self._watch, self._started = started.watch, started
        folder = Path(tempfile.mkdtemp(prefix="phonograph-ranks-"))
        self._remove = Finalize(self, shutil.rmtree, (folder, True), exitpriority=5)
        with self._closed_on_error(), self.first_error():
            self.send((plan, folder))
            self.ranks = connect(plan, folder, 0)
            self._watch.abort = self.ranks.abort

    def send(self, message: Command | tuple[EnginePlan, Path]) -> None:
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
        self._started.close()
        self._remove()
        self._watch.thread.join()

    @contextmanager
    def _closed_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise
