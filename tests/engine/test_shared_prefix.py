"""Blocks that the sequences of a batch share, as the runner finds them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scheduling import make_scheduler, output_of, request

from phonograph.attention.cascade.shared_prefix import SharedPrefixes
from phonograph.core.batch import BlockAppend, ScheduledBatch
from phonograph.runner.runner import shape_of

SIZE = 4


def prefixes_of(*tables: list[int], max_blocks: int = 300) -> SharedPrefixes:
    found = SharedPrefixes(max_num_seqs=len(tables) + 1, max_blocks_per_seq=max_blocks, block_size=SIZE)
    found.update([BlockAppend(slot=slot, start=0, block_ids=table) for slot, table in enumerate(tables)])
    return found


def batch_of(contexts: dict[int, int], query_lens: list[int] | None = None) -> ScheduledBatch:
    lens = query_lens or [1] * len(contexts)
    return ScheduledBatch(
        slots=list(contexts),
        query_lens=lens,
        context_lens=list(contexts.values()),
        samples=[True] * len(lens),
        num_decodes=sum(length <= 2 for length in lens),
        num_decode_tokens=sum(length for length in lens if length <= 2),
        num_tokens=sum(lens),
    )


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ({0: 100, 1: 100}, 8),
        ({1: 100, 0: 100, 2: 100}, 4),
        ({0: 100, 3: 100}, 0),
        # Only what is full and computed before the step: 7 tokens are one block and a part of the next.
        ({0: 100, 1: 7}, 4),
        ({0: 8, 1: 9}, 8),
        ({0: 3, 1: 100}, 0),
        ({2: 13}, 0),
    ],
)
def test_common_blocks(contexts: dict[int, int], expected: int) -> None:
    prefixes = prefixes_of([5, 6, 7, 20], [5, 6, 8, 21], [5, 9, 7, 22], [4, 6, 7, 23])
    assert prefixes.find(batch_of(contexts)) == expected


def test_a_block_that_is_shared_behind_one_that_is_not_does_not_count() -> None:
    assert prefixes_of([1, 2, 3], [1, 9, 3]).find(batch_of({0: 12, 1: 12})) == 4


def test_long_prefixes_end_anywhere() -> None:
    for length in (63, 64, 65, 128, 200):
        one = list(range(250))
        other = [*range(length), *range(500, 750 - length)]
        assert prefixes_of(one, other).find(batch_of({0: 1000, 1: 1000})) == length * SIZE


def test_a_slot_that_is_loaded_anew_is_compared_anew() -> None:
    prefixes = prefixes_of([1, 2, 3], [1, 2, 4])
    batch = batch_of({0: 12, 1: 12})
    assert prefixes.find(batch) == 8
    prefixes.update([BlockAppend(slot=0, start=3, block_ids=[7])])
    assert prefixes.find(batch_of({0: 13, 1: 13})) == 8
    # A shorter table in its place: what lies behind it is the former sequence's.
    prefixes.update([BlockAppend(slot=1, start=0, block_ids=[1])])
    assert prefixes.find(batch) == 4
    prefixes.update([BlockAppend(slot=1, start=0, block_ids=[8, 2, 3])])
    assert prefixes.find(batch) == 0
    assert prefixes.find(batch_of({0: 12})) == 0


def test_any_of_them_may_leave_or_come() -> None:
    """Whichever the others are compared with."""
    prefixes = prefixes_of([1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 5, 6])
    contexts = {slot: 20 for slot in range(4)}
    assert prefixes.find(batch_of(contexts)) == 8
    assert prefixes.find(batch_of({1: 20, 2: 20, 3: 20})) == 12, "without the one that shared least"
    prefixes.update([BlockAppend(slot=0, start=0, block_ids=[1, 2, 4, 5, 7])])
    assert prefixes.find(batch_of({0: 20, 2: 20, 3: 20})) == 16
    assert prefixes.find(batch_of(contexts)) == 12
    # A slot that is no longer in the batch, of which only the host has a copy, is not compared.
    prefixes.update([BlockAppend(slot=1, start=0, block_ids=[9])])
    assert prefixes.find(batch_of({0: 20, 3: 20})) == 16
    assert prefixes.find(batch_of({0: 20, 1: 20, 3: 20})) == 0


def test_mixed_batches_have_no_shared_prefix() -> None:
    prefixes = prefixes_of([1, 2, 3], [1, 2, 4])
    assert shape_of(batch_of({0: 9, 1: 9}), prefixes).prefix_len == 8
    assert shape_of(batch_of({0: 9, 1: 8}, [2, 2]), prefixes).prefix_len == 0
    assert shape_of(batch_of({0: 9, 1: 8}, [1, 3]), prefixes).prefix_len == 0
    assert shape_of(batch_of({0: 9, 1: 9})).prefix_len == 0


@pytest.mark.parametrize("num_blocks", [14, 80])
def test_shared_prefixes_of_scheduled_batches(num_blocks: int) -> None:
    """Prompts that begin alike or not, in steps of a scheduler that may have to preempt."""
    rng = np.random.default_rng(num_blocks)
    scheduler = make_scheduler(
        max_num_seqs=5, max_num_batched_tokens=24, max_model_len=48, num_blocks=num_blocks, block_size=SIZE
    )
    prefixes = SharedPrefixes(max_num_seqs=5, max_blocks_per_seq=12, block_size=SIZE)
    tables: dict[int, list[int]] = {}
    sharing = 0
    for number in range(300):
        if rng.random() < 0.3:
            prompt = [int(rng.integers(0, 2))] * int(rng.integers(1, 40))
            scheduler.add(request(str(number), prompt, max_tokens=int(rng.integers(1, 25))))
        batch = scheduler.schedule()
        if not batch.slots:
            continue
        for append in batch.appends:
            table = tables.setdefault(append.slot, [])
            table[append.start :] = append.block_ids
        prefixes.update(batch.appends)
        full = [tables[slot][: at // SIZE] for slot, at in zip(batch.slots, batch.context_lens, strict=True)]
        common = zip(*full, strict=False)
        expected = next((at for at, ids in enumerate(common) if len(set(ids)) > 1), min(map(len, full)))
        expected *= len(full) > 1
        assert prefixes.find(batch) == expected * SIZE
        sharing += expected > 0
        scheduler.update(batch, output_of(batch, token_id=1))
    assert sharing > 20
    assert bool(scheduler.stats.num_preemptions) == (num_blocks == 14)


def test_a_step_like_the_one_before_compares_nothing() -> None:
    prefixes = prefixes_of(*[[*range(1000), 2000 + slot] for slot in range(256)], max_blocks=2000)
    batch = batch_of({slot: 4002 for slot in range(256)})
    assert prefixes.find(batch) == 4000
    prefixes._tables[:] = np.arange(len(prefixes._tables))[:, None]  # would be found different
    start = time.process_time()
    for _ in range(100):
        assert prefixes.find(batch) == 4000
    assert time.process_time() - start < 1.0
