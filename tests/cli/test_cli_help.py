"""Help of every command: its examples, its page of the documentation, and completion in a shell."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run

from phonograph.cli.app import COMMANDS, app, main
from phonograph.cli.examples import DOCS, USAGE

ROOT = Path(__file__).parents[2]


def commands() -> Iterator[str]:
    """Return the words of each command, "" for the program."""
    yield ""
    for name in COMMANDS:
        yield name
        if name == "bench":
            yield from (f"{name} {one}" for one in app[name] if not one.startswith("-"))


def test_each_command_has_its_usage() -> None:
    assert set(USAGE) == set(commands())


@pytest.mark.parametrize("command", USAGE)
def test_help_ends_in_examples_of_the_command_and_its_page(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps the width of its first help, and other tests read help of this width.
    monkeypatch.setenv("COLUMNS", "160")
    printed = run(capsys, *command.split(), "--help")
    lines = [line.rstrip() for line in printed.rpartition("Examples:\n")[2].splitlines()]
    page = f"{DOCS}{USAGE[command].page}"
    examples = [f"  phonograph {one}" for one in USAGE[command].examples]
    assert lines == [*examples, "", f"Documentation: {page}"]
    # Rich cuts longer lines in two on a terminal of 80 columns, and then they cannot be copied.
    assert all(len(line) <= 80 for line in lines)
    assert (ROOT / page).is_file()


@pytest.mark.parametrize("command", USAGE)
def test_examples_are_of_their_command_and_parse(command: str) -> None:
    for example in USAGE[command].examples:
        words = shlex.split(example.partition(" <")[0])
        assert example.startswith(command)
        if words[0] == "--install-completion":
            continue
        function, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
        assert callable(function)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_is_installed_and_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "Completion script installed" in run(capsys, "--install-completion", "--shell", "bash")
    assert "phonograph" in (tmp_path / ".bashrc").read_text()
    (script,) = tmp_path.rglob("completions/phonograph")

    def completed(*words: str) -> list[str]:
        line = shlex.join(words)
        ask = (
            f"source {shlex.quote(str(script))}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            f"COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}; "
            "$(complete -p phonograph | sed 's/.*-F \\([^ ]*\\) .*/\\1/') 2>/dev/null; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(["bash", "--norc", "-c", ask], check=True, capture_output=True, text=True)
        return done.stdout.split()

    assert completed("phonograph", "mo") == ["models"]
    assert "--max-num-seqs" in completed("phonograph", "chat", "--max-num")
    assert "latency" in completed("phonograph", "bench", "la")


def test_a_completion_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "completion")
    assert main(["--install-completion", "--shell", "bash", "--output", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"phonograph: error: .*/file.* cannot be written: ", line)
