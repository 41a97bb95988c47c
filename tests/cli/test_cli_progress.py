"""Progress of the commands: lines at an interval where stderr is no terminal, bars on one."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest

from phonograph.cli import progress
from phonograph.cli.app import main

SHIPPED = progress.INTERVAL


class Watched(io.StringIO):
    """A stream that tells when it has a text."""

    def __init__(self) -> None:
        super().__init__()
        self.found = threading.Event()
        self.wanted = "\n"

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.wanted in self.getvalue():
            self.found.set()
        return written


def test_a_phase_that_reports_once_is_printed_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    stream = Watched()
    with redirect_stderr(stream), progress.progress_bar() as report:
        stream.wanted = "graphs: 3 of 50, after 0 s\ngraphs: 3 of 50, after "
        report("graphs", 3, 50)
        assert stream.found.wait(30)
        stream.found.clear()
        stream.wanted = "problems: 4 of 8, 0.500 right, after "
        report("problems", 4, 8, "0.500 right")
        assert stream.found.wait(30)
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_short_work_prints_nothing_and_a_closed_stderr_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHIPPED == 10
    stream = Watched()
    with redirect_stderr(stream), progress.progress_bar() as report:
        report("graphs", 1, 2)
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    with redirect_stderr(stream), progress.progress_bar() as report:
        (writer,) = (thread for thread in threading.enumerate() if thread.name == "progress")
        stream.close()
        report("graphs", 1, 2)
        writer.join(30)
        assert not writer.is_alive()


FEW = ["--model", "demo", "--max-num-seqs", "2", "--cudagraph-capture-sizes", "1", "--max-model-len", "512"]


@pytest.mark.parametrize(
    ("command", "phase"),
    [
        (["verify", *FEW, "--replays", "20"], "replays: "),
        (["bench", "latency", *FEW, "--input-len", "20"], "latency batches: "),
    ],
    ids=["verify", "bench"],
)
def test_commands_say_where_they_are(command: list[str], phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval is so short that each phase is met."""
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    stream = io.StringIO()
    with redirect_stderr(stream):
        assert main(command) == 0
    assert phase in stream.getvalue()


def test_a_terminal_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    console: Callable[..., object] = progress.Console
    stream = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: console(file=stream, force_terminal=True, width=80))
    with progress.progress_bar() as report:
        report("problems", 3, 4, "0.750 right")
    assert "problems" in stream.getvalue() and "3/4" in stream.getvalue() and "0.750 right" in stream.getvalue()
