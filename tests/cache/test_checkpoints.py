"""Pool of checkpoints: who can find one when, and which is evicted."""

from __future__ import annotations

from phonograph.kv_cache.checkpoints import CheckpointPool


def test_a_checkpoint_is_found_after_the_step_that_writes_it() -> None:
    """Rows of a step run at the same time, so that one that reads it in that step would be one step early."""
    pool = CheckpointPool(2)
    assert pool.write(b"a") == 0 and not pool.has(b"a") and pool.num_used == 1
    assert pool.write(b"a") is None, "the same step writes it once"
    pool.end_step()
    assert pool.has(b"a") and pool.read(b"a") == 0
    assert pool.write(b"a") is None, "there is one already"


def test_the_oldest_is_evicted_but_none_that_the_step_reads() -> None:
    pool = CheckpointPool(2)
    rows = {name: pool.write(name) for name in (b"a", b"b")}
    pool.end_step()
    assert pool.read(b"a") == rows[b"a"]
    assert pool.write(b"c") == rows[b"b"], "the other one was not read for longer"
    assert pool.write(b"d") is None, "one is read and one is written in this step"
    pool.end_step()
    assert not pool.has(b"b") and pool.has(b"a") and pool.has(b"c")
    assert pool.write(b"d") == rows[b"a"]
    assert pool.counts == (1, 2)


def test_removed_and_forgotten_rows_are_used_again() -> None:
    pool = CheckpointPool(1)
    pool.write(b"a")
    pool.end_step()
    pool.remove(b"a")
    pool.remove(b"a")
    assert not pool.has(b"a") and pool.write(b"b") == 0
    pool.forget()
    assert pool.num_used == 0 and pool.write(b"c") == 0
