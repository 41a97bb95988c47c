"""Invariants of the scheduler, the block tables and the block pool, asserted on their private state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, takewhile

from phonograph.core.blocks import blocks_for, group_pages
from phonograph.core.request import RequestState
from phonograph.kv_cache.block_pool import BlockPool
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import FREED, SequenceTable
from phonograph.scheduling.scheduler import Scheduler


def is_empty(table: SequenceTable) -> bool:
    """Return True for a sequence without blocks."""
    return not any(one.block_ids for one in table.groups)


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert the invariants of slots, queues and blocks."""
    requests, tables = scheduler._requests, scheduler._blocks.tables
    waiting, running = scheduler._waiting, scheduler._running
    ending = [request for request in requests.values() if request.state is RequestState.ENDING]
    assert all(request.state is RequestState.RUNNING for request in running)
    assert all(request.slot == -1 and is_empty(tables[request.request_id]) for request in ending)
    for request in ending:
        assert any(request in batch for _, batch in scheduler._in_flight), "its last token is not in flight"
    assert all(request.slot == slot for slot, request in scheduler._decoding.items())
    slots = [request.slot for request in running]
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.limits.max_num_seqs)), (
        "a slot is lost or doubled"
    )
    assert waiting == sorted(waiting, key=lambda request: request.rank)
    for request in waiting:
        assert request.slot == -1 and not request.max_computed and is_empty(tables[request.request_id])
    assert {id(request) for request in requests.values()} == {id(r) for r in (*waiting, *running, *ending)}
    assert len(requests) == len(waiting) + len(running) + len(ending)
    assert tables.keys() == requests.keys()
    check_groups(scheduler)
    check_order(scheduler)
    for request in running:
        assert 0 <= request.min_computed <= request.max_computed, "the bounds of the computed tokens are crossed"
        reached = min(request.max_computed + scheduler.limits.lookahead_tokens, request.max_len - 1)
        for one, group in zip(tables[request.request_id].groups, scheduler.groups, strict=True):
            assert len(one.block_ids) >= blocks_for(reached, group.block_size), "a step writes behind its blocks"
    known = {key: min(request.min_computed, request.num_tokens) for key, request in requests.items()}
    check_cache(scheduler._blocks.cache, ((table, known[key]) for key, table in tables.items()))


def check_order(scheduler: Scheduler) -> None:
    """Assert that decodes are ordered by the leading blocks that they share: those that share any are neighbours."""
    full = next((index for index, group in enumerate(scheduler.groups) if group.window is None), None)
    if full is None:
        return
    tables = [scheduler._blocks.tables[one.request_id].groups[full].block_ids for one in scheduler._decoding.values()]
    for table, other in combinations(tables, 2):
        if num_equal(table, other) < sum(map(int.__eq__, table, other)):
            # Sequences that computed the same blocks apart. The scheduler takes leading blocks by bisection.
            return
    for first, table in enumerate(tables):
        least = len(table)
        for before, other in pairwise(tables[first:]):
            least = min(least, num_equal(before, other))
            assert num_equal(table, other) == least, "decodes that share blocks are not neighbours"


def num_equal(block_ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of leading blocks that are equal."""
    pairs = zip(block_ids, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def check_groups(scheduler: Scheduler) -> None:
    """Assert that no request holds more blocks than planned, and that the prompt in progress can take its blocks."""
    limits, tables = scheduler.limits, scheduler._blocks.tables
    for request in scheduler._decoding.values():
        # The step that reads the chunk may not have run before the next schedule. Drafts are at most a chunk.
        chunk = limits.max_num_batched_tokens if scheduler.drafts or request in scheduler._prefilled else 1
        for group, one in zip(scheduler.groups, tables[request.request_id].groups, strict=True):
            assert len(one.held) <= group_pages(group, limits.max_model_len, chunk), "blocks behind a window are held"
    request = scheduler._prefilling
    if request is None:
        return
    pool, promised = scheduler._blocks.cache.pool, 0
    for group, one in zip(scheduler.groups, tables[request.request_id].groups, strict=True):
        reached = max(request.num_tokens, min(request.num_tokens + limits.lookahead_tokens, request.max_len - 1))
        most = group_pages(group, reached, limits.max_num_batched_tokens)
        assert len(one.held) <= most, "a prompt holds more blocks than planned"
        rest = min(most, blocks_for(request.num_tokens, group.block_size) - one.first)
        if group.window is not None:
            promised += max(0, rest - sum(pool._references[block_id] == 1 for block_id in one.held))
    assert promised <= pool.num_free, "decodes took blocks that are promised to the prompt in progress"


def check_cache(cache: CacheManager, tables: Iterable[tuple[SequenceTable, int]]) -> None:
    """Assert the pool's invariants. tables: all there are, each with the number of its tokens known and computed."""
    held: list[tuple[list[int], int]] = []
    for table, computed in tables:
        for group, one in zip(cache._groups, table.groups, strict=True):
            first, blocks = one.first, one.held
            assert one.block_ids[:first] == [FREED] * first, "entries before the first held block are not freed"
            assert FREED not in blocks, "a held entry is marked as freed"
            if blocks:
                held.append((blocks, computed // group.block_size - first))
    check_pool(cache.pool, held)


def check_pool(pool: BlockPool, tables: Iterable[tuple[Sequence[int], int]]) -> None:
    """Assert that no block is leaked, freed while used, freed twice, or shared while it can still be written.

    tables: of every sequence that holds blocks, its block table and the number of its blocks that are full
    """
    holders = [0] * len(pool._references)
    for block_ids, num_full in tables:
        for block_id in block_ids:
            holders[block_id] += 1
        assert len(set(block_ids)) == len(block_ids), f"a table holds a block twice: {block_ids}"
        for block_id in block_ids[num_full:]:
            assert pool._references[block_id] == 1, f"block {block_id} is shared and can still be written"
            assert pool._digest_of[block_id] is None, f"block {block_id} has a name and can still be written"
    if holders != pool._references:
        for block_id, (references, number) in enumerate(zip(pool._references, holders, strict=True)):
            assert references == number, f"block {block_id} counts {references} references, {number} tables hold it"
    free = [*pool._blank, *pool._evictable]
    assert len(set(free)) == len(free), "a block is free twice"
    assert set(free) == {b for b, n in enumerate(pool._references) if not n}, "held and free blocks overlap or leak"
    assert all(pool._digest_of[b] is None for b in pool._blank), "a blank block has a name"
    named = {digest: b for b, digest in enumerate(pool._digest_of) if digest is not None}
    assert named == pool._block_of, "names and blocks disagree"
    assert all(pool._digest_of[b] is not None for b in pool._evictable), "an evictable block has no name"
