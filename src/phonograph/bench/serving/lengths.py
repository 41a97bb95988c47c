"""Lengths of prompts and answers like those of ShareGPT's conversations, without the conversations."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

SHORTEST, LONGEST = 4, 1024
"""Bounds that are common for tables made from ShareGPT."""
SIGMA = 1.2
"""Spread of the logarithm. An assumption: medians of about 155 and 140 tokens, a tenth above 530."""
INPUT, OUTPUT = (NormalDist(location, SIGMA) for location in (5.142482660653407, 5.0326830728503325))
"""Logarithms of the lengths. Between the bounds their means are 232 and 217 tokens, as in the published serving tables
(100 prompts, 23,260 tokens in, about 21,665 out)."""


def sharegpt_like_lengths(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Draw the tokens of prompt and answer of each request, independent of each other.

    Both are log-normal between SHORTEST and LONGEST. The draw is stratified (one value from each of `count` equally
    likely ranges, in random order), so that a hundred requests already have these means to about one percent.
    """
    return list(zip(_draw(rng, count, INPUT), _draw(rng, count, OUTPUT), strict=True))


def _draw(rng: random.Random, count: int, logarithm: NormalDist) -> list[int]:
    low, high = (logarithm.cdf(math.log(bound)) for bound in (SHORTEST, LONGEST))
    shares = [low + (high - low) * (stratum + rng.random()) / count for stratum in range(count)]
    lengths = [round(math.exp(logarithm.inv_cdf(share))) for share in shares]
    rng.shuffle(lengths)
    return lengths
