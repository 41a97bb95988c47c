"""Choice of an engine for a prompt: the longest cached prefix, bounded by the load of the engines.

Every engine tells which blocks enter and leave its prefix cache, and prompts are hashed as the engines do it. So the
cached prefix is known exactly in a full KV group; windows of sliding groups are not considered. Prompts that were sent
and have not begun count as cached too, so that prompts that arrive together meet.

An engine may have at most a quarter and two more open samples than the average. (Mirrokni, Thorup, Zadimoghaddam,
"Consistent Hashing with Bounded Loads", 2018, bound the load of a hash table so.) The least loaded engine may always be
chosen. An engine whose requests wait for blocks is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, NamedTuple

from phonograph.kv_cache.block_events import BlockEvent, BlocksRemoved, BlocksStored, block_hash, group_of
from phonograph.kv_cache.tables import block_digests, root_digest
from phonograph.scheduling.scheduler_stats import SchedulerStats

SLACK, MARGIN = 1.25, 2
"""Most open samples of an engine: as a multiple of the average, and beyond that."""
FULL = 0.9
"""Used fraction of the KV cache from which waiting requests are taken to wait for blocks."""

RouteReason = Literal["prefix", "load", "queue", "kv", "only"]
"""Reason for an engine: "prefix" has the longest cached prefix, "load" is the least loaded one for a prompt without
any; "queue" and "kv": the one with the longest prefix has too many requests, or too few blocks; "only" is the only
one."""


class Route(NamedTuple):
    """Engine of a prompt.

    Attributes:
        engine: its number.
        reason: see `RouteReason`.
        num_cached: prompt tokens whose blocks it has, or will have.
    """

    engine: int
    reason: RouteReason
    num_cached: int


class IndexChange(NamedTuple):
    """Change of an engine's prefix cache: hashes of blocks that can be found, or cannot any more; None for all."""

    stored: bool
    hashes: list[int] | None


def index_changes(events: Iterable[BlockEvent], group: int) -> list[IndexChange]:
    """Return the changes of one KV group, in order."""
    changes: list[IndexChange] = []
    for event in events:
        if isinstance(event, BlocksStored):
            if event.group == group:
                changes.append(IndexChange(True, [block_hash(key) for key in event.keys]))
        elif isinstance(event, BlocksRemoved):
            changes.append(IndexChange(False, [block_hash(key) for key in event.keys if group_of(key) == group]))
        else:
            changes.append(IndexChange(False, None))
    return changes


@dataclass(slots=True)
class _Engine:
    """State of one engine.

    blocks: hashes of the cached blocks
    expected: hashes of prompts that have not begun, with the number of these prompts
    num_open: samples in progress
    starved: True if requests wait for blocks
    """

    blocks: set[int] = field(default_factory=set[int])
    expected: Counter[int] = field(default_factory=Counter[int])
    num_open: int = 0
    starved: bool = False


class EngineRouter:
    """Chooses engines, and knows their caches and loads. It has no threads and no clock.

    Args:
        num_engines: engines, by numbers from 0.
        block_size: tokens of a block.

    Attributes:
        counts: prompts by engine and reason.
    """

    def __init__(self, num_engines: int, block_size: int) -> None:
        self._block_size = block_size
        self._engines = {number: _Engine() for number in range(num_engines)}
        self._expected: dict[int, tuple[int, list[int]]] = {}
        self.counts: Counter[tuple[int, RouteReason]] = Counter()

    def choose(self, key: int, token_ids: Sequence[int], salt: str | None = None, num_samples: int = 1) -> Route | None:
        """Choose the engine of a prompt, and count its samples as open there.

        Args:
            key: unique number of the prompt.
            token_ids: tokens of the prompt.
            salt: its cache salt.
            num_samples: samples of the prompt.

        Returns:
            The choice; None if no engine runs.
        """
        if not self._engines:
            return None
        hashes = [block_hash(one) for one in block_digests(token_ids, self._block_size, root_digest(salt))]
        prefixes = {number: _num_known(engine, hashes) for number, engine in self._engines.items()}
        number, reason = self._chosen(prefixes, num_samples)
        engine = self._engines[number]
        engine.num_open += num_samples
        engine.expected.update(hashes)
        self._expected[key] = number, hashes
        self.counts[number, reason] += 1
        return Route(number, reason, prefixes[number] * self._block_size)

    def _chosen(self, prefixes: dict[int, int], num_samples: int) -> tuple[int, RouteReason]:
        engines = self._engines
        if len(engines) == 1:
            return next(iter(engines)), "only"

        def rank(number: int) -> tuple[int, int, int, int]:
            """Order of preference. The emptier cache first, so that prompts one by one fill all caches."""
            engine = engines[number]
            return -prefixes[number], engine.num_open, len(engine.blocks), number

        num_open = sum(engine.num_open for engine in engines.values()) + num_samples
        most = ceil(SLACK * num_open / len(engines)) + MARGIN
        least_open = min(engine.num_open for engine in engines.values())
        short = {number for number, engine in engines.items() if engine.num_open + num_samples <= most}
        short |= {number for number, engine in engines.items() if engine.num_open == least_open}
        fed = {number for number in short if not engines[number].starved} or short
        number, best = min(fed, key=rank), min(engines, key=rank)
        if prefixes[number] == prefixes[best]:
            return number, "prefix" if prefixes[number] else "load"
        return number, "queue" if best not in short else "kv"

    def changed(self, engine: int, changes: Iterable[IndexChange]) -> None:
        """Apply changes of an engine's prefix cache."""
        if engine not in self._engines:
            return
        blocks = self._engines[engine].blocks
        for change in changes:
            if change.hashes is None:
                blocks.clear()
            elif change.stored:
                blocks.update(change.hashes)
            else:
                blocks.difference_update(change.hashes)

    def loaded(self, engine: int, stats: SchedulerStats) -> None:
        """Take the statistics of an engine."""
        if engine in self._engines:
            full = stats.blocks_used > FULL * stats.num_blocks
            self._engines[engine].starved = full and stats.num_waiting > 0

    def begun(self, key: int) -> None:
        """Record that a prompt has its first token, or ends without one: its blocks are cached, or never will be."""
        number, hashes = self._expected.pop(key, (-1, []))
        if number in self._engines:
            expected = self._engines[number].expected
            expected.subtract(hashes)
            for one in hashes:
                if not expected[one]:
                    del expected[one]

    def ended(self, engine: int, num_samples: int = 1) -> None:
        """Record that samples of an engine have ended."""
        if engine in self._engines:
            self._engines[engine].num_open -= num_samples

    def remove(self, engine: int) -> None:
        """Choose an engine no more, and forget its prompts."""
        self._engines.pop(engine, None)

    def add(self, engine: int) -> None:
        """Choose an engine again, which is empty."""
        self._engines[engine] = _Engine()


def _num_known(engine: _Engine, hashes: Sequence[int]) -> int:
    """Return the number of leading blocks that an engine has or will have."""
    count = 0
    for one in hashes:
        if one not in engine.blocks and one not in engine.expected:
            break
        count += 1
    return count
