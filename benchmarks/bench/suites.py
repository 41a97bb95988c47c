"""The developers' workloads of an engine by name: parse the cases, and run the ones that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import cases
from bench.idle_trace import bench_idle
from bench.step_trace import bench_step
from bench.workloads import bench_decode, bench_mixed
from phonograph.bench.suites import RunCases, Suite, fitting_suite
from phonograph.errors import ConfigError

SUITES = ("decode", "latency", "mixed", "throughput")
_CASE_SUITES: Mapping[str, tuple[RunCases, Sequence[Any], Callable[[str], Any]]] = {
    "decode": (bench_decode, cases.DECODE_CASES, cases.DecodeCase.parse),
    "mixed": (bench_mixed, cases.MIXED_CASES, cases.MixedCase.parse),
    "idle": (bench_idle, cases.IDLE_CASES, cases.DecodeCase.parse),
    "step": (bench_step, cases.STEP_CASES, cases.DecodeCase.parse),
}


def check_suites(text: str) -> list[str]:
    """Parse names of suites that share an engine, separated by commas.

    Raises:
        ConfigError: a name is unknown or repeated, or mixed is not alone.
    """
    names = text.split(",")
    if not set(names) <= set(SUITES) or len(set(names)) < len(names):
        raise ConfigError("suites", text, f"must be some of {', '.join(SUITES)}, each once")
    if "mixed" in names and len(names) > 1:
        raise ConfigError("suites", text, "mixed runs alone: it limits the engine to two sequences at a time")
    return names


def case_suite(name: str, text: str | None) -> Suite:
    """Return the workload `name`: decode, mixed, idle or step.

    Args:
        name: name of the workload.
        text: cases separated by commas; None is the published ones.
    """
    run, published, parse = _CASE_SUITES[name]
    selected = published if text is None else [parse(case) for case in text.split(",")]
    return fitting_suite(run, "cases", selected, requested=text is not None)
