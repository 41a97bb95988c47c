"""What all benchmarks share: rows of results, and records of them in a file.

What is measured is in `bench_engine`, `bench_attention` and `bench_startup`. A row says which graph decisions ran it,
so that nobody takes the figures of an eager run for those of a graph.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phonograph.bench.records.output import writing
from phonograph.errors import ConfigError

BenchProgress = Callable[[str, int, int], None]
"""Called with what is counted, how many of it are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case of one suite.

    facts: what was measured, with units in the names; what was asked is among them
    steps: how many steps of the measured run each kind of decision had; empty where no engine ran
    """

    suite: str
    case: str
    facts: dict[str, Any]
    steps: Counter[str] = field(default_factory=Counter[str])

    def as_json(self) -> dict[str, Any]:
        steps = {"steps": dict(self.steps)} if self.steps else {}
        return {"suite": self.suite, "case": self.case, **self.facts, **steps}


def check_at_least(name: str, value: int, least: int) -> None:
    """
    Raises:
        ConfigError: the value is below `least`.
    """
    if value < least:
        raise ConfigError(name, value, f"must be a whole number >= {least}")


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; empty where there is nothing to summarise."""
    if not seconds:
        return {}
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p90": p90, "p99": p99}


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Adds one JSON line to a file, which is made if need be.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All records of files that `append_record` wrote; of a file that is not there, none."""
    return [
        json.loads(line)
        for path in paths
        if path.exists()
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
