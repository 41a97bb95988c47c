"""Log of the engine's steps: the latest ones, and counts of all."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from phonograph.engine.metrics.histogram import MILLISECONDS, TOKENS, Histogram
from phonograph.engine.metrics.step_record import BatchKind, StepRecord

KEPT = 1024
"""Number of latest steps in the log."""


@dataclass(slots=True)
class StepTally:
    """Counts of steps of one engine, mode, kind of batch and cause.

    engine:     number of the engine
    num_tokens: without padding
    seconds:    as in `StepRecord`
    """

    engine: int
    mode: str
    kind: BatchKind
    cause: str
    num_steps: int = 0
    num_tokens: int = 0
    num_padded: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram(MILLISECONDS))


class StepLog:
    """Collects the records of the engine's steps.

    latest:       latest records, oldest first; the newest has number `num_steps`, counted from 1
    tokens:       tokens of each step, without padding
    shared_units: units of attention of prefixes that sequences share, in a layer
    own_units:    other units of short queries
    epoch_offset: seconds from the records' clock to the Unix epoch
    """

    def __init__(self) -> None:
        self.latest: deque[StepRecord] = deque(maxlen=KEPT)
        self.num_steps = 0
        self.tokens = Histogram(TOKENS)
        self.shared_units = self.own_units = 0
        self.epoch_offset = time.time() - time.monotonic()
        self._tallies: dict[tuple[int, str, BatchKind, str], StepTally] = {}

    @property
    def tallies(self) -> Iterable[StepTally]:
        return self._tallies.values()

    def take(self, records: Iterable[StepRecord], engine: int = 0) -> None:
        """Count steps of an engine."""
        for record in records:
            kind, num_tokens = record.kind, record.num_tokens
            key = engine, record.mode, kind, record.cause
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = StepTally(*key)
            self.tokens.observe(num_tokens)
            tally.num_steps += 1
            tally.num_tokens += num_tokens
            tally.num_padded += record.graph_tokens - num_tokens
            tally.seconds.observe(record.seconds)
            self.shared_units += record.shared_units
            self.own_units += record.own_units
            self.num_steps += 1
            self.latest.append(record)

    def labels_since(self, moment: float) -> Counter[str]:
        """Return the number of steps by decision that ended after a time of `time.monotonic`, among the latest ones."""
        return Counter(record.graph for record in takewhile(lambda one: one.ended > moment, reversed(self.latest)))

    def since(self, number: int, most: int) -> list[tuple[int, StepRecord]]:
        """Return steps after number `number` with their numbers, oldest first: the last `most` of those in the log."""
        first = max(number, self.num_steps - min(most, len(self.latest)))
        count = self.num_steps - first
        if count <= 0:
            return []
        start = len(self.latest) - count
        return [(first + place + 1, self.latest[start + place]) for place in range(count)]
