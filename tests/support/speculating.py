"""Simulated steps with drafts: requests that accept by given probabilities, and steps that last by a given curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.scheduling.draft_budget import DraftBudget

Cost = Callable[[int, int], float]
"""Seconds of a step by its tokens and requests."""
Accepts = Callable[[int, int], float]
"""Probability that a draft is accepted if those before it are, by the request and the step."""


def decoding(number: int) -> list[Request]:
    """Return running requests past their prompts."""
    requests = [
        Request(request_id=str(slot), prompt_token_ids=[1], params=SamplingParams(), arrival=0.0)
        for slot in range(number)
    ]
    for slot, request in enumerate(requests):
        request.slot = slot
    return requests


class Work(NamedTuple):
    """Tokens and seconds of some steps."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Simulation:
    """Steps of requests that never end.

    Args:
        accepts: probability of each draft.
        cost: duration of a step.
        number: requests.
        most: drafts that each request has, with probability `found`, else none.
        noise: deviation of the logarithm of measured durations. The simulated time is without it.
        delay: steps whose results are not known when the next one is chosen.
    """

    def __init__(
        self,
        accepts: Accepts,
        cost: Cost,
        *,
        number: int,
        most: int,
        found: float = 1.0,
        noise: float = 0.0,
        delay: int = 0,
        seed: int = 0,
    ) -> None:
        self.requests = decoding(number)
        self.depths: list[int] = []  # total of each step
        self.reasons: list[str] = []
        self._accepts, self._cost, self._most, self._found = accepts, cost, most, found
        self._noise, self._delay = noise, delay
        self._rng = np.random.default_rng(seed)
        self._unknown: list[tuple[ScheduledBatch, StepOutput, float]] = []
        self._now = 0

    def run(self, budget: DraftBudget, steps: int) -> Work:
        """Run steps whose depths the budget chooses."""
        tokens, seconds, number = 0, 0.0, len(self.requests)
        for _ in range(steps):
            finds = self._rng.random(number) < self._found
            available = [
                self._most if found and budget.wants_drafts(one.slot) else 0
                for one, found in zip(self.requests, finds, strict=True)
            ]
            choice = budget.choose(self.requests, available)
            assert len(choice.depths) == number
            assert all(0 <= depth <= has for depth, has in zip(choice.depths, available, strict=True))
            self.depths.append(sum(choice.depths))
            self.reasons.append(choice.reason)
            runs = [
                [7] * (1 + self._accepted(one.slot, depth))
                for one, depth in zip(self.requests, choice.depths, strict=True)
            ]
            batch = ScheduledBatch(
                slots=[one.slot for one in self.requests],
                query_lens=[1 + depth for depth in choice.depths],
                samples=[True] * number,
                num_decodes=number,
                num_decode_tokens=number + sum(choice.depths),
                num_tokens=number + sum(choice.depths),
            )
            lasts = self._cost(batch.num_tokens, number)
            measured = lasts * float(np.exp(self._noise * self._rng.standard_normal()))
            self._unknown.append((batch, StepOutput(slots=batch.slots, token_ids=runs), measured))
            if len(self._unknown) > self._delay:
                budget.learn(*self._unknown.pop(0))
            tokens += sum(map(len, runs))
            seconds += lasts
            self._now += 1
        return Work(tokens, seconds)

    def _accepted(self, slot: int, depth: int) -> int:
        probability = self._accepts(slot, self._now)
        for position in range(depth):
            if self._rng.random() >= probability:
                return position
        return depth


def fixed(most: int, number: int) -> DraftBudget:
    """Return a budget that verifies all drafts."""
    return DraftBudget(limits(most, number), max_num_seqs=number, adaptive=False)


def adaptive(most: int, number: int) -> DraftBudget:
    """Return a budget that chooses by what it learns."""
    return DraftBudget(limits(most, number), max_num_seqs=number)


def limits(most: int, number: int) -> Sequence[int]:
    return [most] * (number + 1)
