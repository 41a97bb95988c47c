"""Kernels that a helper's children compile for a process that only loads them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from programs import report_of

from phonograph.kernels.triton import compile_helper

pytest.importorskip("triton")
KERNELS = {
    "_plan_kernel", "_attention_kernel", "_prefill_kernel", "_merge_kernel", "_few_rows_kernel", "scan_kernel",
    "filter_kernel",
}  # fmt: skip


def run(cache: Path, *arguments: str) -> dict[str, Any]:
    return report_of(Path(__file__).with_name("compile_with_helper.py"), *arguments, TRITON_CACHE_DIR=str(cache))


def test_children_compile_and_this_process_loads(tmp_path: Path) -> None:
    first = run(tmp_path)
    asked = dict(first["problems"])
    assert "no attribute '_no_kernel'" in asked.pop("_no_kernel") and asked == dict.fromkeys(KERNELS)
    assert {name for name, cached in first["told"] if cached} == KERNELS, "none was compiled here"
    assert first["restored"] and first["stamped"] and first["ended"]
    again = run(tmp_path)
    assert [name for name, _ in again["problems"]] == ["_no_kernel"], "all is on disk"


def test_without_its_helper_a_process_compiles_by_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "killed")
    assert all(problem.startswith("the helper has ended") for _, problem in done["problems"])
    assert {name for name, cached in done["told"] if not cached} == KERNELS
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
