"""Rows of results, and records of them in a file.

A row counts the steps by graph decision, so that an eager run shows as such.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phonograph.bench.records.output import writing
from phonograph.errors import ConfigError

BenchProgress = Callable[[str, int, int], None]
"""Callback with the unit of work, the number done, and the number in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case of one suite.

    facts: settings and results, with units in the names
    steps: number of steps by kind of decision; empty if no engine ran
    """

    suite: str
    case: str
    facts: dict[str, Any]
    steps: Counter[str] = field(default_factory=Counter[str])

    def as_json(self) -> dict[str, Any]:
        steps = {"steps": dict(self.steps)} if self.steps else {}
        return {"suite": self.suite, "case": self.case, **self.facts, **steps}


def check_at_least(name: str, value: int, least: int) -> None:
    """Check the lower bound of a setting.

    Raises:
        ConfigError: the value is below `least`.
    """
    if value < least:
        raise ConfigError(name, value, f"must be a whole number >= {least}")


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles, or nothing for no values."""
    if not seconds:
        return {}
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p90": p90, "p99": p99}


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line to a file, which is created if need be.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
