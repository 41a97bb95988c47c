"""Runs of sequences that attend a prefix once, in plain Python: the rule that the plan of a step follows on the device.

`explain` reads it, and tests compare the kernels with it (`kernels/triton/attention/shared_runs.py` describes it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from phonograph.attention.attention_spec import UNBOUNDED, AttentionSpec
from phonograph.kernels.attention_scratch import (
    DECODE_PROGRAMS,
    MAX_SHORT_QUERY,
    MIN_SHARED,
    SHARING_COST,
    UNIT_COST,
    key_tile,
    row_tiles,
    tile_width,
)


class PrefixRun(NamedTuple):
    """Sequences `first` to `last` of a batch, which attend keys `begin` to `end` once; `level` is 0 or 1.

    A run of level 1 lies inside a longest range of neighbours that share MIN_SHARED keys, and begins behind its run of
    level 0, if that pays. Else a run begins with the first tile of keys that all queries see.
    """

    level: int
    first: int
    last: int
    begin: int
    end: int


def find_runs(
    spec: AttentionSpec,
    num_sms: int,
    shared: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    left: int = UNBOUNDED,
) -> list[PrefixRun]:
    """Return the runs of a batch, by their first sequence and level; none if they do not pay.

    Args:
        spec: attention of the KV group.
        num_sms: multiprocessors.
        shared: keys in whole blocks that each sequence shares with the one before.
        query_lens: query tokens of each sequence.
        seq_lens: keys of each sequence, the queries' own included.
        left: keys before a query that it sees; UNBOUNDED for all.
    """
    group, width = spec.num_query_heads // spec.num_kv_heads, tile_width(spec.head_size)
    (small, large), tile = row_tiles(group, width, shares=True), key_tile(width)
    starts = [0, *accumulate(query_lens)]
    # First key that all queries of a sequence see.
    lows = [0 if left < 0 else max(keys - 1 - left, 0) for keys in seq_lens]
    shared = [0, *(end * (end - max(pair) >= MIN_SHARED) for end, pair in zip(shared[1:], pairwise(lows), strict=True))]

    def first_tile(first: int, last: int) -> int:
        return -(-max(lows[first : last + 1]) // tile) * tile

    def saved(run: PrefixRun) -> int:
        """Return the tiles of keys that a run saves in each KV head, less what it costs."""
        rows, count = (starts[run.last + 1] - starts[run.first]) * group, run.last - run.first + 1
        tiles = 1 if rows <= small else -(-rows // large)
        return (count - tiles) * max(run.end - run.begin, 0) // tile - tiles * UNIT_COST - count

    found: list[PrefixRun] = []
    for first, last in _neighbours(shared, 0, len(shared) - 1, MIN_SHARED):
        end = min(shared[first + 1 : last + 1]) // tile * tile
        run = PrefixRun(0, first, last, first_tile(first, last), end)
        pays = saved(run) > 0
        found.append(run)
        for head, tail in _neighbours(shared, first, last, end + MIN_SHARED):
            begin = end if pays else first_tile(head, tail)
            found.append(PrefixRun(1, head, tail, begin, min(shared[head + 1 : tail + 1]) // tile * tile))
    found = [run for run in found if saved(run) > 0]
    worth = sum(map(saved, found)) * spec.num_kv_heads >= SHARING_COST * DECODE_PROGRAMS * num_sms
    return sorted(found, key=lambda run: (run.first, run.level)) if worth else []


def count_units(spec: AttentionSpec, runs: Sequence[PrefixRun], query_lens: Sequence[int]) -> tuple[int, int, int]:
    """Return the units of a batch in a layer: of its runs, of the own keys of its sequences, and tiles of keys of runs.

    Args:
        spec: attention of the KV group.
        runs: those that `find_runs` returned.
        query_lens: query tokens of each sequence. Those of more than MAX_SHORT_QUERY have no units here.
    """
    group = spec.num_query_heads // spec.num_kv_heads
    small, large = row_tiles(group, tile_width(spec.head_size), shares=True)

    def tiles(tokens: int, tile: int) -> int:
        return 1 if tokens * group <= small else -(-tokens * group // tile)

    shared = [tiles(sum(query_lens[run.first : run.last + 1]), large) * spec.num_kv_heads for run in runs]
    keys = [(run.end - run.begin) // key_tile(tile_width(spec.head_size)) for run in runs]
    sharing = {row for run in runs for row in range(run.first, run.last + 1)}
    own = sum(
        tiles(query_len, small if row in sharing else large)
        for row, query_len in enumerate(query_lens)
        if 1 <= query_len <= MAX_SHORT_QUERY
    )
    return sum(shared), own * spec.num_kv_heads, sum(map(mul, shared, keys))


def _neighbours(shared: Sequence[int], first: int, last: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield the longest ranges of two or more neighbours that share at least so many keys."""
    begin = first
    for row in range(first + 1, last + 2):
        if row > last or shared[row] < least:
            if row - begin > 1:
                yield begin, row - 1
            begin = row
