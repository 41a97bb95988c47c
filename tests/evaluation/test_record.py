"""Provenance of results: enough to repeat them, and nothing about where this machine keeps its files."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from bench.result_files import write_result
from phonograph.bench.records import record

HERE = Path(__file__).parent


def test_a_result_file_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/phonograph", "bench", "latency", "--input-len", "3 4"])
    write_result(tmp_path / "new" / "result.json", record.provenance(), {"figure": 1.5, "name": "µ"})
    text = (tmp_path / "new" / "result.json").read_text(encoding="utf-8")
    assert text.endswith("}\n") and "µ" in text
    found = json.loads(text)
    assert found["figure"] == 1.5
    assert found["command"] == "phonograph bench latency --input-len '3 4'"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found["date"])).total_seconds()) < 60
    assert found["versions"]["torch"] == torch.__version__
    assert {"phonograph", "python", "transformers", "numpy"} < found["versions"].keys()
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["cpu"]
    assert found["threads"] == torch.get_num_threads()
    assert "/some/where" not in text and str(HERE) not in text


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("{here}/benchmarks/host_cost.py", "python benchmarks/host_cost.py -x"),
        ("benchmarks/host_cost.py", "python benchmarks/host_cost.py -x"),
        ("/else/where/host_cost.py", "python host_cost.py -x"),
        ("/some/where/phonograph/__main__.py", "python -m phonograph -x"),
    ],
)
def test_commands_are_as_one_would_type_them(
    program: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program.format(here=tmp_path), "-x"])
    assert record.provenance()["command"] == command


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_commit_and_uncommitted_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "record.py"
    source.parent.mkdir()
    source.write_text("as committed\n")
    monkeypatch.setattr(record, "__file__", str(source))
    assert record.provenance()["commit"] is None
    _git(tmp_path, "init", "-q")
    # In somebody's repository, but not part of it, as an installed package may be.
    (tmp_path / "theirs.txt").write_text("something\n")
    _git(tmp_path, "add", "theirs.txt")
    _git(tmp_path, "commit", "-qm", "theirs")
    assert record.provenance()["commit"] is None
    _git(tmp_path, "add", "src")
    _git(tmp_path, "commit", "-qm", "ours")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert record.provenance()["commit"] == {"id": head, "dirty": False}
    (tmp_path / "src" / "untracked.json").write_text("{}")
    (tmp_path / "theirs.txt").write_text("else\n")
    assert record.provenance()["commit"] == {"id": head, "dirty": False}
    source.write_text("changed\n")
    assert record.provenance()["commit"] == {"id": head, "dirty": True}
