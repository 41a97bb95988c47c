"""Code blocks of the documentation that are marked as runnable, and the examples, run on the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from installed_backend import EXAMPLE

from checks.processes import ServerProcess, free_port
from phonograph.cli.app import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- (runnable(?: with a server)?) -->\n```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SERVER = "http://127.0.0.1:8000"
"""Address of the server in the documentation; blocks that need one get the test's."""
BLOCKS = {
    page: BLOCK.findall(page.read_text(encoding="utf-8"))
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if BLOCK.search(page.read_text(encoding="utf-8"))
}
ALONE = [page for page, blocks in BLOCKS.items() if any(mark == "runnable" for mark, *_ in blocks)]


def run_block(page: Path, language: str, text: str) -> None:
    """Run a block of Python, or lines of `phonograph` commands in this process."""
    if language == "python":
        exec(compile(text, str(page), "exec"), {})
        return
    for line in text.replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "phonograph"
        assert main(arguments) == 0, line


@pytest.mark.parametrize("page", ALONE, ids=lambda page: page.stem)
def test_the_runnable_blocks_of_a_page_run(page: Path) -> None:
    for mark, language, text in BLOCKS[page]:
        if mark == "runnable":
            run_block(page, language, text)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("chat", r"19\b[^\n]*\n[\s\S]*26\b"),
        ("streaming", r"19\b"),
        ("structured_output", r"\{'kind': '(apples|cards)', 'number': \d+\}"),
        ("graph_decisions", r"mode: FULL[\s\S]*\d+ steps: full decode"),
    ],
)
def test_an_example_prints_its_answer(name: str, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(pattern, capsys.readouterr().out)


def test_the_notebook_plots_decisions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run one after another, without Jupyter, and its file has no outputs."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    plotting = pytest.importorskip("matplotlib.pyplot")
    figures: list[list[str]] = []
    monkeypatch.setattr(plotting, "show", lambda: figures.append([axes.get_title() for axes in plotting.gcf().axes]))
    notebook = json.loads((ROOT / "examples" / "step_decisions.ipynb").read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), "step_decisions.ipynb", "exec"), values)
    plotting.close("all")
    assert figures == [["Decodes", "Mixed batches"], ["Mixed batches"]]
    assert values["shares"]["FULL"] == [1.0, 0.0, 0.0] and values["shares"]["FULL_AND_PIECEWISE"] == [0.0, 1.0, 0.0]
    assert "FULL: the default where support is ALWAYS" in capsys.readouterr().out


def test_the_asynchronous_example_answers_both_questions(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "async_llm.py"))
    asyncio.run(example["main"]())
    pieces = re.findall(r"^(\d): '(.*)'$", capsys.readouterr().out, flags=re.MULTILINE)
    answers = ["".join(text for number, text in pieces if number == asked) for asked in "01"]
    assert "19" in answers[0] and "26" in answers[1]


def test_the_example_backend_answers(installed: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = re.search(r"^    phonograph (generate.*\\\n.*)$", (EXAMPLE / "README.md").read_text(), flags=re.MULTILINE)
    assert command is not None
    arguments = shlex.split(command[1].replace("\\\n", ""))
    assert installed in arguments
    assert main([*arguments, "--cudagraph-capture-sizes", "1,32"]) == 0
    assert re.search(r"19\b", capsys.readouterr().out)


def test_examples_and_blocks_that_need_a_server_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path / "server.log"
    flags = ("--max-num-seqs", "2", "--max-model-len", "1024", "--cudagraph-capture-sizes", "1,2")
    command = [sys.executable, "-m", "phonograph", "serve", "demo", "--port", url.rpartition(":")[2], *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    server = ServerProcess("the server", command, url=url, log=log, environment=environment)
    try:
        server.wait_until_ready(120, print)
        for name, pattern in (
            ("openai_client", r"19\b[\s\S]*\nadd \{"),
            ("tools", r"(add|subtract) \{.*\} = -?\d+\n.+"),
        ):
            monkeypatch.setattr(sys, "argv", [f"{name}.py", f"{url}/v1"])
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
            assert re.search(pattern, capsys.readouterr().out)
        for page, blocks in BLOCKS.items():
            for mark, language, text in blocks:
                if mark != "runnable":
                    assert SERVER in text
                    run_block(page, language, text.replace(SERVER, url))
    finally:
        server.stop()
