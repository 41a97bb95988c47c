"""Code blocks of the documentation that are marked as runnable, and the examples, run on the demo model.

Marks of a block: `runnable`, `runnable with a server`, and `file NAME` for a file that later blocks of the page read.
`output` below a runnable block is what it prints, and `error` a command line with its error. Lines of dots stand for
others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from installed_backend import EXAMPLE

from checks.processes import ServerProcess, free_port
from phonograph.cli.app import main
from phonograph.errors import BackendError, ConfigError, MemoryLimitError, help_section

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^<!-- (runnable(?: with a server)?|error|file \S+) -->\n```(\w+)\n(.*?)^```$"
    r"(?:\n<!-- output -->\n```text\n(.*?)^```$)?",
    flags=re.MULTILINE | re.DOTALL,
)
COLUMNS = "100"
"""Width of the outputs in the documentation."""
SERVER = "http://127.0.0.1:8000"
"""Address of the server in the documentation; blocks that need one get the test's."""
BLOCKS = {
    page: BLOCK.findall(page.read_text(encoding="utf-8"))
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if BLOCK.search(page.read_text(encoding="utf-8"))
}
WITH_SERVER = "runnable with a server"
ALONE = [page for page, blocks in BLOCKS.items() if any(mark != WITH_SERVER for mark, *_ in blocks)]


def run_block(page: Path, language: str, text: str) -> None:
    """Run a block of Python, or lines of `phonograph` commands in this process."""
    if language == "python":
        exec(compile(text, str(page), "exec"), {})
        return
    if text.startswith("curl "):
        _, url, *options = shlex.split(text)
        headers = {name: value for name, value in itertools.pairwise(options) if name.startswith("-")}
        answer = httpx.post(url, content=headers["-d"], headers=[tuple(headers["-H"].split(": "))], timeout=60)
        assert answer.status_code == 200, answer.text
        return
    for line in text.replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "phonograph"
        assert main(arguments) == 0, line


def check_output(shown: str, printed: str) -> None:
    """Compare an output with what a block printed, without spaces at the ends of lines."""
    rest = "\n".join(line.rstrip() for line in printed.splitlines())
    for place, part in enumerate(re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)):
        lines = part.rstrip("\n")
        assert lines in rest if place else rest.startswith(lines), f"{lines}\n--- is not in\n{rest}"
        rest = rest[rest.index(lines) + len(lines) :]
    assert shown.endswith("...\n") or not rest.strip(), rest


@pytest.mark.parametrize("page", ALONE, ids=lambda page: page.stem)
def test_the_runnable_blocks_of_a_page_run(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    for mark, language, text, output in BLOCKS[page]:
        capsys.readouterr()
        if mark.startswith("file "):
            (tmp_path / mark.removeprefix("file ")).write_text(text, encoding="utf-8")
        elif mark == "error":
            command, _, message = text.partition("\n")
            assert main(shlex.split(command.removeprefix("$ phonograph "))) == 2
            assert " ".join(capsys.readouterr().err.split()) == " ".join(message.split())
        elif mark == "runnable":
            run_block(page, language, text)
            if output:
                check_output(output, capsys.readouterr().out)


def test_an_output_with_a_wrong_line_is_found() -> None:
    check_output("...\ntwo\n...\nfour\n", "one\ntwo  \nthree\nfour\n")
    for shown in ("two\n", "...\nfive\n", "...\nfour\ntwo\n", "...\nthree\n"):
        with pytest.raises(AssertionError):
            check_output(shown, "one\ntwo\nthree\nfour\n")


def test_every_output_below_a_block_is_compared() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        count = page.read_text(encoding="utf-8").count("<!-- output -->")
        assert count == sum(bool(output) for *_, output in BLOCKS.get(page, ())), page


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("chat", r"19\b[^\n]*\n[\s\S]*26\b"),
        ("streaming", r"19\b"),
        ("embeddings", r"embed: convert=embed[\s\S]*: 1\.000"),
        ("structured_output", r"\{'kind': '(apples|cards)', 'number': \d+\}"),
        (
            "vllm_calls",
            r"log-probability -\d+\.\d{3}; queued at[\s\S]*length: Tom has 12[\s\S]*vllm:generation_tokens \{\} \d+",
        ),
        (
            "graph_decisions",
            r"mode: FULL[\s\S]*\d+ steps: full decode: decodes of one token.*\n1 step: eager: more tokens",
        ),
    ],
)
def test_an_example_prints_its_answer(
    name: str, pattern: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(pattern, capsys.readouterr().out)


def test_the_notebook_plots_decisions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run one after another, without Jupyter; they print what the file shows, and plot where it does."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    plotting = pytest.importorskip("matplotlib.pyplot")
    figures: list[list[str]] = []
    monkeypatch.setattr(plotting, "show", lambda: figures.append([axes.get_title() for axes in plotting.gcf().axes]))
    notebook = json.loads((ROOT / "examples" / "step_decisions.ipynb").read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count = len(figures)
            exec(compile("".join(cell["source"]), "step_decisions.ipynb", "exec"), values)
            shown = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
            assert capsys.readouterr().out == shown, "examples/README.md has the command that renews the outputs"
            plots = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
            assert len(plots) == len(figures) - count
    plotting.close("all")
    assert figures == [["Decodes", "Mixed batches"], ["Mixed batches"]]
    assert values["shares"]["FULL"] == [1.0, 0.0, 0.0] and values["shares"]["FULL_AND_PIECEWISE"] == [0.0, 1.0, 0.0]


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
            for mark, language, text, _ in blocks:
                if mark == WITH_SERVER:
                    assert SERVER in text
                    run_block(page, language, text.replace(SERVER, url))
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("error", "section"),
    [
        (MemoryLimitError("no memory"), "Out of memory"),
        (BackendError("no backend"), "No kernel"),
        (ConfigError("max_model_len", 9, "too long"), "Context too long"),
        (ConfigError("port", 9, "too low"), None),
        (ValueError("a bug"), None),
    ],
)
def test_an_error_names_a_section_that_exists(error: Exception, section: str | None) -> None:
    named = help_section(error)
    assert (named is None) == (section is None)
    if named is not None:
        path, _, anchor = named.partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert section in headings and anchor == str(section).lower().replace(" ", "-")
