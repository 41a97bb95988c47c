"""Triton's compiler accepts every kernel outside `gemm`, which the interpreter does not prove."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import report_of

pytest.importorskip("triton")


@pytest.mark.long
def test_the_compiler_accepts_all_kernels(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_front_end.py")
    found = report_of(script, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found["all"]) > 20
    assert found["accepted"] == found["all"]
