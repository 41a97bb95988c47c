"""Faults by rule: each rule's change, and a run over a repository of one source and one test."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checks.mutants.rooms import ROOMS, all_tests, own_tests, sources_of
from checks.mutants.rules import faults_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "rule", "planted"),
    [
        ("x = a < b", "comparison", ["x = (a <= b)"]),
        ("x = a is not b", "comparison", ["x = (a is b)"]),
        ("f(3)", "constant", ["f((4))", "f((2))"]),
        ("x = a and b", "boolean", ["x = (a or b)", "x = (b)", "x = (a)"]),
        ("x = not a", "negation", ["x = (a)"]),
        ("x = max(a, b)", "extreme", ["x = (min)(a, b)"]),
        ("x = tl.minimum(a, b)", "extreme", ["x = (tl.maximum)(a, b)"]),
        ("x = a if b else c", "condition", ["x = a if (False) else c", "x = a if (True) else c"]),
        ("x = [a for a in b if a]", "condition", ["x = [a for a in b if (True)]"]),
        ("if a:\n    raise E", "guard", ["if (False):\n    raise E"]),
        ("f(a,\n  b)\ny = 1", "statement", ["pass\n\ny = 1"]),
        ("a.b += c", "statement", ["pass"]),
        ("x = a + b", "operand", ["x = (a)"]),
        ("x = a[b:c]", "bound", ["x = a[(b + 1):c]", "x = a[(b - 1):c]", "x = a[b:(c + 1)]", "x = a[b:(c - 1)]"]),
    ],
)
def test_each_rule(source: str, rule: str, planted: list[str]) -> None:
    assert [one.planted(source) for one in faults_of(source) if one.rule == rule] == planted


def test_statements_outside_of_functions_are_told_apart() -> None:
    faults = faults_of("A = 1\nclass B:\n    c: int = 2\n    def f(self, d=3):\n        return 4\ne = 5\n")
    assert {one.before: one.at_import for one in faults} == {"1": True, "2": True, "3": True, "4": False, "5": True}


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "assert a < 3",
        "raise E(f'{a + 1}', 3)",
        "logger.info('%d', 3)",
        "def f(x: Literal[1], *, y: int) -> Array[3]: ...",
        "@cache(3)\nclass C: ...",
        "x = f'{a < 3}' + 'more'",
        "f[(1,)](x, num_warps=8)".replace("[(1,)]", ""),
        "pdl_begin(PDL)",
    ],
)
def test_what_stays(source: str) -> None:
    assert [one for one in faults_of(source) if one.rule != "statement"] == []


def test_every_fault_of_the_core_can_be_parsed_and_keeps_the_lines() -> None:
    for room in ROOMS:
        for name in sources_of(ROOT, room)[::10]:
            assert own_tests(ROOT, room, name)
            source = (ROOT / name).read_text()
            for fault in faults_of(source)[::7]:
                planted = fault.planted(source)
                ast.parse(planted)
                assert planted != source and planted.count("\n") == source.count("\n") and fault.line in fault.span


def test_modules_that_only_a_gpu_runs_are_left_out() -> None:
    names = {Path(module).stem for module in all_tests(ROOT)}
    assert names >= {"test_gpu_path", "test_containment_gpu_path", "test_flash_attn", "test_mutants"}
    assert names.isdisjoint({"test_gpu_engine", "test_quantized_backends"})


SOURCE = """\
LIMIT = 3


def clipped(value):
    if value > LIMIT:
        return LIMIT
    return value
"""
TESTS = """\
from phonograph.scheduling.limits import clipped

def test_small():
    assert clipped(2) == 2

def test_large():
    assert clipped(9) == 3
"""


def test_a_run(tmp_path: Path) -> None:
    """A fault that changes nothing survives, the others are killed, and the repository stays as it was."""
    pytest.importorskip("coverage")
    for name in ("scripts/mutants", "benchmarks/checks"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    files = {"src/phonograph/scheduling/limits.py": SOURCE, "tests/scheduler/test_limits.py": TESTS}
    files |= {"src/phonograph/__init__.py": "", "src/phonograph/scheduling/__init__.py": "", ".gitignore": "build/\n"}
    files["pyproject.toml"] = '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n'
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = [sys.executable, "scripts/mutants", "--file", "src/phonograph/scheduling/limits.py", "--line", "5"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = {line.partition("limits.py:")[2]: line.split()[0] for line in lines if " src/" in line}
    assert found == {
        "5 guard: value > LIMIT -> False": "killed",
        "5 condition: value > LIMIT -> True": "killed",
        "5 comparison: value > LIMIT -> value >= LIMIT": "survived",
    }
    assert "tests/scheduler/test_limits.py::test_large, " in ended.stdout
    assert (tmp_path / "src/phonograph/scheduling/limits.py").read_text() == SOURCE
