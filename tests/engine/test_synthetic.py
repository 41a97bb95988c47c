"""Batches drawn for captures and for verification fit the cache they are drawn for, however small it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phonograph.core.blocks import blocks_for, most_step_tokens
from phonograph.core.kv_group import KVGroup
from phonograph.errors import MemoryLimitError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.runner.synthetic_batches import SyntheticBatches


def held(tables: list[np.ndarray], num_shared: int) -> list[int]:
    """Return the pages of block tables, with the leading ones that several share only once."""
    rows = [table.tolist() for table in tables]
    prefix = rows[0][:num_shared]
    return prefix + [page for row in rows for page in row[num_shared if row[:num_shared] == prefix else 0 :]]


@example(block_size=32, max_model_len=64, max_num_seqs=3, more_blocks=0, share=1.0, seed=0)
@example(block_size=16, max_model_len=64, max_num_seqs=6, more_blocks=0, share=1.0, seed=0)
@example(block_size=16, max_model_len=40, max_num_seqs=8, more_blocks=0, share=1.0, seed=0)
@given(
    block_size=st.integers(1, 40),
    max_model_len=st.integers(2, 100),
    max_num_seqs=st.integers(1, 12),
    more_blocks=st.integers(0, 12),
    share=st.one_of(st.just(1.0), st.floats(0, 1)),
    seed=st.integers(0, 1000),
)
def test_batches_of_a_cache_that_is_nearly_too_small(
    block_size: int, max_model_len: int, max_num_seqs: int, more_blocks: int, share: float, seed: int
) -> None:
    per_request = blocks_for(max_model_len, block_size)
    groups = (KVGroup(layers=(0,), block_size=block_size),)
    limits = {"max_model_len": max_model_len, "num_blocks": max(per_request, max_num_seqs) + more_blocks}
    most = most_step_tokens(max_num_seqs=max_num_seqs, groups=groups, **limits)
    key = GraphKey(GraphSet.MIXED, max(1, round(share * most)), max_num_seqs)

    def fits(batch: Any, _: GraphKey) -> Any:
        assert sum(batch.query_lens) <= key.num_tokens and 1 <= len(batch.query_lens) <= max_num_seqs
        assert min(batch.query_lens) >= 1
        assert batch.max_lens is not None or batch.query_lens == sorted(batch.query_lens)
        lengths = [query + context for query, context in zip(batch.query_lens, batch.context_lens, strict=True)]
        assert max(lengths) <= max_model_len
        assert [len(table) for table in batch.blocks[0]] == [blocks_for(length, block_size) for length in lengths]
        if batch.max_lens is not None:
            assert batch.max_lens == [len(table) * block_size for table in batch.blocks[0]]
            assert all(length < most for length, most in zip(lengths, batch.max_lens, strict=True))
        used = held(batch.blocks[0], batch.prefix_len // block_size)
        assert len(set(used)) == len(used)
        return batch

    batches = SyntheticBatches(fits, vocab_size=10, groups=groups, ends_in_blocks=block_size > 1, **limits)
    assert sum(batches.capture_batch(key).query_lens) == key.num_tokens  # pyright: ignore[reportAttributeAccessIssue]
    rng = np.random.default_rng(seed)
    for _ in range(20):
        batches.random_batch(key, rng)


SLIDING = KVGroup(layers=(0,), block_size=4, window=7)


@given(
    groups=st.lists(
        st.builds(KVGroup, layers=st.just((0,)), block_size=st.integers(1, 20), window=st.none() | st.integers(1, 50)),
        min_size=1,
        max_size=4,
    ),
    max_model_len=st.integers(2, 100),
    more_blocks=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
def test_blocks_behind_windows_are_one_page_that_no_sequence_has(
    groups: list[KVGroup], max_model_len: int, more_blocks: int, seed: int
) -> None:
    num_blocks = 6 * len(groups) + more_blocks
    most = most_step_tokens(num_blocks=num_blocks, groups=groups, max_model_len=max_model_len, max_num_seqs=6)
    key = GraphKey(GraphSet.MIXED, most, 6)

    def fits(batch: Any, _: GraphKey) -> Any:
        kept: list[int] = []
        for group, tables in zip(groups, batch.blocks, strict=True):
            for table, query, context in zip(tables, batch.query_lens, batch.context_lens, strict=True):
                assert len(table) == blocks_for(context + query, group.block_size)
                first = 0 if group.window is None else max(0, context - group.window + 1) // group.block_size
                assert set(table[:first]) <= {batches.freed_page}
                kept += table[first:].tolist() if group.window is not None else []
            kept += held(tables, batch.prefix_len // group.block_size) if group.window is None else []
        assert len(set(kept)) == len(kept) and batches.freed_page not in kept
        assert all(0 <= page < num_blocks for page in [*kept, batches.freed_page or 0])
        return batch

    batches = SyntheticBatches(fits, vocab_size=10, groups=groups, max_model_len=max_model_len, num_blocks=num_blocks)
    assert sum(batches.capture_batch(key).query_lens) == key.num_tokens  # pyright: ignore[reportAttributeAccessIssue]
    rng = np.random.default_rng(seed)
    for _ in range(20):
        batches.random_batch(key, rng)


def test_contexts_go_beyond_windows() -> None:
    """A sliding group bounds no context by its pages."""
    found: list[int] = []

    def note(batch: Any, _: GraphKey) -> Any:
        found.append(max(batch.context_lens))
        return batch

    batches = SyntheticBatches(note, vocab_size=10, groups=[SLIDING], max_model_len=1000, num_blocks=9)
    rng = np.random.default_rng(0)
    for _ in range(50):
        batches.random_batch(GraphKey(GraphSet.DECODE, 2, 2, 1), rng)
    assert max(found) > 500


def test_a_page_stays_free_for_the_place_of_blocks_behind_windows() -> None:
    """A query of four tokens and the window before it may lie in three blocks: all that there are."""
    found: list[int] = []

    def note(batch: Any, _: GraphKey) -> Any:
        found.append(len(set(batch.blocks[0][0])))
        return batch

    group = KVGroup(layers=(0,), block_size=4, window=4)
    batches = SyntheticBatches(note, vocab_size=10, groups=[group], max_model_len=100, num_blocks=3)
    rng = np.random.default_rng(0)
    for _ in range(100):
        batches.random_batch(GraphKey(GraphSet.MIXED, 4, 1), rng)
    assert max(found) == 2


def test_a_batch_that_the_cache_does_not_hold_is_refused_by_name() -> None:
    def batches(num_blocks: int) -> SyntheticBatches:
        return SyntheticBatches(
            lambda batch, _: batch,
            vocab_size=10,
            max_model_len=64,
            groups=(KVGroup(layers=(0,), block_size=16),),
            num_blocks=num_blocks,
        )

    key = GraphKey(GraphSet.DECODE, 8, 8, 1)
    with pytest.raises(MemoryLimitError, match=r"needs 8 KV blocks of 16 tokens, but there are 7; grant more"):
        batches(7).capture_batch(key)
    full = batches(8).capture_batch(key)
    assert len({block for blocks in full.blocks[0] for block in blocks}) == 8


@pytest.mark.parametrize("windows", [(None,), (None, 40), (40, None, None)])
def test_half_of_the_batches_share_a_prefix(windows: tuple[int | None, ...]) -> None:
    groups = [KVGroup(layers=(index,), block_size=16, window=window) for index, window in enumerate(windows)]
    batches = SyntheticBatches(
        lambda batch, _: batch, vocab_size=10, max_model_len=640, groups=groups, num_blocks=120 * len(groups)
    )
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    for _ in range(200):
        batch = batches.random_batch(GraphKey(GraphSet.DECODE, 8, 8, 1), rng)
        lengths.append(batch.prefix_len)
        for group, tables in zip(groups, batch.blocks, strict=True):
            num_shared = batch.prefix_len // 16 if group.window is None else 0
            pages = [page for page in held(tables, num_shared) if page != batches.freed_page]
            assert len(set(pages)) == len(pages)
    assert 60 <= sum(map(bool, lengths)) <= 140 and max(lengths) >= 256
