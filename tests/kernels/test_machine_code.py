"""What the compiler made of kernels, for a GPU that need not be here."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import report_of


@pytest.mark.long
def test_nothing_is_read_that_nothing_wrote() -> None:
    report = report_of(Path(__file__).with_name("compile_for_hopper.py"))
    attention = [name for name in report if name.startswith("_attention_kernel")]
    assert len(attention) == 4 and all(count > 1000 for count, _ in (report[name] for name in attention))
    for name in ("_stream_kernel", "_prefill_kernel"):
        assert len([one for one in report if one.startswith(name)]) == 2
    assert {name: unwritten for name, (_, unwritten) in report.items() if unwritten} == {}
