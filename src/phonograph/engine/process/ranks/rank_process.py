"""Entry point of the process of another rank than 0, which runs until rank 0 closes its connection or ends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import psutil

from phonograph.engine.startup.early_start import start_early
from phonograph.errors import PhonographError, RankError, cause_text

POLL_SECONDS = 0.5
"""Interval at which ranks look at the processes of others."""
STOPPED_POLLS = 3
"""Polls in a row that find a process stopped, until it counts as stuck: SIGCONT wakes processes one by one."""


class Failed(NamedTuple):
    """End of a rank by an error; `of_another` is True if it only noticed that another rank is missing."""

    problem: str
    of_another: bool


def run_rank(rank: int, on_gpu: bool, commands: Connection, answers: Connection, last_words: Connection | None) -> None:
    """Run a rank.

    Args:
        rank: its number.
        on_gpu: the ranks have GPUs.
        commands: messages of rank 0; the first one is the plan, and the folder through which the ranks find each other.
        answers: takes answers, and the error by which the rank ends.
        last_words: takes the reason if rank 0 is stuck; None if its process is not the engine's own.
    """
    # Ctrl-C and SIGTERM reach all processes of a service; rank 0 ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_watch_rank_0, args=(rank, last_words), name="watch-rank-0", daemon=True).start()
    if on_gpu:
        start_early(rank)
    try:
        # Imports torch, which takes seconds; by then the rank watches rank 0.
        from phonograph.engine.process.ranks.connect import connect
        from phonograph.engine.process.ranks.follow_rank import serve_rank

        plan, folder = pickle.loads(commands.recv_bytes())
        serve_rank(plan, connect(plan, folder, rank), commands, answers)
        # Without the end of Python, in which NCCL would wait for the graphs.
        os._exit(0)
    except BaseException as error:
        own = isinstance(error, PhonographError)
        of_another = isinstance(error, RankError) and error.of_another
        with suppress(OSError):
            answers.send(Failed(str(error) if own else cause_text(error), of_another))
        if own:
            os._exit(1)
        raise


def _watch_rank_0(rank: int, last_words: Connection | None) -> None:
    """End with the process of rank 0, or end it when it is stopped and is the engine's own."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "rank 0 starts this process"
    stopped = 0
    while not wait([parent.sentinel], POLL_SECONDS):
        stopped = stopped + 1 if last_words is not None and is_stopped(parent.pid) else 0
        if stopped >= STOPPED_POLLS and last_words is not None:
            with suppress(OSError):
                last_words.send(f"the engine's process was stopped (SIGSTOP), so that rank {rank} waited for it")
            os.kill(parent.pid, signal.SIGKILL)
    os._exit(1)


def is_stopped(pid: int | None) -> bool:
    """Return True if a process was stopped by a signal."""
    try:
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
