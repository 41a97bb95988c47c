"""Attention of short queries against the definition, on ragged paged batches over poisoned memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from decode_problem import NAN, Case, Problem

from phonograph.kernels.triton.attention.decode import decode_attention
from phonograph.kernels.triton.attention.decode_plan import COSTS, UNIT_COST, DecodePlan, make_decode_plan, plan_decode

RAGGED = ((1, 300), (1, 1), (1, 17), (1, 129), (0, 0))
QUERIES = ((1, 200), (1, 3), (3, 150), (16, 16), (9, 260), (17, 40), (2, 2), (0, 0), (0, 0))
SMALL = [
    Case(batch=RAGGED, max_query_len=1),
    Case(batch=((1, 513),), max_query_len=1, padding=0, num_sms=4),
    Case(batch=QUERIES),
    Case(batch=QUERIES, num_query_heads=14, num_sms=3, lse=False),
    Case(batch=((4, 260), (4, 4), (4, 70), (0, 0)), max_query_len=4),
    Case(batch=RAGGED, num_query_heads=2, max_query_len=1, hnd=True, block_size=48),
    Case(batch=((1, 150), (1, 40)), num_query_heads=71, num_kv_heads=1, max_query_len=1, num_sms=3),
    Case(batch=((2, 150), (16, 200)), num_query_heads=12, num_kv_heads=1, num_sms=1),
    Case(batch=QUERIES, window=(70, 0), sinks=True),
    Case(batch=QUERIES, window=(0, 0)),
    Case(batch=((1, 150), (12, 200), (3, 3)), causal=False, window=(40, 5), block_size=128),
    Case(batch=((1, 150), (12, 200), (3, 3)), causal=False, window=(0, 2)),
    Case(batch=((1, 150), (12, 200), (3, 3)), causal=False, block_size=64),
    Case(batch=QUERIES[:4], softcap=2.5, alibi=True, sinks=True, hnd=True),
    Case(batch=RAGGED, head_size=72, max_query_len=1, sinks=True),
    Case(batch=((1, 150), (1, 20)), head_size=256, max_query_len=1),
    # Heads of 512, and of a size between: tiles of 16 rows and 16 keys.
    Case(batch=((1, 150), (1, 1), (0, 0), (1, 33)), head_size=512, max_query_len=1, num_sms=3),
    Case(batch=((1, 90), (5, 47), (17, 40)), head_size=512, num_query_heads=6, dtype=torch.float16, sinks=True),
    Case(batch=((1, 90), (16, 60)), head_size=328, num_query_heads=9, num_kv_heads=1, window=(40, 0), block_size=48),
    Case(batch=((1, 90), (3, 60)), head_size=512, dtype=torch.float16, kv_dtype=torch.float8_e5m2, num_sms=1),
    Case(batch=RAGGED, head_size=64, dtype=torch.float16, max_query_len=1),
    Case(batch=QUERIES[:4], head_size=8, dtype=torch.float16),
    Case(batch=QUERIES[:4], head_size=8, dtype=torch.float16, kv_dtype=torch.float8_e5m2),
    Case(batch=((1, 0), (3, 2), (1, 5)), sinks=True),
    Case(batch=((1, 0), (0, 0))),
    Case(batch=((0, 0), (0, 0)), padding=5),
    Case(batch=((17, 90), (40, 40)), padding=3),
    Case(batch=((1, 150), (2, 90)), dtype=torch.float16, kv_dtype=torch.float8_e5m2),
    Case(batch=QUERIES, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, head_size=40, window=(70, 0)),
    # In tiles of 64 rows only wide heads are moved in pairs.
    Case(
        batch=((1, 30), (12, 150)),
        dtype=torch.float16,
        kv_dtype=torch.float8_e5m2,
        head_size=128,
        num_query_heads=8,
        num_sms=1,
    ),
    # Beside queries that are another launch's.
    Case(batch=((1, 300), (17, 200), (1, 129), (5, 90), (40, 40)), num_sms=3, divide=True),
    Case(batch=((1, 700), (17, 200), (16, 300)), num_sms=5, divide=True, window=(90, 0)),
    Case(batch=((17, 200), (30, 30)), num_sms=3, divide=True),
    # Queries in bfloat16 are multiplied in float16.
    Case(batch=QUERIES, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, num_query_heads=14, num_sms=3),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_short_queries(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    problem.check(problem.plan())


def test_one_plan_serves_any_batch(device: torch.device) -> None:
    """Replay as a graph does: the same tensors with other contents, and nothing left from the batch before."""
    base = Case(batch=RAGGED)
    plan = Problem(base, device).plan()
    for batch in (RAGGED, ((3, 5),), ((16, 400), (1, 1)), ((0, 0), (0, 0)), RAGGED):
        Problem(replace(base, batch=batch), device).check(plan)


@pytest.mark.parametrize(
    ("lens", "left", "chunk_tiles", "chunks", "empty"),
    [
        # Two units of 9 tiles each among 8 programs: 3 tiles each.
        ([513], -1, 3, 6, 0),
        # Units of 9 and 6 tiles: a fair share of the 30 is 4, but makes 10 chunks.
        ([513, 350], -1, 5, 8, 0),
        # More units than programs.
        ([513, 64, 64, 64, 64], -1, 1, 26 + 10 * 2, 2),
        ([0, 0], -1, 1, 0, 0),
        # The keys of a window are counted from the tile in which it begins.
        ([513, 350], 0, 1, 4, 0),
        ([513], 64, 1, 4, 0),
        ([513], 65, 1, 6, 0),
    ],
)
def test_few_units_are_cut_evenly(
    lens: list[int], left: int, chunk_tiles: int, chunks: int, empty: int, device: torch.device
) -> None:
    batch = tuple((min(length, 1), length) for length in lens)
    problem = Problem(Case(batch=batch, num_sms=4, window=(left, -1)), device)
    plan = problem.plan()
    problem.check(plan)
    assert plan.programs == 8
    chunk_keys = chunk_tiles * plan.block_n
    assert (plan.records[:, 2] == chunk_keys + empty).all()
    assert (plan.records[:, 3] == chunks // 8 * 1024 + chunks % 8).all()


@pytest.mark.parametrize(
    ("batch", "window", "used"),
    [
        # 7 tiles of 128 rows that see 400 keys (and cost 448 more), 1.6 times, beside 5,120 keys: 6.5 of 10.
        (((1, 5120), (400, 600)), (-1, -1), 7),
        # In a window of 20 they see 220, and the other query one tile of 64.
        (((1, 5120), (400, 600)), (20, 0), 9),
        # 32 tiles of 10,000 to 12,000 keys: at least one multiprocessor is left.
        (((1, 3), (2000, 12000)), (-1, -1), 9),
        # No more than a tile has KV heads.
        (((1, 100), (64, 232)), (-1, -1), 2),
        (((1, 256), (16, 232)), (-1, -1), 0),
        (((17, 232), (0, 0)), (-1, -1), 10),
        (((0, 0), (0, 0)), (-1, -1), 10),
    ],
)
def test_multiprocessors_by_work(
    batch: tuple[tuple[int, int], ...], window: tuple[int, int], used: int, device: torch.device
) -> None:
    """Multiprocessors without long queries get two ranges each."""
    problem = Problem(Case(batch=batch, window=window, num_sms=10, divide=True), device)
    plan = problem.plan()
    problem.check(plan)
    assert problem.multiprocessors.item() == used
    has_short = any(0 < query_len <= 16 for query_len, _ in batch)
    num_ranges = 2 * (10 - used) if has_short else 20
    share, extra = divmod(int(plan.records[0, 3]), 1024)
    assert (plan.records[:num_ranges, 3] == plan.records[0, 3]).all()
    assert not plan.records[num_ranges:, 3].any()
    assert (share + extra > 0) == has_short
    assert extra < num_ranges


def decodes_on_132(lens: list[int], device: torch.device, num_kv_heads: int = 8) -> DecodePlan:
    """Return the plan for one query each, on 132 multiprocessors."""
    plan = make_decode_plan(
        num_query_heads=32, num_kv_heads=num_kv_heads, head_size=128, max_num_seqs=256, num_sms=132, device=device
    )
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device)
    keys = torch.tensor(lens, dtype=torch.int32, device=device)
    plan_decode(plan, starts, keys, max_query_len=1, window=(-1, -1))
    return plan


@pytest.mark.parametrize(
    "batch",
    [
        # Two chunks a unit would leave a quarter of 264 programs without one.
        [(1, 32768)] * 12,
        [(1, 32768)] * 9,
        [(1, 131072)],
        [(1, 1024)] * 20,
        [(1, 800)] * 256,
        [(1, 65536), *[(1, 512)] * 63],
    ],
    ids=lambda batch: f"{len(batch)} of {batch[0][1]}",
)
def test_no_program_has_much_more_than_its_share(batch: list[tuple[int, int]], device: torch.device) -> None:
    """At most what beginning a second unit costs, or half the share where that is less."""
    plan = decodes_on_132([keys for _, keys in batch], device)
    share, extra = divmod(int(plan.records[0, 3]), 1024)
    chunk_keys, empty = divmod(int(plan.records[0, 2]), COSTS.value)
    busiest = (share + (extra > 0)) * chunk_keys * COSTS.value // plan.block_n
    fair = -(-sum(-(-keys // plan.block_n) + empty for _, keys in batch) * 8 // plan.programs)
    assert busiest <= fair + min(UNIT_COST.value, -(-fair // 2))


@pytest.mark.parametrize(("keys", "tiles"), [(40, 1), (512, 1), (513, 2), (1100, 2), (4224, 2), (4225, 3)])
def test_long_units_are_cut_into_two_tiles_at_least(keys: int, tiles: int, device: torch.device) -> None:
    """The results of at most eight programs are merged, or of half as many as there are tiles."""
    plan = decodes_on_132([keys], device)
    assert (plan.records[:, 2] == tiles * plan.block_n).all()
    each, more = divmod(8 * -(-keys // (tiles * plan.block_n)), plan.programs)
    assert (plan.records[:, 3] == 1024 * each + more).all()


@pytest.mark.parametrize(("keys", "tiles"), [(4096, 2), (16384, 5), (65000, 11)])
def test_chunks_of_one_head_are_not_merged_for_longer_than_they_take(
    keys: int, tiles: int, device: torch.device
) -> None:
    """The results of all programs would be merged in more time than most of these save."""
    plan = decodes_on_132([keys], device, num_kv_heads=1)
    assert (plan.records[:, 2] == tiles * plan.block_n).all()


def test_ranges_of_short_sequences_have_fewer_keys(device: torch.device) -> None:
    """Every unit is read once and whole, and no program has more tiles and units than others, each unit as 2 tiles."""
    generator = torch.Generator().manual_seed(5)
    lens = torch.randint(1, 1361, (234,), generator=generator).tolist()
    plan = decodes_on_132(lens, device)
    tiles = [-(-keys // plan.block_n) for keys in lens for _ in range(8)]
    first_tile = torch.tensor([0, *tiles]).cumsum(0)
    records = plan.records.cpu()
    chunk, lead = records[:, 1] // COSTS.value, records[:, 1] % COSTS.value
    begins = (first_tile[records[:, 0] * 8] + chunk).tolist()
    assert begins[0] == 0 and sorted(begins) == begins
    share, extra = divmod(int(records[0, 3]), 1024)
    total = sum(tiles) + UNIT_COST.value * len(tiles)
    assert share * plan.programs + extra == total
    for program, (begin, end) in enumerate(pairwise([*begins, sum(tiles)])):
        started = int(((first_tile[:-1] >= begin) & (first_tile[:-1] < end)).sum())
        taken = end - begin + UNIT_COST.value * started
        assert abs(taken - share) <= UNIT_COST.value + 1, program
        assert lead[program] <= UNIT_COST.value


def test_the_order_of_arrival_does_not_matter(device: torch.device) -> None:
    problem = Problem(Case(batch=((1, 700), (2, 300)), num_sms=5), device)
    plan = problem.plan()
    first, _ = problem.run(plan)
    for _ in range(3):
        again, _ = problem.run(plan)
        assert torch.equal(first[:3], again[:3])


LONG = ((1, 1), (1, 16), (1, 127), (1, 128), (1, 129), (1, 4096), (1, 30000), (2, 999), (5, 5), (16, 5000), (11, 64))
ONES = tuple((1, 1 + 613 * index % 2500) for index in range(70)) + ((0, 0),) * 5


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.bfloat16), (128, torch.bfloat16), (48, torch.float16)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (28, 4, 128), (4, 2, 64)])
def test_models(heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    base = Case(
        batch=LONG,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=dim,
        block_size=block_size,
        dtype=dtype,
        num_sms=132,
    )
    for case in (base, replace(base, batch=ONES, max_query_len=1), replace(base, hnd=True, batch=LONG[::-1])):
        problem = Problem(case, device)
        problem.check(problem.plan())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 32), (3, 40), (7, 72), (8, 80), (71, 64), (4, 96), (2, 112), (5, 160), (6, 192), (8, 256)]
)
def test_sizes(group: int, dim: int, device: torch.device) -> None:
    case = Case(batch=LONG, num_query_heads=2 * group, head_size=dim, dtype=torch.bfloat16, num_sms=132)
    for one in (case, replace(case, batch=ONES, max_query_len=1)):
        problem = Problem(one, device)
        problem.check(problem.plan())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (100, 0), (4096, -1), (0, 0), (31, 7)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_features(window: tuple[int, int], causal: bool, kv_dtype: torch.dtype | None, device: torch.device) -> None:
    base = Case(
        batch=LONG,
        num_query_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        window=window,
        causal=causal,
        num_sms=132,
    )
    for softcap, alibi, sinks in ((0.0, False, False), (20.0, False, True), (0.0, True, False), (5.0, True, True)):
        problem = Problem(replace(base, softcap=softcap, alibi=alibi, sinks=sinks), device)
        problem.check(problem.plan())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 1, 128), (16, 1, 64), (48, 2, 80), (16, 2, 256)])
@pytest.mark.parametrize("sinks", [False, True])
def test_programs_merge_the_rows_of_a_unit_together(
    heads: int, kv_heads: int, dim: int, sinks: bool, device: torch.device
) -> None:
    """Batches of one chunk a program and of more, in turn: each launch leaves the counters as the next needs them."""
    base = Case(
        batch=((1, 30000),),
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=dim,
        dtype=torch.bfloat16,
        sinks=sinks,
        num_sms=132,
    )
    batches = ((1, 30000),), ((1, 9000), (1, 8700), (1, 100)), ((5, 7000), (1, 20000)), ((16, 5000),), LONG
    for batch in batches:
        problem = Problem(replace(base, batch=batch), device)
        plan = problem.plan()
        for _ in range(3):
            problem.check(plan)
    for batch in batches[:2]:
        problem = Problem(replace(base, batch=batch, max_query_len=1), device)
        problem.check(problem.plan())


@pytest.mark.gpu
def test_a_graph_serves_other_batches(device: torch.device) -> None:
    """Captured on one batch, replayed on others of other lengths, with scratch and outputs poisoned in between."""
    base = Case(batch=ONES, num_query_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, num_sms=132)
    problem = Problem(base, device)
    plan = problem.plan()
    problem.run(plan)
    table, lens, starts = problem.table.to(device), torch.tensor(problem.lens, dtype=torch.int32), problem.starts
    lens, starts = lens.to(device), starts.to(device)
    query, out = problem.query, torch.empty(problem.query.shape, dtype=torch.bfloat16, device=device)

    def step() -> None:
        plan_decode(plan, starts, lens, max_query_len=1, window=(-1, -1))
        decode_attention(
            plan, query, problem.cache, table, starts, lens, out, None, scale=1.2 * 128**-0.5,
            window=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, causal=True,
            max_query_len=1,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected_of = [problem.attend(slice(i, i + 1), n, problem.slots[i])[0] for i, n in enumerate(problem.lens[:70])]
    for seed in range(3):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(seed))
        table[:70] = problem.table[order].to(device)
        lens[:70] = torch.tensor(problem.lens)[order].int().to(device)
        query[:70] = problem.query[:70].clone()[order.to(device)] if seed == 0 else query[:70]
        out.fill_(NAN)
        plan.partial_out.fill_(NAN)
        plan.partial_lse.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        if seed == 0:
            for row, index in enumerate(order.tolist()):
                got, expected = out[row].double().cpu(), expected_of[index][0]
                assert (got - expected).norm() <= 1e-2 * expected.norm()
        assert not out[70:].any()
        assert not out.isnan().any()
