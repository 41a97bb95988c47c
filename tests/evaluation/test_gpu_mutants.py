"""Faults that are planted in kernels: each has its place in today's sources, and what tests say is read right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checks import gpu_mutants
from checks.checks import ROOT
from checks.gpu_mutants import Copy
from checks.kernel_faults import FAULTS, KERNELS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_planted(fault: Fault) -> None:
    path = ROOT / KERNELS / fault.file
    planted = path.read_text().replace(fault.old, fault.new)
    assert path.read_text().count(fault.old) == 1 and fault.old != fault.new
    compile(planted, str(path), "exec")
    tests = [part for part in (*fault.narrow, *fault.broad) if part.startswith("tests/")]
    assert tests and all((ROOT / part.partition("::")[0]).exists() for part in tests)


def test_faults_differ() -> None:
    assert len(FAULTS) == 41 == len({fault.name for fault in FAULTS})


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / KERNELS / FAULTS[0].file
    path.parent.mkdir(parents=True)
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"the text to replace occurs 0 times in gemm/hopper/gemm_ring\.py, not once"):
        FAULTS[0].plant(tmp_path)


def test_states_of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that fail, pass, skip and do not exist, and one that ends its process or does not end."""
    lines = "import os, time, pytest\n"
    bodies = ("assert 1 == 2", "pass", "pytest.skip('no GPU')", "os.abort()", "time.sleep(60)")
    for number, body in enumerate(bodies):
        lines += f"def test_{'abcde'[number]}(): {body}\n"
    (tmp_path / "root/tests").mkdir(parents=True)
    (tmp_path / "root/src").mkdir()
    (tmp_path / "root/tests/test_some.py").write_text(lines)
    monkeypatch.setattr(gpu_mutants, "ROOT", tmp_path / "root")
    monkeypatch.setattr(gpu_mutants, "_LINKED", ())
    copy = Copy(tmp_path / "copy", tmp_path / "kernels")

    def run(name: str, limit: float = 60) -> tuple[str, str]:
        return copy.test([f"tests/test_some.py::{name}"], limit=limit)

    assert run("test_a") == ("killed", "test_some::test_a")
    assert run("test_b")[0] == "survived"
    assert run("test_c")[0] == run("test_z")[0] == "not run"
    state, by = run("test_d")
    assert state == "killed" and "ended with code -6" in by
    state, by = run("test_e", 3)
    assert state == "killed" and "no end within 3 s" in by


def test_the_list() -> None:
    command = [sys.executable, "-m", "checks.gpu_mutants", "--list"]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.count("1 times") == len(FAULTS), done.stderr
