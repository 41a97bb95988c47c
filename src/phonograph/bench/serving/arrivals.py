"""When requests are sent."""

from __future__ import annotations

import math
import random


def arrival_times(rng: random.Random, count: int, *, rate: float, burstiness: float) -> list[float]:
    """Seconds from the start at which each of `count` requests is due, ascending; all 0 at an infinite rate.

    The gaps are gamma-distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less comes in
    bursts, more is more even, infinity is a steady beat. The times are scaled so that the last is count / rate, which
    makes the offered rate exactly what was asked for, as vLLM's benchmark does.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = [1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / math.fsum(gaps)
    times: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times
