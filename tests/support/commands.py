"""Commands that are run in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from phonograph.cli import progress
from phonograph.cli.app import main

Program = Callable[[list[str]], int]


def run(capsys: pytest.CaptureFixture[str], *tokens: str, code: int = 0, program: Program = main) -> str:
    """Run a command of a program, check its exit code, and return its standard output."""
    got = program(list(tokens))
    captured = capsys.readouterr()
    assert got == code, captured.err
    return captured.out


def run_json(
    capsys: pytest.CaptureFixture[str], *tokens: str, code: int = 0, program: Program = main
) -> dict[str, Any]:
    """Run a command with --json and return the one object that it prints."""
    (line,) = run(capsys, *tokens, "--json", code=code, program=program).splitlines()
    return json.loads(line)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove settings from the environment, and make the output's width and progress independent of the machine."""
    for name in os.environ:
        if name.startswith("PHONOGRAPH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    # A busy machine takes so long that progress would be among the lines that a test reads.
    monkeypatch.setattr(progress, "INTERVAL", 600)
