"""Kernels that a helper's children compile for a process that only loads them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import report_of

pytest.importorskip("triton")

from phonograph.kernels.triton.launch import compile_helper, precompile

KERNELS = {"_gemm_small_m_kernel", "_gemm_ring_kernel", "scan_kernel", "filter_kernel"}


def run(cache: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    program = Path(__file__).with_name("compile_with_helper.py")
    return report_of(program, *arguments, TRITON_CACHE_DIR=str(cache), **environment)


def empty_driver(folder: Path) -> str:
    """Make a folder with a libcuda.so.1 that launchers can be linked with."""
    folder.mkdir()
    empty, compiler = folder / "empty.c", shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None
    empty.write_text("")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", empty], check=True)
    return str(folder)


def test_children_compile_and_this_process_loads(tmp_path: Path) -> None:
    first = run(tmp_path / "cache", TRITON_LIBCUDA_PATH=empty_driver(tmp_path / "driver"))
    asked = dict(first["problems"])
    assert "no attribute '_no_kernel'" in asked.pop("_no_kernel") and asked == dict.fromkeys(KERNELS)
    assert {name for name, cached in first["told"] if cached} == KERNELS, "none was compiled here"
    assert all(built for _, built in first["launchers"]), first["launchers"]
    assert first["restored"] and first["stamped"] and first["ended"]
    again = run(tmp_path / "cache")
    assert [name for name, _ in again["problems"]] == ["_no_kernel"], "all is on disk"


def test_a_launcher_that_cannot_be_built_is_no_problem_of_the_kernel(tmp_path: Path) -> None:
    done = run(tmp_path, "few", TRITON_LIBCUDA_PATH=str(tmp_path / "nothing"))
    assert done["told"] == [["_gemm_small_m_kernel", True]] and done["launchers"] == [["_gemm_small_m_kernel", False]]


def test_launchers_are_loaded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's way with modules of one name gives threads others' launchers where they load at the same time."""
    inside = most = 0

    def init_handles() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)  # where another thread may come between
        inside -= 1

    kernel: Any = SimpleNamespace(_init_handles=init_handles)
    function: Any = object()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(32):
            pool.submit(precompile._load, function, kernel)
    assert most == 1


def test_without_its_helper_a_process_compiles_by_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "few", "killed")
    assert done["problems"] and all(problem.startswith("the helper has ended") for _, problem in done["problems"])
    assert done["told"] == [["_gemm_small_m_kernel", False]]
    assert done["restored"] and done["ended"]


def test_a_stamp_is_of_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not compile_helper._is_stamped()
    (tmp_path / compile_helper.STAMP).write_text(compile_helper._build())
    assert compile_helper._is_stamped()
    monkeypatch.setattr(compile_helper, "_build", lambda: "another")
    assert not compile_helper._is_stamped()


def test_few_kernels_need_no_helper() -> None:
    assert compile_helper.helper(compile_helper.ALONE) is None


def test_where_no_process_can_be_started_there_is_no_helper(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(compile_helper, "_startable", True)
    assert compile_helper.helper(compile_helper.ALONE + 1) is None
    assert compile_helper.helper(compile_helper.ALONE + 1) is None
    assert len(caplog.records) == 1 and "/no/such/python" in caplog.text, "said once"
