"""README's examples print what README shows."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from phonograph.cli.app import main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("command", ["explain", "config"])
def test_a_command_prints_what_readme_shows(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in blocks("") if block.startswith(f"$ phonograph {command} ")]
    typed, _, shown = block.replace("\\\n", "").partition("\n")
    monkeypatch.setenv("COLUMNS", "110")
    code = main(shlex.split(typed)[2:])
    captured = capsys.readouterr()
    printed = "\n".join(line.rstrip() for line in (captured.out or captured.err).splitlines())
    assert code == (2 if command == "config" else 0)
    # Dots stand for the lines before.
    assert printed.endswith(shown.removeprefix("...\n").rstrip("\n")) and len(shown) > 100


def test_the_python_example_answers_by_the_graphs_that_readme_names(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block for block in blocks("python") if "LLM(" in block]
    exec(compile(program, "README.md", "exec"), {})
    answer, steps = capsys.readouterr().out.splitlines()
    assert answer.split()[-1].rstrip(".") == "19"
    assert steps in program and isinstance(eval(steps, {"Counter": Counter}), Counter)
