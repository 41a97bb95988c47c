"""Whose a race is that compute-sanitizer reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.check_races import CONTROL, races_of_kernels, read_races

REPORT = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at {kernel}+0x120 in own.py:1
=========     and Write access at {kernel}+0x2820 in own.py:1 [6 hazards]
=========     and Write access at {kernel}+0x88b0 in own.py:{line} [8 hazards]
=========
"""
CONTROLLED = REPORT.format(kernel=CONTROL, line=3).replace("own.py", "apart.py")
SOURCES = {
    "own.py": "def _own_kernel(a, b):\n    gl.store(a, b)\n    gl.warp_specialize(",
    "apart.py": f"def {CONTROL}(a):\n    pass\n    gl.warp_specialize([",
}


def source_line(file: str, line: int) -> str:
    return SOURCES[file].splitlines()[line - 1] if file else ""


@pytest.mark.parametrize(
    ("report", "own"),
    [
        pytest.param(CONTROLLED, 0, id="the control alone"),
        pytest.param(REPORT.format(kernel="_own_kernel", line=3) + CONTROLLED, 0, id="as in the control"),
        pytest.param(REPORT.format(kernel="_own_kernel", line=2) + CONTROLLED, 1, id="in the kernel's work"),
        pytest.param(REPORT.format(kernel="_other_kernel", line=3) + CONTROLLED, 1, id="at another kernel's line"),
        pytest.param(REPORT.format(kernel="_own_kernel", line=3), 1, id="the control shows none"),
        pytest.param(CONTROLLED + "= Error: Race reported between Read access at a+0x1\n", 1, id="without lines"),
        pytest.param("========= RACECHECK SUMMARY: 0 hazards displayed\n", 0, id="none"),
    ],
)
def test_races_of_kernels(report: str, own: int) -> None:
    races = read_races(report)
    assert len(races) == report.count("Race reported")
    assert len(races_of_kernels(races, source_line)) == own


def test_all_sides_are_read() -> None:
    (race,) = read_races(REPORT.format(kernel="_own_kernel", line=3))
    assert race.kernel == "_own_kernel" and [(side.access, side.line) for side in race.sides] == [
        ("Read", 1),
        ("Write", 1),
        ("Write", 3),
    ]


def test_the_control_is_where_the_report_looks_for_it() -> None:
    lines = (Path(__file__).parents[1] / "support" / "warps_apart.py").read_text().splitlines()
    assert any(line.startswith(f"def {CONTROL}(") for line in lines)
