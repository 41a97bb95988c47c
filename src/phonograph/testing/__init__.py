"""Conformance suite for authors of attention backends. It runs a backend as the engine does and names its faults.

    report = check_conformance("my_backend", device="cuda")
    assert report.ok, str(report)

From a shell: `python -m phonograph.testing my_backend --device cuda`.
"""

from __future__ import annotations

from phonograph.testing.report import Check, ConformanceReport, Outcome
from phonograph.testing.suite import check_conformance

__all__ = ["Check", "ConformanceReport", "Outcome", "check_conformance"]
