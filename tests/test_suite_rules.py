"""The plugin with the rules of every run, in runs of their own: skips under CI=true, failures, the limit of time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TESTS = """
import time
import warnings

import pytest

def test_fails():
    assert 1 == 2

def test_skips():
    pytest.skip("no library")

@pytest.mark.gpu
def test_skips_too():
    pytest.skip("no GPU")

@pytest.mark.index
def test_skips_as_well():
    pytest.skip("no index")

def test_warns():
    warnings.warn("deprecated", DeprecationWarning)

def test_hangs():
    time.sleep(300)

def test_passes():
    pass
"""


def run(path: Path, *flags: str, **environment: str) -> str:
    """Run the tests of a file under this repository's settings, and return the printed output."""
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(path.parent), "-p", "no:cacheprovider"]
    # Plugins that these tests do not use take longer to import than the tests take.
    config += ["-p", "no:hypothesispytest", "-p", "no:anyio"]
    command = [sys.executable, "-m", "pytest", *config, "-p", "suite_rules", str(path), *flags]
    others = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    variables = {**others, "PYTHONPATH": str(ROOT / "tests/support"), **environment}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "test_some.py"
    path.write_text(TESTS)
    return path


def test_under_ci_only_tests_marked_gpu_or_index_skip(path: Path) -> None:
    without = run(path, "-k", "not hangs")
    assert "Skipped: 1 tests marked gpu, 2 others." in without
    assert without.splitlines()[-1].count("2 failed, 1 passed, 3 skipped") == 1
    output = run(path, "-k", "not hangs", CI="true")
    assert "Only tests marked `gpu` or `index` may skip under CI=true. Skipped: no library" in output
    assert "NOT RUN: test_some.py::test_skips_as_well. Skipped: no index" in output
    assert "Skipped: 1 tests marked gpu, 1 others." in output
    assert output.splitlines()[-1].count("3 failed, 1 passed, 2 skipped") == 1


def test_under_ci_no_file_skips_as_a_whole(tmp_path: Path) -> None:
    whole = tmp_path / "test_whole.py"
    whole.write_text('import pytest\npytest.importorskip("no_library")\n')
    (tmp_path / "test_other.py").write_text("def test_fails():\n    assert False\n")
    config = ["--continue-on-collection-errors", str(tmp_path / "test_other.py")]
    assert "1 failed, 1 skipped" in run(whole, *config)
    output = run(whole, *config, CI="true")
    assert "could not import 'no_library'" in output and "1 failed, 1 error" in output


def test_a_failure_and_a_hanging_test_are_reported_at_once(path: Path) -> None:
    limit = ["-o", "faulthandler_timeout=0.5", "--numprocesses", "1"]
    output = run(path, "-k", "fails or hangs or passes", *limit)
    at_once, _, at_the_end = output.partition("= FAILURES =")
    assert "test_fails failed in call" in at_once and "assert 1 == 2" in at_once
    assert "crashed while running 'test_some.py::test_hangs'" in at_once
    assert at_the_end.splitlines()[-1].count("2 failed, 1 passed") == 1, "the run goes on"


def test_workflows_run_scripts_that_exist() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        commands = "\n".join(step["run"] for step in steps if "run" in step)
        scripts = re.findall(r"(?:scripts/|\.ci/)[\w-]+", commands)
        assert scripts and not [script for script in scripts if not (ROOT / script).exists()], path


def test_the_files_of_the_quick_suite_exist() -> None:
    text = (ROOT / "scripts/test").read_text()
    lists = re.findall(r"^(?:quick|kernels)=\(.*?\)$", text, flags=re.MULTILINE | re.DOTALL)
    script = "\n".join([*lists, 'printf "%s\\n" "${quick[@]}" "${kernels[@]}"'])
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) > 30 and not [path for path in found if not (ROOT / path).exists()]
