"""Code blocks of the documentation that are marked as runnable, and the examples, run on the demo model."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from checks.processes import ServerProcess, free_port
from phonograph.cli.app import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- runnable -->\n```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if BLOCK.search(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_runnable_blocks_of_a_page_run(page: Path) -> None:
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(text, str(page), "exec"), {})
            continue
        for line in text.replace("\\\n", "").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "phonograph"
            assert main(arguments) == 0, line


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


def test_the_openai_client_gets_a_stream_and_a_tool_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path / "server.log"
    flags = ("--max-num-seqs", "2", "--max-model-len", "1024", "--cudagraph-capture-sizes", "1,2")
    command = [sys.executable, "-m", "phonograph", "serve", "demo", "--port", url.rpartition(":")[2], *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    server = ServerProcess("the server", command, url=url, log=log, environment=environment)
    try:
        server.wait_until_ready(120, print)
        monkeypatch.setattr(sys, "argv", ["openai_client.py", f"{url}/v1"])
        runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")
    finally:
        server.stop()
    assert re.search(r"19\b[\s\S]*\nadd \{", capsys.readouterr().out)
