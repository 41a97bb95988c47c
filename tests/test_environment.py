"""`scripts/environment` says what it does while pip runs, and shows pip's output if that fails. pip is a stub here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = """#!/usr/bin/env bash
here=$(dirname "$0")
case "$*" in
"-m pip --version") ;;
-c*) [ -f "$here/torch" ] && echo 2.11.0 ;;
*+cpu) echo "no such version" && exit 1 ;;
*) echo "Collecting everything" && sleep 0.6 && touch "$here/torch" "$here/phonograph" && chmod +x "$here/phonograph" ;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Make a virtual environment whose Python is a stub of pip."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(PIP)
    python.chmod(0o755)
    return tmp_path


def ensure(venv: Path) -> subprocess.CompletedProcess[str]:
    program = "set -euo pipefail; source scripts/environment; progress_seconds=0.2; ensure_environment dev; echo $venv"
    environment = {**os.environ, "PHONOGRAPH_VENV": str(venv)}
    return subprocess.run(
        ["bash", "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_each_step_of_an_installation_is_named_and_its_progress_shown(venv: Path) -> None:
    result = ensure(venv)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{venv}\n"
    steps = re.findall(r"^(?:Making|Installing) .* \.\.\.$", result.stderr, flags=re.MULTILINE)
    assert steps[0] == f"Making the environment {venv} ..."
    assert steps[-1] == "Installing Phonograph and what it needs ..."
    assert any("torch" in step for step in steps)
    last = result.stderr.split(steps[-1])[1]
    assert re.search(r"^  \d+ s: Collecting everything$", last, flags=re.MULTILINE)
    assert re.search(r"Installed in \d+ s\.$", last.strip())
    again = ensure(venv)
    assert (again.stdout, again.stderr) == (result.stdout, "")


def test_a_failed_installation_shows_the_output_of_pip(venv: Path) -> None:
    (venv / "bin" / "torch").touch()
    python = venv / "bin" / "python"
    python.write_text(PIP.replace("*+cpu)", "*editable*)"))
    result = ensure(venv)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.endswith("Installing Phonograph and what it needs ...\nIt failed:\nno such version\n")
    assert not list(venv.glob(".phonograph*")), "a failed installation counted as done"
