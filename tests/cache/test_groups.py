"""Rules of KV groups beside models of them that are too simple to be wrong, and the prefix cache of several groups."""

from __future__ import annotations

from itertools import pairwise
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_cache, is_empty
from scheduling import full_group, sliding_group

from phonograph.core.blocks import blocks_for, group_pages, most_tokens, pages_for_request
from phonograph.core.kv_group import KVGroup
from phonograph.kv_cache.groups import FullGroup, SlidingGroup
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import SequenceTable

GROUPS = st.builds(
    lambda window, size: sliding_group(window, size) if window else full_group(size),
    st.sampled_from([None, 1, 2, 3, 4, 5, 8, 13]),
    st.sampled_from([1, 2, 3, 4, 6]),
)


def keys_read(group: KVGroup, num_computed: int, num_tokens: int) -> set[int]:
    """Return the positions whose keys the tokens after `num_computed` read, those before `num_computed` only."""
    window = group.window or num_tokens
    return {
        key
        for query in range(num_computed, num_tokens)
        for key in range(max(0, query - window + 1), query + 1)
        if key < num_computed
    }


@given(group=GROUPS, num_computed=st.integers(0, 40))
def test_blocks_are_needed_while_a_token_reads_them(group: KVGroup, num_computed: int) -> None:
    one = FullGroup(group) if group.window is None else SlidingGroup(group, 8)
    read = keys_read(group, num_computed, num_computed + 1)
    first = min(read, default=num_computed) // group.block_size
    assert one.first_block(num_computed) == first


@settings(max_examples=300)
@given(group=GROUPS, cached=st.integers(0, 2**20), factor=st.sampled_from([1, 2, 3]), steps=st.integers(0, 8))
def test_the_longest_prefix_is_that_of_a_search(group: KVGroup, cached: int, factor: int, steps: int) -> None:
    one = FullGroup(group) if group.window is None else SlidingGroup(group, 8)
    size, step = group.block_size, group.block_size * factor
    fitting = [
        prefix
        for prefix in range(0, steps * step + 1, step)
        if all(cached >> (key // size) & 1 for key in keys_read(group, prefix, prefix + 1))
    ]
    assert one.longest_prefix(steps * step, step, lambda block: bool(cached >> block & 1)) == max(fitting)


@settings(max_examples=200)
@given(
    group=GROUPS, cuts=st.sets(st.integers(1, 60), max_size=8), num_tokens=st.integers(1, 60), longest=st.integers(1, 9)
)
def test_a_request_holds_at_most_the_planned_pages(
    group: KVGroup, cuts: set[int], num_tokens: int, longest: int
) -> None:
    bounds = sorted({0, num_tokens, *range(0, num_tokens, longest), *(cut for cut in cuts if cut < num_tokens)})
    most = 0
    for start, end in pairwise(bounds):
        assert end - start <= longest
        needed = {key // group.block_size for key in keys_read(group, start, start + 1)}
        needed |= {position // group.block_size for position in range(start, end)}
        most = max(most, len(needed))
    assert most <= group_pages(group, num_tokens, longest)


@pytest.mark.parametrize(
    ("window", "size", "chunk", "pages"), [(1, 4, 1, 1), (5, 4, 1, 2), (6, 4, 1, 3), (512, 16, 256, 49)]
)
def test_pages_of_a_sliding_group(window: int, size: int, chunk: int, pages: int) -> None:
    """Each bound is reached: the tokens of a chunk and its window begin at the end of a block."""
    group = sliding_group(window, size)
    assert group_pages(group, 10**6, chunk) == pages <= blocks_for(window + chunk, size) + 2
    held = max(
        (start + chunk - 1) // size - max(0, start - window + 1) // size + 1 for start in range(window, window + size)
    )
    assert held == pages
    assert pages_for_request([group, full_group(size), group], 4 * size, chunk) == 4 + 2 * min(4, pages)


@given(pages=st.integers(0, 30), size=st.integers(1, 5), most=st.integers(0, 40))
def test_most_tokens_are_those_of_a_search(pages: int, size: int, most: int) -> None:
    assert most_tokens(pages, lambda tokens: blocks_for(tokens, size), most) == min(pages * size, most)


def manager(groups: list[KVGroup], num_blocks: int = 400) -> CacheManager:
    return CacheManager(groups, num_blocks=num_blocks, max_num_batched_tokens=8, enable_prefix_caching=True)


def compute(
    cache: CacheManager, token_ids: list[int], salt: str | None = None, *, chunk: int = 8
) -> tuple[SequenceTable, int]:
    """Admit a sequence and compute all its tokens; return its tables and the number of cached tokens."""
    table = cache.make_table(lambda start, stop: token_ids[start:stop], len(token_ids), salt)
    cached = cache.admit(table, len(token_ids), reserve=0, reuse=True)
    assert cached is not None
    for start in range(cached, len(token_ids), chunk):
        cache.free_behind(table, start)
        end = min(start + chunk, len(token_ids))
        cache.extend(table, end)
        cache.publish(table, end)
    return table, cached


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(GROUPS, min_size=1, max_size=4),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8),
    lost=st.lists(st.integers(0, 10**6), max_size=12),
)
def test_a_prefix_is_found_where_every_group_has_its_blocks(
    groups: list[KVGroup], prompts: list[list[int]], lost: list[int]
) -> None:
    """With blocks lost at random, a prompt finds the longest prefix for which a search finds all blocks."""
    cache = manager(groups)
    step = lcm(*(group.block_size for group in groups))
    for turn, token_ids in enumerate(prompts):
        probe = cache.make_table(lambda start, stop, tokens=token_ids: tokens[start:stop], len(token_ids), None)

        def has(index: int, prefix: int, probe: SequenceTable = probe) -> bool:
            size = groups[index].block_size
            keys = probe.keys(index, 0, prefix // size)
            read = keys_read(groups[index], prefix, prefix + 1)
            return all(cache.pool.find(keys[block]) is not None for block in {key // size for key in read})

        candidates = range(0, len(token_ids), step)
        wanted = max(prefix for prefix in candidates if all(has(index, prefix) for index in range(len(groups))))
        table, cached = compute(cache, token_ids)
        assert cached == wanted
        check_cache(cache, [(table, len(token_ids))])
        cache.free(table)
        if names := sorted(cache.pool._block_of):
            for number in lost[turn::3]:
                cache.pool.unname(names[number % len(names)])


def test_equal_tokens_have_unlike_names_in_two_groups() -> None:
    cache = manager([full_group(), full_group()])
    table, _ = compute(cache, [1] * 9)
    assert not set(table.keys(0, 0, 2)) & set(table.keys(1, 0, 2))
    again, cached = compute(cache, [1] * 9)
    assert cached == 8
    for first, second in zip(table.groups, again.groups, strict=True):
        assert first.block_ids[:2] == second.block_ids[:2]


@pytest.mark.parametrize("groups", [[full_group()], [sliding_group(6)], [full_group(), sliding_group(6)]])
def test_salts_resets_and_failures_hold_in_every_group(groups: list[KVGroup]) -> None:
    cache = manager(groups)
    prompt = list(range(20))
    tables = [compute(cache, prompt, salt)[0] for salt in (None, "a", "b")]
    assert [compute(cache, prompt, salt)[1] for salt in (None, "a", "b", "c")] == [16, 16, 16, 0]
    cache.forget(tables[1])
    for index in range(len(groups)):
        assert all(cache.pool.find(key) is None for key in tables[1].keys(index, 0, 5))
    assert [compute(cache, prompt, salt)[1] for salt in (None, "a", "b")] == [16, 0, 16]

    running = cache.make_table(lambda start, stop: list(range(start, stop)), 20, "new")
    assert cache.admit(running, 20, reserve=0, reuse=True) == 0
    cache.extend(running, 8)
    cache.publish(running, 8)
    cache.reset([running, *tables])
    for end in (16, 20):
        cache.extend(running, end)
        cache.publish(running, end)
    assert not cache.pool._block_of, "blocks that are older than the reset are found"
    assert compute(cache, prompt, None)[1] == compute(cache, prompt, "new")[1] == 0


def test_a_promise_counts_own_blocks_only() -> None:
    """Shared blocks may stay in use when the sequence frees them, so that it must take others."""
    cache = manager([sliding_group(9)])
    first, _ = compute(cache, list(range(17)))
    again = cache.make_table(lambda start, stop: list(range(start, stop)), 40, None)
    assert cache.admit(again, 40, reserve=0, reuse=True) == 16
    # A chunk of 8 tokens and its window touch 5 blocks at most. Blocks 2 and 3 are shared.
    assert again.groups[0].held == first.groups[0].block_ids[2:4]
    assert cache.promised(again, 40) == 5
    cache.extend(again, 24)
    assert cache.promised(again, 40) == 3
    cache.free(first)
    assert cache.promised(again, 40) == 1
    cache.free_behind(again, 24)
    assert cache.promised(again, 40) == 3


def test_admission_asks_for_the_chunks_to_come() -> None:
    cache = manager([full_group(), sliding_group(9)], num_blocks=10 + 5)
    table = cache.make_table(lambda start, stop: list(range(start, stop)), 40, None)
    assert cache.admit(table, 40, reserve=1, reuse=True) is None and is_empty(table)
    assert cache.admit(table, 40, reserve=0, reuse=True) == 0
    assert cache.pool.num_free == 5 == cache.promised(table, 40) == cache.most_promised


@pytest.mark.parametrize(("num_blocks", "wanted"), [(7, None), (8, 16)])
def test_admission_counts_no_shared_block_of_a_sliding_group_as_a_gain(num_blocks: int, wanted: int | None) -> None:
    cache = manager([sliding_group(9)], num_blocks=num_blocks)
    compute(cache, list(range(17)))
    assert cache.pool.num_used == 3
    again = cache.make_table(lambda start, stop: list(range(start, stop)), 40, None)
    assert cache.admit(again, 40, reserve=0, reuse=True) == wanted
