"""Duration of a decode step by its tokens and sequences, learnt from the steps that ran."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

import numpy as np

_LEAST_SHARE = 0.02
"""Share of the newest time in the mean of a shape, at least."""
_LEVEL_SHARE = 0.1
"""Share of the newest time in the level of all shapes."""
_MOST_STRANGE = 0.7
"""Largest logarithm of a time over its mean that counts: a pause of the machine counts as a factor of two."""


class StepCosts:
    """Means of the durations of decode steps, by number of requests and number of drafts.

    A mean is the logarithm of a time over a *level*, which all shapes share. A busier machine and longer contexts raise
    the level, and so the estimates of shapes that do not run meanwhile.
    """

    def __init__(self) -> None:
        self._level = 0.0
        # By size of the requests, then of the drafts: number of steps, and their mean.
        self._shapes: dict[int, dict[int, tuple[int, float]]] = {}

    def learn(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        """Take the duration of a step."""
        time = log(max(seconds, 1e-9))
        if not self._shapes:
            self._level = time
        means = self._shapes.setdefault(size_of(num_reqs, 8), {})
        steps, mean = means.get(size_of(num_drafts, 4), (0, time - self._level))
        strange = min(max(time - self._level - mean, -_MOST_STRANGE), _MOST_STRANGE)
        if steps > 3:
            self._level += _LEVEL_SHARE * strange
        means[size_of(num_drafts, 4)] = steps + 1, mean + strange * max(1 / (steps + 1), _LEAST_SHARE)

    def num_plain_steps(self, num_reqs: int) -> int:
        """Return the number of steps without drafts that were learnt."""
        return self._shapes.get(size_of(num_reqs, 8), {}).get(0, (0, 0.0))[0]

    def estimate(self, num_reqs: int, num_drafts: np.ndarray) -> np.ndarray:
        """Return the seconds of steps with these numbers of drafts.

        Times between two known numbers of drafts lie on the line between them. Steps with more are taken to last as
        long as the largest known one, so that they are tried. An unknown number of requests has the times of the
        nearest known one. Where no step without drafts is known, it takes the share of one with drafts that it takes
        for the nearest number of requests that has both. Before a first time is known, all steps take a second.

        Args:
            num_reqs: sequences of each step.
            num_drafts: int [N].
        """
        if not self._shapes:
            return np.ones(len(num_drafts))
        size = size_of(num_reqs, 8)
        if size not in self._shapes:
            size = self._nearest(size, self._shapes)
        means = self._shapes[size]
        if 0 not in means:
            means = self._with_plain(size, means)
        sizes = sorted(means)
        return exp(self._level) * np.interp(num_drafts, sizes, _never_falling([means[size] for size in sizes]))

    def _with_plain(self, size: int, means: dict[int, tuple[int, float]]) -> dict[int, tuple[int, float]]:
        """Return the means of a size with one of steps without drafts, unless no size has both."""
        both = [other for other, known in self._shapes.items() if 0 in known and len(known) > 1]
        if not both:
            return means
        nearest, most = self._nearest(size, both), max(means)
        known = self._shapes[nearest]
        sizes = sorted(known)
        drafting = float(np.interp(most * nearest / size, sizes, [known[one][1] for one in sizes]))
        return {0: (1, means[most][1] - drafting + known[0][1]), **means}

    def _nearest(self, size: int, others: Iterable[int]) -> int:
        return min(others, key=lambda other: abs(log(other / size)))


def _never_falling(means: list[tuple[int, float]]) -> list[float]:
    """Return times that do not fall with the number of drafts: those that do are noise, and share their mean.

    This is isotonic regression by pooling adjacent violators, weighted by the number of steps.

    Args:
        means: number of steps and mean logarithm of the time, by ascending number of drafts.
    """
    pools: list[tuple[int, float, int]] = []  # steps, mean, entries
    for pool in ((steps, mean, 1) for steps, mean in means):
        steps, mean, entries = pool
        while pools and pools[-1][1] > mean:
            others, other, more = pools.pop()
            mean = (steps * mean + others * other) / (steps + others)
            steps, entries = steps + others, entries + more
        pools.append((steps, mean, entries))
    return [exp(mean) for _, mean, entries in pools for _ in range(entries)]


def size_of(number: int, steps: int) -> int:
    """Return a number rounded down to a size.

    Numbers below 2 `steps` are sizes. Above, there are `steps` sizes from each power of two to the next.
    """
    step = max(1, (1 << number.bit_length() >> 1) // steps)
    return number // step * step
