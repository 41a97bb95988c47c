"""Processes of the other ranks, which can start before rank 0 has imported torch."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue

from phonograph.engine.process.ranks.rank_process import (
    POLL_SECONDS,
    STOPPED_POLLS,
    Failed,
    is_stopped,
    run_rank,
)

_OTHERS_SECONDS = 0.5
"""Time in which other ranks may report errors after the first one was noticed, which may follow from theirs."""


class Watch:
    """Thread that takes the answers of the ranks, until one of them ends by itself or `closing` is set.

    It has no reference to their owner, so that one that nothing uses is collected, and the processes end.

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


class RankProcesses:
    """Processes of ranks 1 and above. They import what ranks need, and wait for the plan and the ranks' folder.

    processes: of the ranks, in their order
    commands:  connection to each of them
    watch:     takes their answers
    close:     kills the processes; also called when this object or the process ends

    Args:
        num_ranks: number of ranks, with rank 0.
        on_gpu: each rank has a GPU.
        last_words: connection by which ranks say why the engine ends, if rank 0's process has only the engine. They
            then kill a stopped rank 0.
        on_failure: called with the reason when a rank has ended by itself and all are killed, mostly on another
            thread.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        on_gpu: bool,
        last_words: Connection | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.processes: list[SpawnProcess] = []
        self.commands: list[Connection] = []
        all_replies: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(1, num_ranks):
            theirs, commands = context.Pipe(duplex=False)
            replies, answers = context.Pipe(duplex=False)
            words = rank, on_gpu, theirs, answers, last_words
            process = context.Process(target=run_rank, args=words, name=f"phonograph-rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            answers.close()
            self.processes.append(process)
            self.commands.append(commands)
            all_replies.append(replies)
        self.watch = Watch(self.processes, all_replies, on_failure)
        self.close = Finalize(self, _end_all, (self.processes, self.watch), exitpriority=10)


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


def _end_all(processes: Sequence[SpawnProcess], watch: Watch) -> None:
    # First, so that the end of the processes does not count as a failure.
    watch.closing.set()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
