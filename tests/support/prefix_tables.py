"""Block tables whose sequences share leading blocks, and plans of them compared with runs that plain Python finds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.triton.prefix_runs import count_units, find_runs
from phonograph.kernels.attention_scratch import DECODE_PROGRAMS, UNIT_COST, row_tiles
from phonograph.kernels.triton.attention.decode_plan import COSTS, PACKED, SHARES, DecodePlan, plan_decode

Entry = tuple[int, int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Block tables of a batch of (query length, keys); entries behind a sequence's end are those of others.

    left: keys before a query that it sees, -1 for all. Entries before a sequence's window mean nothing.
    """

    batch: list[tuple[int, int]]
    rows: list[list[int]]
    block_size: int
    left: int = -1


def draw_tables(rng: random.Random) -> Tables:
    """Draw sequences that copy the leading blocks of earlier ones, and hints that mislead."""
    size = rng.choice([16, 32, 48, 64, 128])
    most_query, num_seqs, width = rng.choice([1, 1, 5]), rng.randint(1, 14), 4200 // size
    ids = rng.sample(range(1, 20000), 20 * width)
    batch: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for index in range(num_seqs):
        query_len = 0 if rng.random() < 0.05 else 17 if rng.random() < 0.05 else rng.randint(1, most_query)
        row, shared = [ids.pop() for _ in range(width)], 0
        if index and rng.random() < 0.85:
            source = index - 1 if rng.random() < 0.8 else rng.randrange(index)
            context = max(batch[source][1] - batch[source][0], 0)
            lengths = [
                0,
                size,
                256 - size,
                256,
                256 + size,
                context,
                context - 1,
                rng.randint(0, context),
                context // 2,
            ]
            shared = min(max(rng.choice(lengths), 0), context) // size
            row[:shared] = rows[source][:shared]
            if rng.random() < 0.1:
                # Equal blocks in the middle, but not at the beginning.
                row[shared + 1 : shared + 9] = rows[source][shared + 1 : shared + 9]
            if rng.random() < 0.1 and shared > 1:
                row[:shared] = rng.sample(row[:shared], shared)
            if rng.random() < 0.1:
                # A block that another sequence left and this one writes: equal, though neither has computed it.
                row = rows[source][: shared + 1] + row[shared + 1 :]
        own = rng.choice([0, 1, size - 1, rng.randint(0, 300), rng.randint(0, 3000)]) if index else 1500
        keys = min(shared * size + own, width * size - 20) + query_len
        batch.append((query_len, keys if query_len else 0))
        rows.append(row)
    longest = max(keys for _, keys in batch)
    left = rng.choice([255, 256, 600, longest // 2, longest - 300, longest - size, longest, rng.randint(0, longest)])
    left = rng.choice([-1, left])
    if left >= 0:
        freed = ids.pop()
        for row, (query_len, keys) in zip(rows, batch, strict=True):
            count = max(keys - query_len - left, 0) // size
            row[:count] = rng.choice([row[:count], [freed] * count])
    return Tables(batch=batch, rows=rows, block_size=size, left=left)


def shared_keys(tables: Tables, *, max_query_len: int, max_tokens: int) -> list[int]:
    """Return the end of the keys that each sequence shares with the one before, block by block from the window on."""
    found: list[int] = []
    end = 0
    for row, (query_len, keys) in enumerate(tables.batch):
        end += query_len
        found.append(0)
        query_before, keys_before = tables.batch[row - 1]
        if row == 0 or not (1 <= query_len <= max_query_len and 1 <= query_before <= max_query_len) or end > max_tokens:
            continue
        context = min(keys - query_len, keys_before - query_before)
        low = max(keys, keys_before) - 1 - tables.left if tables.left >= 0 else 0
        first = max(low, 0) // tables.block_size
        found[-1] = first * tables.block_size
        for mine, other in zip(tables.rows[row][first:], tables.rows[row - 1][first:], strict=True):
            if mine != other or found[-1] + tables.block_size > context:
                break
            found[-1] += tables.block_size
    return found


def expected_entries(
    tables: Tables, plan: DecodePlan, *, max_query_len: int
) -> tuple[list[Entry], list[Entry], tuple[int, int]]:
    """Return a plan's entries, of sequences and of prefixes, and its units, from the runs that plain Python finds."""
    assert plan.prefixes is not None
    query_lens = [query_len for query_len, _ in tables.batch]
    starts = [0, *accumulate(query_lens)]
    shared = shared_keys(tables, max_query_len=max_query_len, max_tokens=plan.prefixes.num_tokens)
    spec = AttentionSpec(
        num_query_heads=plan.num_kv_heads * plan.group,
        num_kv_heads=plan.num_kv_heads,
        head_size=plan.head_size,
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=tables.block_size,
    )
    seq_lens = [keys for _, keys in tables.batch]
    runs = find_runs(spec, plan.programs // DECODE_PROGRAMS, shared, query_lens, seq_lens, tables.left)
    entries: list[Entry] = []
    prefixes: list[Entry] = []
    for row, (query_len, keys) in enumerate(tables.batch):
        if not 1 <= query_len <= max_query_len:
            continue
        inside = [run for run in runs if run.first <= row <= run.last]
        for run in inside:
            if run.first == row:
                prefixes.append((row, starts[row], starts[run.last + 1] - starts[row], run.end, run.begin + run.level))
        own = max((run.end for run in inside), default=0)
        if inside and tables.left >= 0:
            # Tiles of own keys before the hole, then those in it.
            before = inside[0].begin // plan.block_n - max(keys - query_len - tables.left, 0) // plan.block_n
            own = ((before << 14) + (own - inside[0].begin) // plan.block_n) * PACKED.value
        entries.append((row, starts[row], query_len, keys, own + SHARES.value * bool(inside)))
    served = [query_len if query_len <= max_query_len else 0 for query_len in query_lens]
    return entries, prefixes, count_units(spec, runs, served)


def prefixes_in(plan: DecodePlan) -> list[Entry]:
    """Return the entries of shared prefixes that a plan has, or once had."""
    assert plan.prefixes is not None
    return [tuple(entry) for entry in plan.sequences[1 + plan.prefixes.shared.shape[0] :].tolist() if entry[0] >= 0]


def check_work(tables: Tables, plan: DecodePlan, entries: list[Entry], record: list[int]) -> None:
    """Compare the chunks of all ranges with the tiles of own keys."""
    small, large = row_tiles(plan.group, plan.partial_out.shape[2], shares=True)
    size, empty = record[2] // COSTS.value * COSTS.value // plan.block_n, record[2] % COSTS.value
    prefix_units, _, prefix_tiles = plan.prefixes.units.tolist()
    take = prefix_units and 2 + min(plan.programs, prefix_tiles // 2) // (3 * prefix_units)
    assert empty in (0, UNIT_COST + min(take, 13)), tables
    chunks = 0
    for _, _, query_len, keys, word in entries:
        first, kind = word // PACKED.value, word % PACKED.value
        tiles = first * PACKED.value // plan.block_n
        if tables.left >= 0:
            tiles = max(keys - query_len - tables.left, 0) // plan.block_n + first % (1 << 14)
        rows = query_len * plan.group
        units = -(-rows // (small if rows <= small or kind else large)) * plan.num_kv_heads
        before = empty if kind else min(empty, UNIT_COST)
        chunks += (-(-(-(-keys // plan.block_n) - tiles) // size) + before) * units
    assert record[3] // 1024 * plan.programs + record[3] % 1024 == chunks, tables


def check_plan(tables: Tables, plan: DecodePlan, device: torch.device, *, max_query_len: int, slots: int = 0) -> bool:
    """Compare a plan with the expected one; return True if it shares. `slots` are empty ones behind the batch."""
    width = max(map(len, tables.rows))
    table = torch.full((len(tables.rows) + slots, width), 7, dtype=torch.int32, device=device)
    for index, row in enumerate(tables.rows):
        table[index, : len(row)] = torch.tensor(row)
    query_lens, lens = [list(column) + [0] * slots for column in zip(*tables.batch, strict=True)]
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    plan.sequences.fill_(-1)
    plan_decode(
        plan,
        starts,
        torch.tensor(lens, dtype=torch.int32, device=device),
        max_query_len=max_query_len,
        window=(tables.left, -1),
        block_tables=(table,),
        block_size=tables.block_size,
    )
    expected, prefixes, units = expected_entries(tables, plan, max_query_len=max_query_len)
    assert [tuple(entry) for entry in plan.sequences[: len(expected)].tolist()] == expected, tables
    assert prefixes_in(plan) == prefixes, tables
    assert plan.prefixes is not None and tuple(plan.prefixes.units.tolist()) == units, tables
    records = plan.records.tolist()
    own = records[plan.programs :] if prefixes else records[: plan.programs]
    check_work(tables, plan, expected, own[0])
    for index, _, _, ranges, *entry, together in own:
        assert together == (plan.programs if prefixes else 0)
        if ranges and index < len(expected):
            assert tuple(entry) == expected[index], tables
    for index, _, _, ranges, *entry, together in records[: plan.programs] if prefixes else ():
        assert together == plan.programs
        if ranges and index - plan.prefixes.shared.shape[0] - 1 < len(prefixes):
            assert tuple(entry) == prefixes[index - plan.prefixes.shared.shape[0] - 1], tables
    return bool(prefixes)


def chain(*lengths: int, size: int = 16, own: int = 90, left: int = -1) -> Tables:
    """Return one sequence, and those that share that many keys with the one before each."""
    ids = iter(range(1, 1 << 20))
    keys = max(lengths) + own
    rows: list[list[int]] = [[next(ids) for _ in range(-(-keys // size))]]
    for length in lengths:
        rows.append(rows[-1][: length // size] + [next(ids) for _ in range(len(rows[0]) - length // size)])
    return Tables(batch=[(1, keys)] * len(rows), rows=rows, block_size=size, left=left)


def shares(plan: DecodePlan) -> bool:
    return bool((plan.records[: plan.programs, -1] > 0).any())
