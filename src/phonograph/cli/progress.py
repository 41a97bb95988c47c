"""Progress on stderr: a bar for each phase on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

INTERVAL = 10.0
"""Seconds between two lines if stderr is not a terminal."""


@contextmanager
def progress_bar() -> Generator[Callable[..., None]]:
    """Yield a function that takes (phase, done, total) and an optional remark, such as a score."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines() as show:
            yield show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int, remark: str = "") -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total, remark=remark)
            bar.update(tasks[phase], completed=done, total=total, remark=remark)

        yield report


@contextmanager
def _lines() -> Generator[Callable[..., None]]:
    """Print the latest report every INTERVAL seconds from a thread, since a phase may report less often."""
    latest = ""
    began = time.monotonic()
    ended = threading.Event()
    stream = sys.stderr

    def report(phase: str, done: int, total: int, remark: str = "") -> None:
        nonlocal latest
        latest = f"{phase}: {done} of {total}," + (f" {remark}," if remark else "")

    def write() -> None:
        while not ended.wait(INTERVAL):
            if latest:
                try:
                    print(f"{latest} after {time.monotonic() - began:.0f} s", file=stream, flush=True)
                except (OSError, ValueError):  # stderr is closed; the work goes on
                    return

    writer = threading.Thread(target=write, name="progress", daemon=True)
    writer.start()
    try:
        yield report
    finally:
        ended.set()
        writer.join()
