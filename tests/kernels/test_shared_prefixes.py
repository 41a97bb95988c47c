"""Prefixes that sequences share: the plan against groups found by definition, and attention over them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_problem import NAN, Case, Problem
from prefix_tables import Tables, chain, check_plan, draw_tables, prefixes_in, shares

from phonograph.kernels.triton.attention import decode_plan
from phonograph.kernels.triton.attention.decode import decode_attention
from phonograph.kernels.triton.attention.decode_plan import DecodePlan, make_decode_plan, plan_decode
from phonograph.kernels.triton.attention.shared_runs import compare_tables


def plan_for(
    device: torch.device, *, kv_heads: int = 2, group: int = 4, num_sms: int = 2, tokens: int = 60
) -> DecodePlan:
    return make_decode_plan(
        num_query_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=32,
        max_num_seqs=16,
        num_sms=num_sms,
        device=device,
        shared_tokens=tokens,
    )


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_random_tables(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    plans = [
        plan_for(device, kv_heads=kv_heads, group=group, tokens=tokens)
        for kv_heads, group, tokens in ((8, 4, 60), (2, 7, 60), (8, 1, 60), (4, 4, 8))
    ]
    sharing = 0
    for _ in range(40):
        plan, max_query_len = rng.choice(plans), rng.choice([1, 16, 16])
        sharing += check_plan(draw_tables(rng), plan, device, max_query_len=max_query_len, slots=rng.choice([0, 2]))
    assert 3 <= sharing <= 38


@pytest.mark.parametrize(
    ("tables", "shared"),
    [
        (chain(*[1024] * 7), [(0, 8, 1024, 0)]),
        # All but the token of the query, in whole pages.
        (chain(*[1024] * 7, own=1), [(0, 8, 1024, 0)]),
        (chain(*[1040] * 7), [(0, 8, 1024, 0)]),
        (chain(*[240] * 7), []),
        (chain(*[256] * 7), [(0, 8, 256, 0)]),
        # A system prompt of all, and two longer prefixes.
        (chain(2048, 2048, 512, 1024, 1024), [(0, 6, 512, 0), (0, 3, 2048, 512 + 1), (3, 3, 1024, 512 + 1)]),
        (chain(2048, 256, 2048), [(0, 4, 256, 0), (0, 2, 2048, 256 + 1), (2, 2, 2048, 256 + 1)]),
        (chain(2048, 0, 2048), [(0, 2, 2048, 0), (2, 2, 2048, 0)]),
        # The window of 1,114 keys begins at 0, at 64 or later, or behind all that pays.
        (chain(*[1024] * 7, left=1113), [(0, 8, 1024, 0)]),
        (chain(*[1024] * 7, left=1049), [(0, 8, 1024, 64)]),
        (chain(*[1024] * 7, left=1048), [(0, 8, 1024, 128)]),
        (chain(*[1024] * 7, left=345), [(0, 8, 1024, 768)]),
        (chain(*[1024] * 7, left=344), []),
        # Of a common prefix the window leaves 256 keys, or less; longer ones have more.
        (chain(2048, 512, 2048, left=1881), [(0, 4, 512, 256), (0, 2, 2048, 512 + 1), (2, 2, 2048, 512 + 1)]),
        (chain(2048, 512, 2048, left=1880), [(0, 2, 2048, 320), (2, 2, 2048, 320)]),
    ],
)
def test_plans_of_chains(tables: Tables, shared: list[tuple[int, int, int, int]], device: torch.device) -> None:
    plan = plan_for(device, kv_heads=8)
    check_plan(tables, plan, device, max_query_len=1)
    assert [entry[1:] for entry in prefixes_in(plan)] == shared


def copies(*sequences: tuple[int, int, int], left: int, size: int = 16) -> Tables:
    """Return sequences of (query length, keys, keys that it shares with the one before)."""
    ids, rows = iter(range(1, 1 << 20)), list[list[int]]()
    for _, keys, shared in sequences:
        row = rows[-1][: shared // size] if rows else []
        rows.append(row + [next(ids) for _ in range(-(-keys // size) - len(row))])
    return Tables(batch=[(query, keys) for query, keys, _ in sequences], rows=rows, block_size=size, left=left)


def test_windows_of_unlike_lengths(device: torch.device) -> None:
    """The first window ends before the last begins, so that the run of all has no keys."""
    levels = copies((1, 1100, 0), (1, 1100, 480), *[(1, 1500, 1040)] * 6, left=900)
    plan = plan_for(device, kv_heads=8)
    assert check_plan(levels, plan, device, max_query_len=1)
    assert prefixes_in(plan) == [(1, 1, 7, 1024, 640 + 1)]
    # Less than nothing, times more tiles of rows than sequences, is no gain.
    drafts = copies((16, 1100, 0), (16, 2000, 576), (16, 3000, 1904), left=1700)
    assert not check_plan(drafts, plan_for(device, kv_heads=8, group=7, num_sms=1), device, max_query_len=16)
    # Windows begin at key 51, and tiles at key 64 of the same page of 48 keys, which one sequence does not share.
    tables = copies(*[(1, 1100, 1008 * bool(row)) for row in range(8)], left=1048, size=48)
    for last in (7, 3):
        tables.rows[last + 1 :] = [[*row[:1], 7000, *row[2:]] for row in tables.rows[last + 1 :]]
        check_plan(tables, plan, device, max_query_len=1)
        ends = (0, 960), (4, 960)
        assert [entry[:1] + entry[3:4] for entry in prefixes_in(plan)] == [*ends[: 2 - (last == 7)]]


def test_sharing_must_pay(device: torch.device) -> None:
    """Two sequences save half of their tiles, which many programs do not notice."""
    tables = chain(512)
    for num_sms, pays in ((1, True), (132, False)):
        assert check_plan(tables, plan_for(device, kv_heads=8, num_sms=num_sms), device, max_query_len=1) == pays


ALIKE = (0, 640)
"""Shares 640 keys with the first sequence."""
CASES = [
    Case(batch=((1, 700),) * 6, shared=((0, 0), *[ALIKE] * 5)),
    Case(batch=((1, 700),) * 20, shared=((0, 0), *[ALIKE] * 19), num_query_heads=14, sinks=True, max_query_len=1),
    # Two levels, between sequences that share nothing.
    Case(
        batch=((1, 90), *[(1, 1400)] * 9, (3, 50), (0, 0)),
        shared=((0, 0), (0, 0), *[(1, 640)] * 4, *[(5, 1300)] * 4, (0, 0), (0, 0)),
        sinks=True,
        softcap=2.5,
    ),
    # Drafts, beside a prefill.
    Case(
        batch=((5, 800), (1, 700), (16, 900), (3, 801), (40, 900), (1, 30)),
        shared=((0, 0), *[ALIKE] * 3, (0, 0), (0, 0)),
        num_sms=2,
        divide=True,
    ),
    Case(batch=((1, 1000),) * 9, shared=((0, 0), *[(0, 960)] * 8), num_query_heads=4, num_kv_heads=4, num_sms=5),
    Case(batch=((1, 700),) * 6, shared=((0, 0), *[ALIKE] * 5), head_size=96, block_size=48, hnd=True, lse=False),
    Case(batch=((1, 700),) * 5, shared=((0, 0), *[ALIKE] * 4), head_size=128, block_size=64, dtype=torch.float16),
    Case(
        batch=((1, 700), (2, 700)) * 4,
        shared=((0, 0), *[ALIKE] * 7),
        head_size=64,
        dtype=torch.float16,
        kv_dtype=torch.float8_e4m3fn,
        num_query_heads=14,
    ),
    Case(batch=((1, 500),) * 6, shared=((0, 0), *[(0, 448)] * 5), head_size=256, dtype=torch.float16),
]


UNLIKE = Case(
    batch=((1, 1100), (1, 1090), (2, 1117), (1, 1085), (1, 1200), (5, 1140), (1, 1100), (1, 1099)),
    shared=((0, 0), *[(0, 1040)] * 7),
    window=(700, 0),
)
"""Sequences of unlike lengths, whose windows begin in several tiles."""
WINDOWS = [
    # A prefix of 960 keys and a window of fewer, as many, a page more or less, and more; then of all keys but one.
    *(
        Case(batch=((1, 1003),) * 7, shared=((0, 0), *[(0, 960)] * 6), window=(keys - 1, 0))
        for keys in (500, 959, 960, 961, 944, 976, 1002, 1003, 1500)
    ),
    *(replace(UNLIKE, window=(left, 0), sinks=True) for left in (500, 607, 623, 639)),
    replace(UNLIKE, num_query_heads=14, max_query_len=16, num_sms=1, softcap=2.5),
    replace(UNLIKE, block_size=48, shared=((0, 0), *[(0, 1008)] * 7), head_size=96, hnd=True, lse=False),
    replace(UNLIKE, block_size=64, shared=((0, 0), *[(0, 1024)] * 7), head_size=128, dtype=torch.float16),
    replace(UNLIKE, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, head_size=64, sinks=True),
    replace(UNLIKE, head_size=256, dtype=torch.float16, num_sms=1),
    # More programs than tiles, so that units are cut before, at and after their holes.
    replace(UNLIKE, num_sms=5, num_query_heads=8, num_kv_heads=8),
    # All queries of a run see a prefix that is as long as their windows, also the last of more tokens than own keys.
    Case(batch=((2, 652),) * 14, shared=((0, 0), *[(0, 640)] * 13), window=(331, 0), num_sms=1),
    # The second level has keys in all of its windows, and the first has none.
    Case(
        batch=((1, 1100), (1, 1100), *[(1, 1500)] * 6),
        shared=((0, 0), (0, 480), *[(1, 1040)] * 6),
        window=(900, 0),
        num_sms=1,
    ),
    # Two levels; the window leaves a part of the first.
    Case(
        batch=((1, 90), *[(1, 1400)] * 9, (3, 50), (0, 0)),
        shared=((0, 0), (0, 0), *[(1, 640)] * 4, *[(5, 1300)] * 4, (0, 0), (0, 0)),
        window=(1070, 0),
        sinks=True,
    ),
    # One long sequence whose window begins behind the prefix divides a run.
    Case(
        batch=(*[(1, 1100)] * 5, (1, 3000), *[(1, 1100)] * 5),
        shared=((0, 0), *[(0, 1040)] * 10),
        window=(900, 0),
        num_sms=1,
    ),
    # Drafts, beside a prefill.
    Case(
        batch=((5, 1000), (1, 960), (16, 1000), (3, 981), (40, 900), (1, 30)),
        shared=((0, 0), *[(0, 944)] * 3, (0, 0), (0, 0)),
        window=(800, 0),
        divide=True,
        num_sms=1,
    ),
]


@pytest.mark.parametrize("case", CASES + WINDOWS, ids=str)
def test_shared_prefixes(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    plan = problem.plan()
    problem.check(plan)
    assert shares(plan)


def test_one_plan_serves_other_groups(device: torch.device) -> None:
    """Nothing is left from the groups of the batch before."""
    base = Case(batch=((1, 700),) * 8, shared=((0, 0), *[ALIKE] * 7))
    plan = Problem(base, device).plan()
    for shared in (base.shared, ((0, 0),) * 8, ((0, 0), *[ALIKE] * 3, (0, 0), *[(4, 320)] * 3), base.shared):
        Problem(replace(base, shared=shared), device).check(plan)


@pytest.mark.parametrize("window", [(-1, -1), (400, 0)], ids=str)
def test_a_single_sequence(window: tuple[int, int], device: torch.device) -> None:
    """It has kernels of its own, over the plan of larger batches, and those after it share again."""
    base = Case(batch=((1, 700),) * 8, shared=((0, 0), *[ALIKE] * 7), window=window, num_sms=1)
    plan = Problem(base, device).plan()
    assert plan.prefixes is not None
    for queries in (1, 2, 3):
        # Two query heads of a KV head: 16 rows are 8 tokens.
        single = replace(base, batch=((queries, 650),), shared=((0, 0),), max_query_len=8, sinks=True)
        Problem(base, device).check(plan)
        assert shares(plan)
        plan.prefixes.shared.fill_(1 << 20)
        Problem(single, device).check(plan)
        assert (plan.prefixes.shared == 1 << 20).all() and plan.prefixes.units.tolist() == [0, 2, 0]
    Problem(replace(single, max_query_len=9), device).check(plan)
    assert plan.prefixes.shared[0] == 0


def test_the_order_of_arrival_does_not_matter(device: torch.device) -> None:
    problem = Problem(CASES[2], device)
    plan = problem.plan()
    first, _ = problem.run(plan)
    for _ in range(3):
        again, _ = problem.run(plan)
        assert torch.equal(first[:13], again[:13])


def a_run_too_long(shared: torch.Tensor) -> None:
    """By the keys of a tile, that is four pages."""
    shared[1:6] += 64


def a_sequence_of_another_run(shared: torch.Tensor) -> None:
    shared[6] = 640


def a_stale_run(shared: torch.Tensor) -> None:
    shared[:] = torch.tensor([0, *[640] * 3, 0, 640, 640])


@pytest.mark.parametrize(
    "plant", [a_run_too_long, a_sequence_of_another_run, a_stale_run], ids=lambda one: one.__name__
)
def test_wrong_runs_are_caught(
    plant: Callable[[torch.Tensor], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the definition sees each of these in a run of six and a sequence of its own."""
    problem = Problem(Case(batch=((1, 708),) * 7, shared=((0, 0), *[ALIKE] * 5, (0, 0))), device)
    plan = problem.plan()
    problem.check(plan)

    def planted(shared: torch.Tensor, *tensors: torch.Tensor, **settings: int) -> None:
        compare_tables(shared, *tensors, **settings)  # pyright: ignore[reportCallIssue]
        plant(shared[:7])

    monkeypatch.setattr(decode_plan, "compare_tables", planted)
    with pytest.raises(AssertionError):
        problem.check(plan)


def test_pages_are_shared_that_are_equal_in_all_groups(device: torch.device) -> None:
    """Groups of equal attention have one plan, and a table each; behind a window entries may be anything."""
    rng = torch.Generator().manual_seed(5)
    rows, pages = 5, 70
    one, other = (torch.randint(0, 9, (1, pages), generator=rng).repeat(rows, 1).int() for _ in range(2))
    one[3, 50], other[1, 40], other[2, 3], other[4, 30] = 99, 98, 97, 96
    other[3, 30] = 96
    lens = torch.full((rows,), pages * 16, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    tables = one.to(device), other.to(device)
    for left, expected in ((-1, [0, 40, 3, 3, 50]), (1023, [0, 40, 40, 30, 50])):
        shared, lows = (torch.full((rows,), -1, dtype=torch.int32, device=device) for _ in range(2))
        compare_tables(
            shared, starts, lens, tables, block_size=16, max_query_len=1, max_tokens=rows, lows=lows, left=left
        )
        assert shared.tolist() == [16 * page for page in expected]
        assert lows.tolist() == [pages * 16 - 1 - left if left >= 0 else -1] * rows


def a_window_one_page_too_long(lows: torch.Tensor) -> None:
    lows -= 16


def a_window_of_the_first_sequence(lows: torch.Tensor) -> None:
    lows[:] = lows[0]


@pytest.mark.parametrize(
    "plant", [a_window_one_page_too_long, a_window_of_the_first_sequence], ids=lambda one: one.__name__
)
def test_wrong_windows_are_caught(
    plant: Callable[[torch.Tensor], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared run may not begin before the window of one of its queries."""
    # Windows begin at keys 72 and, of the last, 136: a run at 64 is too early for both.
    batch = (*[(1, 708)] * 6, (1, 772))
    problem = Problem(Case(batch=batch, shared=((0, 0), *[ALIKE] * 6), window=(635, 0)), device)
    plan = problem.plan()
    problem.check(plan)
    assert shares(plan)

    def planted(*tensors: torch.Tensor, lows: torch.Tensor, **settings: int) -> None:
        compare_tables(*tensors, lows=lows, **settings)  # pyright: ignore[reportCallIssue]
        plant(lows[:7])

    monkeypatch.setattr(decode_plan, "compare_tables", planted)
    with pytest.raises(AssertionError):
        problem.check(plan)


def test_a_prefix_that_counts_twice_is_caught(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second level that repeats the first."""
    problem = Problem(Case(batch=((1, 708),) * 7, shared=((0, 0), *[ALIKE] * 5, (0, 0))), device)
    plan = problem.plan()

    def planted(plan: DecodePlan, *tensors: torch.Tensor, **settings: object) -> None:
        plan_decode(plan, *tensors, **settings)  # pyright: ignore[reportArgumentType]
        assert plan.prefixes is not None
        plan.prefixes.words[:, 4:8] = plan.prefixes.words[:, :4]

    monkeypatch.setattr("decode_problem.plan_decode", planted)
    with pytest.raises(AssertionError):
        problem.check(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (28, 4, 128), (40, 8, 64), (8, 1, 256), (8, 8, 96)]
)
def test_models(heads: int, kv_heads: int, dim: int, kv_dtype: torch.dtype | None, device: torch.device) -> None:
    base = Case(
        batch=((1, 9000),) * 40 + ((1, 3000),) * 30,
        shared=((0, 0), *[(0, 4096)] * 19, *[(1, 8192)] * 20, (0, 0), *[(40, 2048)] * 28, (0, 0)),
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=dim,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        sinks=True,
        num_sms=132,
    )
    drafts = replace(base, batch=tuple((1 + index % 6, keys) for index, (_, keys) in enumerate(base.batch)))
    for case in (
        base,
        replace(base, max_query_len=1, block_size=64),
        drafts,
        replace(base, softcap=20.0, hnd=True),
        replace(base, window=(8191, 0)),
        replace(drafts, window=(8191, 0)),
    ):
        problem = Problem(case, device)
        plan = problem.plan()
        for _ in range(2):
            problem.check(plan)
        # With one KV head and drafts, sharing would save less than its waits cost.
        assert shares(plan) == (kv_heads > 1 or case.batch != drafts.batch)


@pytest.mark.parametrize("left", [255, 256, 400, 640, 704, 1099])
def test_windows_behind_the_prefix(left: int, device: torch.device) -> None:
    """Sequences have 704 keys in common and 395 of their own: only the longest windows see enough of the former."""
    shared = ((0, 0), *[(0, 704)] * 8)
    problem = Problem(Case(batch=((1, 1100),) * 9, shared=shared, window=(left, 0), num_sms=1), device)
    plan = problem.plan()
    problem.check(plan)
    assert shares(plan) == (left >= 704)


@pytest.mark.gpu
def test_a_graph_serves_other_groups(device: torch.device) -> None:
    """Captured on one batch and replayed on others, with all scratch poisoned in between."""
    base = Case(
        batch=((1, 5000),) * 32,
        shared=((0, 0), *[(0, 4096)] * 31),
        num_query_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        num_sms=132,
        padding=0,
        lse=False,
    )
    batches = [base.shared, ((0, 0),) * 32, ((0, 0), *[(0, 2048)] * 15, (0, 0), *[(16, 4928)] * 15), base.shared]
    problems = [Problem(replace(base, shared=shared), device) for shared in batches]
    plan = problems[0].plan()
    num_blocks = max(problem.cache.shape[1] for problem in problems)
    cache = torch.full((2, num_blocks, 16, 8, 128), NAN, dtype=torch.bfloat16, device=device)
    query, table = torch.empty_like(problems[0].query), torch.zeros(32, 400, dtype=torch.int32, device=device)
    starts, lens = problems[0].starts.to(device), torch.full((32,), 5000, dtype=torch.int32, device=device)
    out = torch.empty(query.shape, dtype=torch.bfloat16, device=device)

    def step() -> None:
        plan_decode(plan, starts, lens, max_query_len=1, window=(-1, -1), block_tables=(table,), block_size=16)
        decode_attention(
            plan, query, cache, table, starts, lens, out, None, scale=1.2 * 128**-0.5,
            window=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, causal=True,
            max_query_len=1,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for problem in problems:
        cache[:, : problem.cache.shape[1]] = problem.cache
        query.copy_(problem.query)
        table[:, : problem.table.shape[1]] = problem.table.to(device)
        for scratch in (out, plan.partial_out, plan.partial_lse):
            scratch.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        for row in range(32):
            expected = problem.attend(slice(row, row + 1), 5000, problem.slots[row])[0]
            assert (out[row].double().cpu() - expected[0]).norm() <= 1e-2 * expected.norm(), row
