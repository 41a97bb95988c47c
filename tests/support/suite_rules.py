"""Rules that hold for every run of the tests, as a pytest plugin.

- A failure is printed when it happens, not only at the end of the run.
- Under CI=true only tests marked `gpu` or `index` may skip: what others need is installed there, and its absence is a
  failure.
- The number of skipped tests is printed at the end, and why those marked `index` did not run.
- Warnings are errors (pyproject.toml), except on a machine with a GPU: its CUDA builds of libraries have other versions
  than CI, and warnings of their own.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MAY_SKIP = ("gpu", "index")
_config: pytest.Config | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config
    # torch takes seconds to import, which runs of a few tests do not need.
    if Path("/dev/nvidiactl").exists():
        config.addinivalue_line("filterwarnings", "default")


def _fail_if_skipped(report: Any) -> None:
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = (
            f"Only tests marked {' or '.join(map('`{}`'.format, MAY_SKIP))} may skip under CI=true. {reason}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not any(item.get_closest_marker(name) for name in MAY_SKIP):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    terminal: Any = _config and _config.pluginmanager.get_plugin("terminalreporter")
    if terminal and report.failed:
        terminal.ensure_newline()
        terminal.write_sep("_", f"{report.nodeid} failed in {report.when}", red=True)
        terminal.write_line(report.longreprtext)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    tests = [report for report in skipped if isinstance(report, pytest.TestReport)]
    gpu = sum("gpu" in report.keywords for report in tests)
    for report in tests:
        if "index" in report.keywords:
            terminalreporter.write_line(f"NOT RUN: {report.nodeid}. {report.longrepr[2]}", yellow=True)
    terminalreporter.write_line(
        f"Skipped: {gpu} tests marked gpu, {len(skipped) - gpu} others. Option -rs lists the reasons."
    )
