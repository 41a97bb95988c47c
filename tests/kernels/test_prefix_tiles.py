"""Shared prefixes as items of the launch for long queries on Hopper: their list, and attention over them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import gluon_on_threads
import pytest
import torch
from decode_problem import Case, Problem
from prefix_tables import Tables, chain, check_plan, draw_tables, expected_entries, shares

from phonograph.kernels.attention_scratch import PREFILL_ROWS
from phonograph.kernels.triton.attention.decode_plan import DecodePlan, make_decode_plan, plan_decode
from phonograph.kernels.triton.launch.pdl import gluon_usable

hopper = pytest.importorskip("phonograph.kernels.triton.attention.prefill_hopper")


def check_items(tables: Tables, plan: DecodePlan, device: torch.device) -> Counter[str]:
    """Compare the list with the runs that plain Python finds; return how many items are whole, cut and of level 1."""
    assert plan.prefixes is not None and plan.prefixes.items is not None
    items = plan.prefixes.items
    width = max(map(len, tables.rows))
    table = torch.full((len(tables.rows), width), 7, dtype=torch.int32, device=device)
    for index, row in enumerate(tables.rows):
        table[index, : len(row)] = torch.tensor(row)
    query_lens, lens = [list(column) for column in zip(*tables.batch, strict=True)]
    items.header.fill_(-1)
    items.entries.fill_(-1)
    plan_decode(
        plan,
        torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        torch.tensor(lens, dtype=torch.int32, device=device),
        max_query_len=16,
        window=(tables.left, -1),
        block_tables=(table,),
        block_size=tables.block_size,
        in_tiles=True,
    )
    entries, prefixes, _ = expected_entries(tables, plan, max_query_len=16)
    count = int(items.header[0])
    found = items.entries[:count].tolist()
    assert (items.entries[count:] == -1).all(), "a write behind the list"
    words, kinds, slots = plan.prefixes.words.tolist(), Counter[str](), list[int]()
    by_run: dict[tuple[int, int], dict[int, list[tuple[int, int, int]]]] = {}
    for seq, tile, start, stop, slot, begin, tokens, end in found:
        # A run of the first level that begins with a sequence ends before one of the second that does.
        levels = [run[4] % 8 for run in prefixes if run[:4] == (seq, begin, tokens, end)]
        assert len(levels) == 1, (tables, seq)
        by_run.setdefault((seq, levels[0]), {}).setdefault(tile, []).append((start, stop, slot))
        kinds["second level"] += levels[0]
    assert len(by_run) == len(prefixes), tables
    for seq, begin, tokens, end, word in prefixes:
        level, tiles = word % 8, by_run[seq, word % 8]
        assert sorted(tiles) == list(range(-(-tokens * plan.group // PREFILL_ROWS)))
        first_slot, pieces = words[seq][4 * level + 2 : 4 * level + 4]
        members = [
            entry[0] for entry in entries if words[entry[0]][4 * level] == begin and words[entry[0]][4 * level + 1]
        ]
        assert seq in members and all(
            words[one][4 * level : 4 * level + 4] == words[seq][4 * level : 4 * level + 4] for one in members
        )
        assert words[seq][4 * level : 4 * level + 2] == [begin, tokens]
        for tile, parts in tiles.items():
            assert len(parts) == pieces
            assert parts[0][0] == word // 8 * 8 and parts[-1][1] == end
            assert all(left[1] == right[0] and not left[1] % 64 for left, right in pairwise(parts))
            if pieces == 1:
                assert parts[0][2] == -1 - level
            else:
                assert [slot for *_, slot in parts] == [first_slot + tile * pieces + part for part in range(pieces)]
                slots += [slot for *_, slot in parts]
            kinds["whole" if pieces == 1 else "cut"] += pieces
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= items.slots
    return kinds


def tiled_plan(device: torch.device, *, kv_heads: int, group: int, num_sms: int, seqs: int = 64) -> DecodePlan:
    return make_decode_plan(
        num_query_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=64,
        max_num_seqs=seqs,
        num_sms=num_sms,
        device=device,
        shared_tokens=8 * seqs,
        prefix_tiles=True,
    )


@pytest.mark.parametrize("seed", range(3))
def test_items_of_random_tables(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    sizes = ((8, 4, 9), (2, 7, 9), (8, 1, 5), (2, 16, 12))
    plans = [tiled_plan(device, kv_heads=kv, group=group, num_sms=sms) for kv, group, sms in sizes]
    kinds = Counter[str]()
    for _ in range(40):
        tables = draw_tables(rng)
        if len(tables.batch) > 1:  # A single sequence has no kernels for prefixes.
            kinds += check_items(tables, rng.choice(plans), device)
    assert kinds["whole"] and kinds["second level"]


@pytest.mark.parametrize("length", [8192, 32000, 512])
def test_few_tiles_are_cut_for_all_programs(length: int, device: torch.device) -> None:
    plan = tiled_plan(device, kv_heads=8, group=4, num_sms=132, seqs=64)
    kinds = check_items(chain(*[length] * 63, size=64, own=64), plan, device)
    # Two tiles of eight heads: sixteen pieces of all keys for 132 programs.
    assert (kinds["cut"], kinds["whole"]) == ((16, 0) if length > 4096 else (0, 2))


ALIKE = (0, 640)
TILED = Case(
    batch=((1, 700),) * 7,
    shared=((0, 0), *[ALIKE] * 6),
    head_size=64,
    block_size=64,
    dtype=torch.float16,
    prefix_tiles=True,
)
LEVELS = ((0, 0), (0, 0), *[(1, 640)] * 4, *[(5, 1280)] * 4, (0, 0), (0, 0))
CASES = [
    TILED,
    replace(TILED, head_size=128, block_size=128, hnd=True, num_query_heads=14, sinks=True),
    replace(TILED, batch=((1, 90), *[(1, 1400)] * 9, (3, 50), (0, 0)), shared=LEVELS, sinks=True),
    # Drafts, and tiles that are cut: one KV head for several programs.
    replace(
        TILED,
        batch=((5, 1800), (1, 1700), (16, 1900), (3, 1801)) * 3,
        shared=((0, 0), *[(0, 1600)] * 11),
        num_kv_heads=1,
        num_sms=6,
    ),
    replace(TILED, batch=((1, 1200),) * 40, shared=((0, 0), *[(0, 1152)] * 39), num_query_heads=16, num_sms=3),
    replace(
        TILED,
        batch=((1, 1100), (1, 1090), (2, 1117), (1, 1085), (1, 1200), (5, 1140)),
        shared=((0, 0), *[(0, 1024)] * 5),
        window=(700, 0),
    ),
    replace(TILED, shared=((0, 0),) * 7),
]


def check(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, launched = hopper.attend_prefixes_on_hopper, list[int]()

    def noting(plan: DecodePlan, *args: object, **keywords: object) -> None:
        assert plan.prefixes is not None and plan.prefixes.items is not None
        launched.append(int(plan.prefixes.items.header[0]))
        launch(plan, *args, **keywords)

    monkeypatch.setattr(hopper, "attend_prefixes_on_hopper", noting)
    problem = Problem(case, device)
    plan = problem.plan()
    problem.check(plan)
    assert len(launched) == 1 and (launched[0] > 0) == any(keys for _, keys in case.shared)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_threads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_prefill_kernel", gluon_on_threads.launcher(hopper, "_prefill_kernel"))
    check(case, torch.device("cpu"), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gluon_usable():
        pytest.skip("needs a Hopper GPU with Triton 3.6")
    for dtype in (torch.float16, torch.bfloat16):
        with monkeypatch.context() as patch:
            check(replace(case, dtype=dtype), torch.device("cuda"), patch)


def test_other_graphs_attend_prefixes_in_the_launch_for_decodes(device: torch.device) -> None:
    problem = Problem(replace(TILED, in_tiles=False), device)
    plan = problem.plan()
    problem.check(plan)
    assert plan.prefixes is not None and plan.prefixes.items is not None
    assert shares(plan) and check_plan(chain(*[640] * 7), plan, device, max_query_len=1)
