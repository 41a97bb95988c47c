"""The block pool beside a model of it that is too simple to be wrong, and its check on pools that are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_pool

from phonograph.kv_cache.block_pool import BlockPool

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["open", "open", "grow", "name", "name", "share", "close"]), st.integers(0, 999)),
    min_size=20,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(1, 6), operations=OPERATIONS, forget_at=st.none() | st.integers(0, 100))
def test_pool_agrees_with_its_model(num_blocks: int, operations: list[tuple[str, int]], forget_at: int | None) -> None:
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    # The model: a list of names in the order in which their blocks were last let go, and who is named what.
    names: dict[bytes, int] = {}
    idle: list[int] = []
    for step, (operation, pick) in enumerate(operations):
        table = tables[pick % len(tables)] if tables else []
        if step == forget_at:
            pool.forget()
            names, idle = {}, []
        if operation == "open":
            tables.append([])
        elif operation == "grow" and tables and pool.num_free:
            held = {block for one in tables for block in one}
            blank = set(range(num_blocks)) - held - set(idle)
            block = pool.allocate()
            assert block in blank if blank else block == idle.pop(0)
            names = {name: owner for name, owner in names.items() if owner != block}
            table.append(block)
        elif operation == "name" and table and table[-1] not in names.values():
            # Few names, so that blocks of equal contents occur.
            name = bytes([pick % 5])
            pool.name(table[-1], name)
            names.setdefault(name, table[-1])
        elif operation == "share" and (found := pool.find(bytes([pick % 5]))) is not None and found not in table:
            pool.share([found])
            tables.append([found])
            idle = [block for block in idle if block != found]
        elif operation == "close" and tables:
            tables.remove(table)
            pool.release(table)
            held = {block for one in tables for block in one}
            idle += [block for block in reversed(table) if block not in held and block in names.values()]
        for name in range(5):
            assert pool.find(bytes([name])) == names.get(bytes([name]))
        held = {block for one in tables for block in one}
        assert pool.num_used == len(held) and pool.num_free == num_blocks - len(held)
        assert all(pool.is_used(block) == (block in held) for block in range(num_blocks))
        check_pool(pool, [(one, len(one)) for one in tables])


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    table = [pool.allocate() for _ in range(3)]
    for block_id in table:
        pool.name(block_id, bytes([block_id]))
    pool.release(table)
    assert [pool.allocate() for _ in range(3)] == table[::-1]


def test_blank_blocks_are_taken_before_cached_ones_and_used_ones_are_the_last_to_go() -> None:
    pool = BlockPool(4)
    first, second, third = (pool.allocate() for _ in range(3))
    for block_id in (first, second):
        pool.name(block_id, bytes([block_id]))
    pool.release([second])
    pool.release([first])
    pool.release([third])
    pool.share([second])
    pool.release([second])
    assert {pool.allocate(), pool.allocate()} == {third, 3}
    assert [pool.allocate(), pool.allocate()] == [first, second]


def test_equal_contents_keep_the_first_name() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.name(first, b"same")
    pool.name(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second])
    check_pool(pool, [([first], 1)])
    assert pool.find(b"same") == first


def test_a_name_is_removed_from_used_and_free_blocks_and_others_stay() -> None:
    pool = BlockPool(4)
    used, free, other = (pool.allocate() for _ in range(3))
    for block_id, digest in ((used, b"used"), (free, b"free"), (other, b"other")):
        pool.name(block_id, digest)
    pool.release([free])
    pool.unname(b"unknown")
    for digest in (b"used", b"free", b"free"):
        pool.unname(digest)
    assert [pool.find(digest) for digest in (b"used", b"free", b"other")] == [None, None, other]
    check_pool(pool, [([used], 1), ([other], 1)])
    assert pool.num_free == 2 and pool.allocate() != pool.allocate()


def leak(pool: BlockPool, table: list[int]) -> None:
    table.pop()


def use_after_free(pool: BlockPool, table: list[int]) -> None:
    pool.release(table[:1])


def share_for_writing(pool: BlockPool, table: list[int]) -> None:
    pool.share(table[-1:])


def name_before_full(pool: BlockPool, table: list[int]) -> None:
    pool.name(table[-1], b"unfinished")


def hold_twice(pool: BlockPool, table: list[int]) -> None:
    pool.share(table[:1])
    table.insert(0, table[0])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (leak, "references"),
        (use_after_free, "references"),
        (share_for_writing, "can still be written"),
        (name_before_full, "can still be written"),
        (hold_twice, "twice"),
    ],
)
def test_check_finds(harm: Callable[[BlockPool, list[int]], None], message: str) -> None:
    pool = BlockPool(4)
    table = [pool.allocate() for _ in range(3)]
    pool.name(table[0], b"head")
    check_pool(pool, [(table, 2)])
    harm(pool, table)
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, [(table, 2)])


def test_double_free_is_caught_at_once() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.release([block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([block_id])
