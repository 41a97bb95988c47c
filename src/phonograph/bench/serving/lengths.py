"""Lengths of prompts and answers like those of ShareGPT's conversations, without the conversations."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

INPUT_MEAN, OUTPUT_MEAN = 232, 217
"""Tokens on average: of the 100 prompts in the published serving tables (23,260 in, about 21,665 out)."""
SHORTEST, LONGEST = 4, 1024
"""What is commonly kept of ShareGPT for such tables."""
SIGMA = 1.2
"""Spread of the logarithm. An assumption: it puts the medians at about 155 and 140 tokens, a tenth above 530."""

_NORMAL = NormalDist()


def sharegpt_like_lengths(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of each request, independent of each other.

    Both are log-normal, cut off at SHORTEST and LONGEST. The draw is stratified (one value from each of `count`
    equally likely ranges, in random order), so that a hundred requests already have these means to about one percent
    and two seeds are the same amount of work.
    """
    return list(zip(_draw(rng, count, INPUT_MEAN), _draw(rng, count, OUTPUT_MEAN), strict=True))


def _draw(rng: random.Random, count: int, mean: float) -> list[int]:
    location = _location(mean)
    low, high = (_NORMAL.cdf(_standard(bound, location)) for bound in (SHORTEST, LONGEST))
    shares = [low + (high - low) * (stratum + rng.random()) / count for stratum in range(count)]
    lengths = [round(math.exp(location + SIGMA * _NORMAL.inv_cdf(share))) for share in shares]
    rng.shuffle(lengths)
    return lengths


def _location(mean: float) -> float:
    """The mean of the logarithm, before the cut, for which the lengths have this mean after it; by bisection."""
    low, high = math.log(SHORTEST), math.log(LONGEST)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle) < mean else (low, middle)
    return low


def _mean(location: float) -> float:
    """Of a log-normal that is cut off at both ends."""
    low, high = _standard(SHORTEST, location), _standard(LONGEST, location)
    above = _NORMAL.cdf(SIGMA - low) - _NORMAL.cdf(SIGMA - high)
    return math.exp(location + SIGMA**2 / 2) * above / (_NORMAL.cdf(high) - _NORMAL.cdf(low))


def _standard(length: float, location: float) -> float:
    return (math.log(length) - location) / SIGMA
