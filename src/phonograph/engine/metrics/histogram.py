"""Histogram for frequent updates from one thread, without the locks of a metrics library."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MILLISECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
"""Bounds in seconds for durations of steps and tokens."""
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds for latencies of requests."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Bounds for lengths of requests."""

FEW = (0, 1, 2, 3, 5, 10, 20, 50)
"""Bounds for small counts, such as samples and preemptions."""


class Histogram:
    """Counts of values by the smallest bound at or above them; `total` is the sum of the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound as text, then "+Inf", with the cumulative count, as Prometheus expects."""
        found: list[tuple[str, float]] = []
        below = 0
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            below += count
            found.append((name, below))
        return found
