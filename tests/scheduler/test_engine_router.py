"""The choice of an engine: the longest cached prefix within the bounds of load, and the reasons that are counted."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from math import ceil
from typing import Any

import pytest

from phonograph.core.batch import DraftCounts
from phonograph.kv_cache.block_events import BlockEvents, block_hash
from phonograph.kv_cache.tables import block_digests, root_digest
from phonograph.scheduling.engine_router import MARGIN, SLACK, EngineRouter, IndexChange, Route, index_changes
from phonograph.scheduling.scheduler_stats import SchedulerStats

SIZE = 4


def hashes(token_ids: list[int], salt: str | None = None) -> list[int]:
    return [block_hash(one) for one in block_digests(token_ids, SIZE, root_digest(salt))]


def stats(**changes: Any) -> SchedulerStats:
    numbers = {"num_running": 0, "num_waiting": 0, "blocks_used": 0, "num_blocks": 10, "num_preemptions": 0}
    return SchedulerStats(**{**numbers, "prefix_queries": 0, "prefix_hits": 0, "drafts": DraftCounts(), **changes})


class Front:
    """A router with keys made for it."""

    def __init__(self, num_engines: int = 2) -> None:
        self.router, self.keys = EngineRouter(num_engines, SIZE), count()

    def ask(self, token_ids: list[int], **more: Any) -> Route:
        route = self.router.choose(next(self.keys), token_ids, **more)
        assert route is not None
        return route

    def has(self, engine: int, token_ids: list[int], salt: str | None = None) -> None:
        self.router.changed(engine, [IndexChange(True, hashes(token_ids, salt))])


def test_the_longest_prefix_is_chosen_and_counted_in_tokens() -> None:
    front = Front(3)
    front.has(1, [1] * 9)
    front.has(2, [1] * 4)
    assert front.ask([1] * 11) == (1, "prefix", 8)
    assert front.ask([1] * 7) == (2, "prefix", 4), "the less loaded one of equal prefixes"
    assert front.ask([2] * 9) == (0, "load", 0)
    assert front.ask([1] * 8, salt="other") == (0, "load", 0), "the emptiest cache of equal loads"
    assert front.router.counts == {(1, "prefix"): 1, (2, "prefix"): 1, (0, "load"): 2}


def test_prompts_that_arrive_together_meet_and_are_forgotten_when_they_begin() -> None:
    front = Front()
    prompt = list(range(40))
    assert front.ask(prompt) == (0, "load", 0)
    assert front.ask(prompt) == (0, "prefix", 40)
    front.router.begun(0)
    assert front.ask(prompt[:20])[2] == 20, "the second one still waits"
    front.router.begun(1)
    front.router.begun(2)
    front.router.ended(0, 3)
    assert front.ask(prompt) == (0, "load", 0)


def test_a_common_prefix_does_not_fill_one_engine() -> None:
    front = Front(4)
    front.has(0, [7] * 100)
    routes = [front.ask([7] * 100 + [number] * 8) for number in range(400)]
    per_engine = Counter(route.engine for route in routes)
    assert max(per_engine.values()) <= ceil(SLACK * 100) + MARGIN and min(per_engine.values()) >= 75
    reasons = Counter(route.reason for route in routes)
    assert reasons["queue"] >= 1 and reasons["prefix"] > 350, "the prefix is soon in each of them"


def test_an_engine_whose_requests_wait_for_blocks_is_passed_over() -> None:
    front = Front()
    front.has(0, [1] * 8)
    front.router.loaded(0, stats(num_waiting=1, blocks_used=10))
    assert front.ask([1] * 9) == (1, "kv", 0)
    front.router.loaded(1, stats(num_waiting=1, blocks_used=10))
    front.router.ended(1)
    front.router.begun(0)
    assert front.ask([1] * 9) == (0, "prefix", 8), "the rule is not applied where all are full"
    front.router.loaded(0, stats(num_waiting=5, blocks_used=2))
    front.router.ended(0)
    assert front.ask([1] * 9).reason == "prefix", "waiting for a step is no shortage"


def test_removals_resets_and_engines_that_come_and_go() -> None:
    front = Front()
    front.has(1, [1] * 12)
    front.router.changed(1, [IndexChange(False, hashes([1] * 12)[1:])])
    assert front.ask([1] * 12) == (1, "prefix", 4)
    front.router.remove(1)
    front.router.changed(1, [IndexChange(True, hashes([1] * 12))])
    front.router.ended(1)
    assert front.ask([1] * 12) == (0, "only", 0)
    front.router.remove(0)
    assert front.router.choose(99, [1] * 12) is None
    front.router.add(0)
    front.router.add(1)
    front.has(1, [3] * 8)
    front.router.changed(1, [IndexChange(False, None)])
    assert front.ask([3] * 8) == (0, "load", 0)


def test_changes_are_those_of_one_group() -> None:
    events = BlockEvents()
    keys = block_digests([1] * 8, SIZE, b"")
    events.stored(0, keys[0], None, [1] * 4, None)
    events.stored(1, keys[0] + b"\x01", None, [1] * 4, None)
    events.removed(keys[0])
    events.removed(keys[0] + b"\x01")
    events.cleared()
    whole = events.take()
    first = [block_hash(keys[0])]
    assert index_changes(whole, 0) == [(True, first), (False, first), (False, None)]
    assert index_changes(whole, 1) == index_changes(whole, 0)
    assert events.take() == []


@pytest.mark.parametrize("seed", range(5))
def test_open_samples_and_expected_prompts_balance_after_any_run(seed: int) -> None:
    rng, front = random.Random(seed), Front(3)
    running: dict[int, tuple[int, int]] = {}
    begun: set[int] = set()
    for _ in range(400):
        if rng.random() < 0.5:
            token_ids = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            key, samples = next(front.keys), rng.randrange(1, 4)
            route = front.router.choose(key, token_ids, num_samples=samples)
            assert route is not None
            running[key] = route.engine, samples
        elif running:
            key = rng.choice([*running])
            if key not in begun:
                begun.add(key)
                front.router.begun(key)
            front.router.ended(*running.pop(key))
        for number, engine in front.router._engines.items():
            assert engine.num_open == sum(samples for owner, samples in running.values() if owner == number)
    for key, (engine, samples) in running.items():
        front.router.begun(key)
        front.router.ended(engine, samples)
    assert all(not engine.num_open and not engine.expected for engine in front.router._engines.values())
