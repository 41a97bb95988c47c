"""Two servers' records of `bench serve` side by side: how many times as good ours is, and which bars that meets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

WARM_UP = "warm-up"
TABLE, SWEEP, STREAMS = "table", "sweep", "streams"
"""Workloads: the published serving table, as many open requests as given, and that many all at once for our engine."""

HIGHER_IS_BETTER = ("request_throughput", "output_throughput", "total_token_throughput")
FIGURES = (
    *("duration", *HIGHER_IS_BETTER),
    *(f"{name}_{kind}_ms" for kind in ("ttft", "tpot", "itl") for name in ("mean", "median", "p99")),
)
"""The rows of the published table, under the names of the records."""
OFFLINE_FIGURES = ("output_throughput", "median_itl_ms")
MOST_OVERHEAD = 0.05
"""Largest loss of the server against its own engine: share of throughput, and added time between tokens."""


def bar_of(workload: str, figure: str) -> float | None:
    """Return the smallest ratio that passes for a figure, or None if it has no bar."""
    if workload == STREAMS:
        return 1 - MOST_OVERHEAD if figure in HIGHER_IS_BETTER else 1 / (1 + MOST_OVERHEAD)
    if workload == TABLE:
        return 1.1 if figure == "median_itl_ms" else 1.0
    if figure == "output_throughput":
        return 1.1
    return 1.0 if figure in ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms") else None


def compare(workload: str, case: str, ours: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each figure that both sides have; ratio: times as good as the other, above 1 is better."""
    rows: list[dict[str, Any]] = []
    for figure in OFFLINE_FIGURES if workload == STREAMS else FIGURES:
        own, theirs = ours.get(figure), other.get(figure)
        if own is None or theirs is None or min(own, theirs) <= 0:
            continue
        ratio = round(own / theirs if figure in HIGHER_IS_BETTER else theirs / own, 3)
        least = bar_of(workload, figure)
        verdict = {} if least is None else {"least": round(least, 3), "pass": ratio >= round(least, 3)}
        row = {"workload": workload, "case": case, "figure": figure, "ours": round(own, 3), "other": round(theirs, 3)}
        rows.append({**row, "ratio": ratio, **verdict})
    return rows


def medians(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over repeated runs. Figures that a run lacks are left out."""
    return {
        figure: median(record[figure] for record in records)
        for figure in FIGURES
        if records and all(record.get(figure) is not None for record in records)
    }


def caveats(name: str, records: Iterable[dict[str, Any]]) -> list[str]:
    """Return notes on one side's figures: failures, and figures that do not mean what their name says."""
    found: list[str] = []
    for record in records:
        if record["label"] == WARM_UP:
            continue
        where = f"{name}, {record['label']}"
        found += [f"{where}: {count} failed: {error}" for error, count in record["error_counts"].items()]
        chunks = record["chunks_per_output_token"]
        if chunks is not None and not math.isclose(chunks, 1, abs_tol=0.02):
            found.append(f"{where}: {chunks:.3f} chunks for each output token, so its ITL is between chunks")
        if record["client_cpu_share"] > 0.7:
            found.append(f"{where}: the client was busy for {record['client_cpu_share']:.0%} of the time")
        if record["total_cached_tokens"]:
            found.append(f"{where}: {record['total_cached_tokens']} prompt tokens came from the prefix cache")
    return found


def summarise(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return the number of bars and of those that are met."""
    passed = [row["pass"] for row in rows if "pass" in row]
    return {"bars": len(passed), "passed": sum(passed)}
