"""The prefix cache: what is found, what is never found, and what admission costs in blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_cache
from scheduling import full_group

from phonograph.core.kv_group import KVGroup
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import SequenceTable

SIZE = 3


class OneGroup(CacheManager):
    """A cache manager with one full KV group."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool) -> None:
        groups = [full_group(SIZE)]
        super().__init__(
            groups, num_blocks=num_blocks, max_num_batched_tokens=8, enable_prefix_caching=enable_prefix_caching
        )

    def table_of(self, token_ids: list[int]) -> SequenceTable:
        return self.make_table(lambda start, stop: token_ids[start:stop], len(token_ids), None)


def manager(num_blocks: int = 16, *, enable_prefix_caching: bool = True) -> OneGroup:
    return OneGroup(num_blocks, enable_prefix_caching)


def blocks(table: SequenceTable) -> list[int]:
    return table.groups[0].block_ids


def admit(cache: OneGroup, token_ids: list[int], *, reuse: bool = True) -> tuple[SequenceTable, int]:
    table = cache.table_of(token_ids)
    cached = cache.admit(table, len(token_ids), reserve=0, reuse=reuse)
    assert cached is not None
    return table, cached


@settings(max_examples=200, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12))
def test_the_longest_published_prefix_is_found(prompts: list[list[int]]) -> None:
    cache = manager(200)
    published: set[tuple[int, ...]] = set()
    tables: list[tuple[SequenceTable, int]] = []
    contents: dict[int, tuple[int, ...]] = {}
    for token_ids in prompts:
        table, cached = admit(cache, token_ids)
        prefixes = [tuple(token_ids[:end]) for end in range(SIZE, len(token_ids) + 1, SIZE)]
        known = [prefix for prefix in prefixes if prefix in published and len(prefix) < len(token_ids)]
        assert cached == max((len(prefix) for prefix in known), default=0)
        for block_id, prefix in zip(blocks(table), prefixes, strict=False):
            assert contents.setdefault(block_id, prefix) == prefix
        assert len(blocks(table)) == -(-len(token_ids) // SIZE)
        cache.publish(table, len(token_ids))
        published.update(prefixes)
        tables.append((table, len(token_ids)))
        check_cache(cache, tables)


def test_admission_counts_found_blocks_that_are_free_as_taken() -> None:
    cache = manager(4)
    first, _ = admit(cache, [1] * 7)
    cache.publish(first, 7)
    again = cache.table_of([1] * 10)
    # While they are held, two of its four blocks cost nothing; one is left free, so a reserve of 1 is refused.
    assert cache.admit(again, 10, reserve=0, reuse=True) is None
    cache.free(first)
    assert cache.admit(again, 10, reserve=1, reuse=True) is None
    assert blocks(again) == [] and cache.pool.num_free == 4
    assert cache.admit(again, 10, reserve=0, reuse=True) == 6
    assert cache.pool.num_free == 0


@pytest.mark.parametrize(("encoder_len", "count"), [(1, 1), (2, 1), (3, 1), (4, 2), (20, 7), (0, 7)])
def test_cross_attention_has_the_blocks_of_its_sequence(encoder_len: int, count: int) -> None:
    groups = [full_group(SIZE), KVGroup(layers=(1,), block_size=SIZE, encoder_len=20)]
    cache = CacheManager(groups, num_blocks=12, max_num_batched_tokens=8, enable_prefix_caching=True)
    tables = [cache.make_table(lambda start, stop: [1] * (stop - start), 4, "text", encoder_len) for _ in range(2)]
    assert cache.admit(tables[0], 4, reserve=11 - count, reuse=True) is None
    assert cache.admit(tables[0], 4, reserve=0, reuse=True) == 0 and not tables[0].encoded
    assert len(tables[0].groups[1].block_ids) == count and cache.pool.num_free == 12 - 2 - count
    # The second one finds them, and a longer answer takes no more.
    assert cache.admit(tables[1], 4, reserve=0, reuse=True) == 0 and tables[1].encoded
    assert tables[1].groups[1].block_ids == tables[0].groups[1].block_ids
    assert [append.group for append in cache.extend(tables[0], 7)] == [0]
    for table in tables:
        cache.free(table)
    assert cache.pool.num_free == 12


def test_found_blocks_are_not_evicted_to_make_room_for_the_rest() -> None:
    cache = manager(4)
    first, _ = admit(cache, [1] * 12)
    cache.publish(first, 12)
    old = list(blocks(first))
    cache.free(first)
    again, cached = admit(cache, [1] * 6 + [2] * 6)
    assert cached == 6 and blocks(again)[:2] == old[:2]
    check_cache(cache, [(again, 6)])


def test_nothing_is_found_or_published_when_switched_off() -> None:
    cache = manager(enable_prefix_caching=False)
    first, _ = admit(cache, [1] * 7)
    cache.publish(first, 7)
    assert not first.num_named(0) and not first.groups[0].num_published
    assert admit(cache, [1] * 7)[1] == 0


def test_reuse_can_be_refused_by_one_sequence_that_still_publishes() -> None:
    cache = manager()
    first, _ = admit(cache, [1] * 7)
    cache.publish(first, 3)
    second, cached = admit(cache, [1] * 7, reuse=False)
    assert cached == 0
    cache.publish(second, 7)
    third, cached = admit(cache, [1] * 7)
    assert cached == 6 and blocks(third)[:2] == [blocks(first)[0], blocks(second)[1]]


def test_reset_forgets_blocks_and_those_computed_from_them_later() -> None:
    cache = manager()
    running, _ = admit(cache, [1] * 7)
    young, _ = admit(cache, [2] * 7)
    waiting = cache.table_of([1] * 7)
    cache.publish(running, 4)
    cache.publish(young, 2)
    cache.reset([running, young, waiting])
    # Blocks half full at the reset, and those after them, must not be found, not even behind a head computed anew.
    cache.publish(running, 7)
    cache.publish(young, 7)
    assert admit(cache, [2] * 7)[1] == 0
    assert cache.admit(waiting, 7, reserve=0, reuse=True) == 0
    cache.publish(waiting, 7)
    last, cached = admit(cache, [1] * 7)
    assert cached == 6 and blocks(last)[:2] == blocks(waiting)[:2]
