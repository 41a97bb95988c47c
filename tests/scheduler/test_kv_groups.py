"""Rules of the scheduler with several KV groups: blocks by chunk, blocks behind windows, promises, and what is sent."""

from __future__ import annotations

import pytest
from invariants import check_scheduler
from scheduling import add, full_group, make_scheduler, output_of, request, sliding_group, step

from phonograph.core.batch import ScheduledBatch
from phonograph.core.blocks import pages_for_request
from phonograph.core.kv_group import KVGroup
from phonograph.errors import RequestError
from phonograph.kv_cache.manager import CacheManager
from phonograph.kv_cache.tables import FREED
from phonograph.scheduling.scheduler import Scheduler


def sent(batch: ScheduledBatch) -> list[tuple[int, int, int]]:
    """Return group, start and number of the blocks of each append."""
    return [(one.group, one.start, len(one.block_ids)) for one in batch.appends]


def test_a_sliding_group_gets_blocks_by_chunk_and_a_full_group_at_admission() -> None:
    scheduler = make_scheduler(groups=[full_group(), sliding_group(6)], max_num_batched_tokens=10)
    add(scheduler, one := request("a", 29, max_tokens=8))
    first, second, third = (step(scheduler) for _ in range(3))
    assert sent(first) == [(0, 0, 8), (1, 0, 3)]
    # The second chunk begins at token 10 and reads from token 5 on: the block of tokens 0 to 3 is free before it.
    assert sent(second) == [(1, 3, 2)]
    assert sent(third) == [(1, 5, 3)]
    table = scheduler._blocks.tables["a"].groups[1]
    assert table.block_ids[:3] == [FREED] * 3 and table.first == 3
    # Token 29 reads from token 24 on. Nothing is sent for freed blocks.
    assert sent(step(scheduler)) == []
    assert (table.first, len(table.block_ids)) == (6, 8)
    for _ in range(2):
        assert sent(step(scheduler)) == []
    # Token 32 begins a block, and reads from token 27 on.
    assert sent(step(scheduler)) == [(0, 8, 1), (1, 8, 1)]
    assert table.first == 6
    while not one.finished:
        step(scheduler)
    scheduler.schedule()
    assert scheduler.stats.blocks_used == 0


def test_a_found_prefix_is_sent_from_its_window_on() -> None:
    scheduler = make_scheduler(groups=[full_group(), sliding_group(6)], max_num_batched_tokens=64)
    add(scheduler, request("a", range(40), max_tokens=1))
    step(scheduler)
    add(scheduler, again := request("b", [*range(40), 5, 5], max_tokens=1))
    batch = step(scheduler)
    assert again.num_cached_tokens == 40 and batch.query_lens == [2]
    # Token 40 reads from token 35 on, in block 8.
    assert sent(batch) == [(0, 0, 11), (1, 8, 3)]


@pytest.mark.parametrize(
    "groups", [[full_group(), sliding_group(9)], [sliding_group(5)], [full_group(8), sliding_group(3)]]
)
def test_the_same_prompt_four_times_has_equal_hits_and_valid_ids(groups: list[KVGroup]) -> None:
    scheduler = make_scheduler(groups=groups, num_blocks=60)
    device = [[[0] * 20 for _ in range(4)] for _ in groups]
    hits: list[int] = []
    for name in "abcd":
        add(scheduler, one := request(name, range(30), max_tokens=20))
        while not one.finished:
            batch = step(scheduler)
            for append in batch.appends:
                end = append.start + len(append.block_ids)
                device[append.group][append.slot][append.start : end] = append.block_ids
        hits.append(one.num_cached_tokens)
        ids = [block_id for rows in device for row in rows for block_id in row]
        assert FREED not in ids and max(ids) < scheduler.num_blocks
    size = max(group.block_size for group in groups)
    assert hits == [0, *[29 // size * size] * 3]


@pytest.mark.parametrize(("num_blocks", "longest"), [(6, 12), (7, 16), (8, 20), (9, 24), (10, 28), (100, 63)])
def test_the_longest_request_counts_the_blocks_of_all_groups(num_blocks: int, longest: int) -> None:
    groups = [full_group(), sliding_group(2)]
    scheduler = make_scheduler(groups=groups, num_blocks=num_blocks, max_num_seqs=1, max_num_batched_tokens=8)
    assert scheduler.context_len == longest + 1
    assert pages_for_request(groups, longest, 8) <= num_blocks
    assert longest == 63 or pages_for_request(groups, longest + 1, 8) > num_blocks
    if longest < 63:
        with pytest.raises(RequestError, match=f"prompt length={longest + 1}: .*which holds {longest}"):
            scheduler.add(request("a", longest + 1))
    add(scheduler, one := request("b", longest))
    while not one.finished:
        step(scheduler)
    assert len(one.output_token_ids) == 1


def crowd() -> Scheduler:
    """Return a scheduler whose decode takes blocks while a long prompt is computed, a token in each step."""
    scheduler = make_scheduler(
        groups=[full_group(), sliding_group(40)], num_blocks=24, max_num_seqs=2, max_num_batched_tokens=2
    )
    add(scheduler, request("a", 3), request("p", 30))
    return scheduler


def test_decodes_leave_the_prompt_in_progress_what_is_promised_to_it() -> None:
    scheduler = crowd()
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("method", ["promised", "most_promised"])
def test_a_promise_that_is_ignored_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = crowd()
    if method == "promised":
        monkeypatch.setattr(CacheManager, "promised", lambda *_: 0)
    else:
        scheduler._blocks.cache.most_promised = 0
    with pytest.raises(AssertionError, match="promised to the prompt in progress"):
        while scheduler.has_unfinished:
            step(scheduler)


def test_what_is_behind_a_windows_prompt_is_free_one_step_after_it() -> None:
    scheduler = make_scheduler(groups=[sliding_group(3)], max_num_batched_tokens=64, max_num_seqs=2)
    add(scheduler, request("a", 41))
    first = scheduler.schedule()
    assert scheduler.stats.blocks_used == 11, "the step that was scheduled reads all of them"
    second = scheduler.schedule()
    check_scheduler(scheduler)
    assert scheduler.stats.blocks_used == 2
    for batch in (first, second):
        scheduler.update(batch, output_of(batch))


def test_requests_that_fit_by_their_windows_run_together() -> None:
    """Each holds its window and a block, not its whole length."""
    groups = [sliding_group(8)]
    scheduler = make_scheduler(groups=groups, num_blocks=4 * 3 + 9, max_num_batched_tokens=24, max_model_len=256)
    add(scheduler, *(request(name, 100, max_tokens=60) for name in "abcd"))
    while scheduler.stats.num_waiting:
        step(scheduler)
    for _ in range(20):
        assert len(step(scheduler).slots) == 4
    assert scheduler.stats.num_preemptions == 0


def test_a_block_may_be_behind_the_window_before_its_tokens_are_known() -> None:
    """With steps in flight it is freed without a digest, and later blocks of the request are found as ever."""
    scheduler = make_scheduler(groups=[sliding_group(1, 2)], max_num_seqs=1)
    add(scheduler, one := request("a", 3, max_tokens=12))
    in_flight: list[ScheduledBatch] = []
    while not one.finished:
        batch = scheduler.schedule()
        check_scheduler(scheduler)
        if batch.slots:
            in_flight.append(batch)
        if len(in_flight) > 5 or not batch.slots:
            oldest = in_flight.pop(0)
            scheduler.update(oldest, output_of(oldest))
    add(scheduler, again := request("b", [*one.prompt_token_ids, *one.output_token_ids, 5]))
    step(scheduler)
    # A window of one token needs no block before the boundary.
    assert again.num_cached_tokens == 14


@pytest.mark.parametrize(("num_blocks", "together"), [(5, 1), (6, 2)])
def test_admission_leaves_sequences_shorter_than_the_window_a_block_to_grow_into(
    num_blocks: int, together: int
) -> None:
    scheduler = make_scheduler(groups=[sliding_group(40)], num_blocks=num_blocks, max_num_seqs=2)
    add(scheduler, request("a", 7))
    step(scheduler)
    add(scheduler, request("b", 7))
    assert len(step(scheduler).slots) == together
