"""Events of the prefix cache over ZeroMQ: an index made from them equals the block pool after random operations."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduling import full_group, sliding_group

from phonograph.config.kv_events_config import KVEventsConfig
from phonograph.core.kv_group import KVGroup
from phonograph.errors import ConfigError
from phonograph.kv_cache.block_events import BlockEvents, block_hash, group_of
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import SequenceTable

msgspec = pytest.importorskip("msgspec", reason="needs msgspec of the extra kv-events")
zmq = pytest.importorskip("zmq")


NUM_STEPS = 6000
"""Random operations; an index of 10^5 equalled the pool too."""


# The published form: https://docs.vllm.ai, kv_events, since events are maps.
class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Index:
    """Index of a router: the tokens of each block by group and hash."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], tuple[int | None, list[int]]] = {}
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.next = 0

    def take(self, number: int, batch: bytes) -> None:
        assert number == self.next
        self.next += 1
        decoded = self.decoder.decode(batch)
        assert abs(decoded.ts - time.time()) < 600 and decoded.data_parallel_rank == 3
        for event in decoded.events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes) and event.medium == "GPU"
                assert len(event.extra_keys) == len(event.block_hashes)
                for at, one in enumerate(event.block_hashes):
                    key = (event.group_idx, one)
                    assert key not in self.blocks, "stored twice"
                    self.blocks[key] = (parent, event.token_ids[at * size : (at + 1) * size])
                    parent = one
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del self.blocks[event.group_idx, one]
            else:
                self.blocks.clear()


class RandomCache:
    """Sequences that come, grow and go in a small cache, with the tokens that each published block has."""

    def __init__(self, groups: list[KVGroup], seed: int) -> None:
        self.groups, self.events, self.rng = groups, BlockEvents(), random.Random(seed)
        self.cache = CacheManager(
            groups, num_blocks=40, max_num_batched_tokens=16, enable_prefix_caching=True, events=self.events
        )
        self.running: list[tuple[SequenceTable, list[int]]] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.3:
            self.admit()
        elif kind < 0.85 and self.running:
            self.grow(*self.rng.choice(self.running))
        elif self.running:
            index = self.rng.randrange(len(self.running))
            table, _ = self.running.pop(index)
            if self.rng.random() < 0.1:
                self.cache.forget(table)
            self.cache.free(table)
            if self.rng.random() < 0.01:
                self.cache.reset(one for one, _ in self.running)

    def admit(self) -> None:
        # Few tokens, so that prefixes are shared.
        token_ids = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 30))]
        table = self.cache.make_table(
            lambda start, stop: token_ids[start:stop], len(token_ids), self.rng.choice([None, "s"])
        )
        if self.cache.admit(table, len(token_ids), reserve=0, reuse=True) is None:
            return
        if self.cache.num_missing(table, len(token_ids)) > self.cache.pool.num_free:
            self.cache.free(table)
            return
        self.running.append((table, token_ids))
        self.cache.extend(table, len(token_ids))
        self.publish(table, token_ids)

    def grow(self, table: SequenceTable, token_ids: list[int]) -> None:
        token_ids.append(self.rng.randrange(2))
        self.cache.free_behind(table, len(token_ids) - 1)
        if self.cache.num_missing(table, len(token_ids)) > self.cache.pool.num_free:
            token_ids.pop()
            return
        self.cache.extend(table, len(token_ids))
        self.publish(table, token_ids)

    def publish(self, table: SequenceTable, token_ids: list[int]) -> None:
        self.cache.publish(table, len(token_ids))
        for index, group in enumerate(self.groups):
            for at, key in enumerate(table.keys(index, 0, len(token_ids) // group.block_size)):
                tokens = token_ids[at * group.block_size : (at + 1) * group.block_size]
                self.tokens[index, block_hash(key)] = tokens

    @property
    def cached(self) -> dict[tuple[int, int], list[int]]:
        """The blocks that the pool finds, with their tokens."""
        names = [(group_of(key), block_hash(key)) for key in self.cache.pool._block_of]
        return {name: self.tokens[name] for name in names}


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", buffer_steps=100_000, topic="kv")


@pytest.fixture
def context() -> Iterator[object]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("groups", [[full_group(4)], [full_group(4), sliding_group(9, 4)]])
def test_an_index_of_the_events_equals_the_pool_also_after_a_lost_batch(
    groups: list[KVGroup], config: KVEventsConfig, context: zmq.Context
) -> None:
    from phonograph.engine.process.kv_publisher import END_OF_REPLAY, KVPublisher

    publisher = KVPublisher(config, 3)
    subscriber, requester = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.set_hwm(0)
    subscriber.connect(config.endpoint)
    requester.connect(config.replay_endpoint)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    index, caches = Index(), RandomCache(groups, 0)
    time.sleep(0.1)  # a batch that is sent before the subscription arrives is lost, as any may be
    for _ in range(NUM_STEPS):
        caches.step()
        publisher.publish(caches.events.take(), groups)
    assert publisher._number > NUM_STEPS // 4
    lost = {publisher._number // 2, publisher._number // 2 + 1}
    assert publisher._number - min(lost) > 1000, "more than the default queue of a socket are sent again"
    while index.next < publisher._number:
        assert subscriber.poll(5000)
        topic, number, batch = subscriber.recv_multipart()
        at = int.from_bytes(number, "big")
        assert topic == b"kv" and len(number) == 8
        if at in lost:
            continue
        if at > index.next:
            requester.send_multipart([b"", index.next.to_bytes(8, "big")])
            while True:
                _, again, old = requester.recv_multipart()
                if again == END_OF_REPLAY:
                    assert old == b""
                    break
                if int.from_bytes(again, "big") < at:
                    index.take(int.from_bytes(again, "big"), old)
        index.take(at, batch)
    assert {key: tokens for key, (_, tokens) in index.blocks.items()} == caches.cached
    publisher.close()


def test_a_planted_missing_event_is_noticed() -> None:
    caches = RandomCache([full_group(4)], 0)
    caches.events.removed = lambda key: None  # type: ignore[method-assign]
    stored: set[bytes] = set()
    with pytest.raises(AssertionError):
        for _ in range(500):
            caches.step()
            for event in caches.events.take():
                for key in getattr(event, "keys", ()):
                    assert key not in stored
                    stored.add(key)


def test_an_address_in_use_and_a_missing_folder_are_refused(config: KVEventsConfig) -> None:
    from phonograph.engine.process.kv_publisher import KVPublisher

    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    taken = config._replace(endpoint=f"tcp://*:{port}")
    with pytest.raises(ConfigError, match=rf"kv_events_config.endpoint='tcp://\*:{port}': cannot be used \(Address al"):
        KVPublisher(taken, 0)
    with pytest.raises(ConfigError, match=r"kv_events_config.replay_endpoint='ipc:///none/a': cannot be used"):
        KVPublisher(config._replace(replay_endpoint="ipc:///none/a"), 0)
    context.destroy(linger=0)
    KVPublisher(config, 0).close()
