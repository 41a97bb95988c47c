"""Prefill attention against its definition in float64, and the work list against what it must cover.

Shapes: T tokens, R slots, H query heads, K KV heads, D head size, B blocks, S block size, L keys of a sequence.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from prefill_problem import MIN_QUERY_LEN, RAGGED, Batch, Case, make_plan, run

from phonograph.kernels.attention_scratch import PREFILL_ROWS
from phonograph.kernels.triton.attention import prefill as attention_prefill
from phonograph.kernels.triton.attention.prefill_plan import (
    PrefillPlan,
    make_prefill_plan,
    multiprocessors_of,
    plan_prefill,
)

FEATURES = {
    "plain": Case(),
    "one query head for each KV head": Case(num_heads=2),
    "three query heads, odd head size": Case(num_heads=6, head_size=40),
    "head size below that of a product": Case(head_size=8),
    "heads outside": Case(heads_outside=True),
    "blocks of a key tile": Case(block_size=64),
    "blocks of a key tile, heads outside": Case(block_size=64, heads_outside=True),
    "blocks of 48": Case(block_size=48),
    "float32": Case(dtype=torch.float32),
    "all see all": Case(causal=False),
    "window": Case(window=(20, 0)),
    "window on both sides": Case(window=(20, 11), causal=False),
    "window of the own key": Case(window=(0, 0)),
    "window to the right": Case(window=(-1, 3), causal=False, block_size=64),
    "window in blocks of a key tile": Case(window=(9, 0), block_size=64),
    "softcap": Case(softcap=5.0),
    "ALiBi": Case(alibi=True),
    "sinks": Case(sinks=True, window=(40, -1)),
    "on one multiprocessor of two": Case(multiprocessors=1),
    "FP8": Case(kv_dtype=torch.float8_e5m2),
    "FP8 in blocks of a key tile": Case(kv_dtype=torch.float8_e4m3fn, block_size=64),
}


@pytest.mark.parametrize("name", FEATURES)
def test_output_and_lse(name: str, device: torch.device) -> None:
    run(FEATURES[name], device, 5e-3)


@pytest.mark.parametrize(("context", "window"), [(56, (-1, -1)), (140, (100, 0))], ids=["first token", "window"])
def test_borders_of_tiles(context: int, window: tuple[int, int], device: torch.device) -> None:
    """Prompts whose first token sees all keys of a tile of 64, or one less; whose last token's window begins with a
    tile that the first token sees, or one key later."""
    batch = tuple((17, 17 + context + more) for more in range(16))
    run(Case(batch=batch, window=window), device, 2e-3)


@pytest.mark.parametrize("block_size", [16, 64])
def test_wide_heads_where_shared_memory_is_small(
    block_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_prefill, "shared_memory", lambda: 99 * 1024)
    run(Case(head_size=256, block_size=block_size, window=(70, -1)), device, 5e-3)


WIDE = {
    "float32": Case(head_size=512, dtype=torch.float32),
    "float16 in blocks of a key tile": Case(head_size=512, block_size=64, num_heads=6),
    "a size between, window, sinks": Case(
        head_size=328, dtype=torch.float32, block_size=48, window=(20, 0), sinks=True, num_heads=3, num_kv_heads=1
    ),
    "FP8": Case(head_size=512, kv_dtype=torch.float8_e5m2),
    "keys in several pieces": Case(
        batch=((20, 1100), (18, 18)), head_size=512, dtype=torch.float32, num_heads=2, num_kv_heads=1, num_sms=4
    ),
}


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize("name", WIDE)
def test_heads_wider_than_256(name: str, roomy: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have 64 rows, and 32 keys, or 16 where shared memory is small."""
    if not roomy:
        monkeypatch.setattr(attention_prefill, "shared_memory", lambda: 99 * 1024)
    case = WIDE[name]
    plan = run(case, device, 1e-5 if case.dtype == torch.float32 else 5e-3)
    assert plan.rows == 64 and (int(plan.header[1]) > 0) == ("pieces" in name)


@pytest.mark.parametrize(
    "features", [{}, {"sinks": True}, {"multiprocessors": 3}, {"block_size": 64, "window": (600, -1)}]
)
def test_long_context_is_cut_and_merged(features: dict[str, object], device: torch.device) -> None:
    case = replace(Case(batch=((1, 9), (20, 1100), (18, 18)), num_kv_heads=1, num_heads=2, num_sms=4), **features)
    plan = run(case, device, 5e-3)
    assert int(plan.header[1]) > 0


def test_a_plan_serves_batch_after_batch(device: torch.device) -> None:
    case = Case(num_kv_heads=1, num_heads=2, num_sms=4)
    plan = make_plan(case, device)
    for seed, lengths in enumerate([((20, 1100),), ((30, 30), (17, 40)), ((1, 5), (3, 9)), ((0, 0), (18, 700))]):
        batch = Batch(replace(case, batch=lengths, multiprocessors=4 - seed), device, seed)
        batch.plan(plan)
        for _ in range(2):
            batch.out_THD.fill_(torch.nan)
            batch.lse_HT.fill_(torch.nan)
            batch.attend(plan)
            batch.check(5e-3)


BATCHES = [
    RAGGED,
    ((1, 5), (0, 0)),
    ((100, 65536),),
    ((2048, 2048),),
    ((9000, 9900),),
    ((1500, 32768),),
    tuple((20 + 5 * i, 20 + 9 * i) for i in range(16)),
    ((1, 4096),) * 8 + ((512, 512), (17, 100000), (300, 301)),
    # Keys times pieces, and keys times programs, exceed 2^31.
    ((32, 1 << 29),),
]
WINDOWS = [
    (True, (0, 0)),
    (True, (-1, -1)),
    (False, (-1, -1)),
    (True, (300, -1)),
    (False, (0, 200)),
    (False, (300, -1)),
]


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_the_list_covers_every_key_once(
    batch: tuple[tuple[int, int], ...], causal: bool, window: tuple[int, int], device: torch.device
) -> None:
    plan = make_prefill_plan(
        num_query_heads=32,
        num_kv_heads=8,
        head_size=32,
        max_num_seqs=16,
        max_num_tokens=9000,
        num_sms=132,
        device=device,
    )
    check_list(plan, batch, causal=causal, window=window)


def test_a_new_plan_has_all_multiprocessors_and_one_word_for_them(device: torch.device) -> None:
    """`plan_decode` writes that word, next to a counter that must stay zero."""
    limits = {"max_num_seqs": 3, "max_num_tokens": 400, "num_sms": 132}
    plan = make_prefill_plan(num_query_heads=2, num_kv_heads=1, head_size=32, device=device, **limits)
    assert plan.header.tolist() == [0, 0, 0, 132]
    multiprocessors_of(plan)[0] = 7
    assert plan.header.tolist() == [0, 0, 0, 7] and multiprocessors_of(plan).shape == (1,)


def test_a_full_batch_whose_sequences_have_a_tile_of_few_rows_each(device: torch.device) -> None:
    """Each sequence ends in a tile that is not full, so that there are more tiles than the rows would fill."""
    lengths = {"max_num_seqs": 64, "max_num_tokens": 64 * 17}
    plan = make_prefill_plan(num_query_heads=1, num_kv_heads=1, head_size=32, num_sms=2, device=device, **lengths)
    check_list(plan, ((17, 17),) * 64, causal=True, window=(-1, -1))
    assert int(plan.header[0]) == 64


def test_cuts_take_every_slot_and_no_more(device: torch.device) -> None:
    """The best cut of this batch makes 18 partial results, and the next best 12, for which there is room."""
    limits = {"max_num_seqs": 3, "max_num_tokens": 400}
    plan = make_prefill_plan(num_query_heads=2, num_kv_heads=1, head_size=32, num_sms=2, device=device, **limits)
    check_list(plan, ((32, 22394), (17, 6001), (300, 18582)), causal=True, window=(-1, -1))
    assert int(plan.merges[: int(plan.header[1]), 3].sum()) == plan.max_slots == 12


def check_list(plan: PrefillPlan, batch: tuple[tuple[int, int], ...], *, causal: bool, window: tuple[int, int]) -> None:
    """Plan a batch, and check that each tile's keys are listed once, longest pieces first."""
    device, group = plan.header.device, plan.group
    plan.entries.fill_(-7)
    plan.merges.fill_(-7)
    lengths = torch.tensor([0] + [query_len for query_len, _ in batch]).cumsum(0).int().to(device)
    seq_lens = torch.tensor([keys for _, keys in batch], dtype=torch.int32, device=device)
    plan_prefill(plan, lengths, seq_lens, min_query_len=MIN_QUERY_LEN, causal=causal, window=window)
    num_entries, num_merges, *counters = plan.header.tolist()
    assert counters == [0, plan.num_sms]
    assert (plan.entries[num_entries:] == -7).all()
    assert (plan.merges[num_merges:] == -7).all()
    rows = plan.entries[:num_entries].tolist()
    assert [row[5:] for row in rows] == [[int(lengths[seq]), *batch[seq]] for seq, *_ in rows]
    entries = [row[:5] for row in rows]
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for seq, tile, start, stop, slot in entries:
        assert start < stop
        pieces.setdefault((seq, tile), []).append((start, stop, slot))
    expected = [
        (seq, tile)
        for seq, (query_len, _) in enumerate(batch)
        if query_len >= MIN_QUERY_LEN
        for tile in range(-(-query_len * group // PREFILL_ROWS))
    ]
    assert sorted(pieces) == expected
    merges = {(seq, tile): (slot, count) for seq, tile, slot, count, *_ in plan.merges[:num_merges].tolist()}
    slots: set[int] = set()
    for (seq, tile), parts in pieces.items():
        query_len, keys = batch[seq]
        first = keys - query_len + tile * PREFILL_ROWS // group
        last = keys - query_len + (min((tile + 1) * PREFILL_ROWS, query_len * group) - 1) // group
        low = max(0, first - window[0]) if window[0] >= 0 else 0
        right = 0 if causal else window[1]
        high = min(keys, last + right + 1) if right >= 0 else keys
        parts.sort(key=lambda part: part[2])
        assert parts[0][0] == low // 128 * 128
        assert parts[-1][1] == high
        assert all(stop == start for (_, stop, _), (start, _, _) in itertools.pairwise(parts))
        assert all(start % 128 == 0 for start, _, _ in parts)
        if len(parts) == 1:
            assert parts[0][2] == -1
            assert (seq, tile) not in merges
        else:
            slot, count = merges[seq, tile]
            assert [part[2] for part in parts] == list(range(slot, slot + count))
            assert not slots.intersection(range(slot, slot + count))
            slots.update(range(slot, slot + count))
    assert not slots or max(slots) < plan.max_slots
    sizes = [stop - start for _, _, start, stop, _ in entries]
    assert all(later <= size + max(sizes) / 32 + 128 for size, later in itertools.pairwise(sizes))


def ideal_and_end(batch: tuple[tuple[int, int], ...], device: torch.device) -> tuple[float, int]:
    """Keys of tiles for each program if shared out evenly, and for the busiest one as the list is taken."""
    case = Case(num_heads=32, num_kv_heads=8, head_size=128, num_sms=132)
    plan = make_plan(case, device, max_num_tokens=8192)
    lengths = torch.tensor([0] + [query_len for query_len, _ in batch]).cumsum(0).int().to(device)
    seq_lens = torch.tensor([keys for _, keys in batch], dtype=torch.int32, device=device)
    plan_prefill(plan, lengths, seq_lens, min_query_len=MIN_QUERY_LEN, causal=True, window=(-1, -1))
    sizes = [stop - start for _, _, start, stop, *_ in plan.entries[: int(plan.header[0])].tolist() for _ in range(8)]
    busy = [0] * plan.programs
    for size in sizes:
        index = busy.index(min(busy))
        busy[index] += size
    return sum(sizes) / plan.programs, max(busy)


@pytest.mark.parametrize(
    ("batch", "bound"),
    [
        (((8192, 8192),), 1.03),
        (((2048, 2048),), 1.15),
        (((1024, 1024),) * 8, 1.05),
        (((2048, 32768),), 1.05),
        (((1500, 32768),), 1.1),
        (((100, 65536),), 1.1),
        (((1, 65536), (17, 131072)), 1.1),
    ],
)
def test_no_program_has_much_more_than_its_share(
    batch: tuple[tuple[int, int], ...], bound: float, device: torch.device
) -> None:
    ideal, end = ideal_and_end(batch, device)
    assert end <= bound * ideal


GPU_BATCH = ((1, 700), (5, 3000), (17, 5000), (100, 20000), (333, 334), (1000, 1000), (129, 129), (0, 0), (64, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "head_size"), [((32, 8), 128), ((28, 4), 128), ((8, 8), 64), ((71, 1), 64), ((6, 2), 80), ((4, 2), 256)]
)
@pytest.mark.parametrize(
    "name", ["plain", "window", "window on both sides", "softcap", "ALiBi", "sinks", "FP8", "heads outside"]
)
def test_on_the_device(
    dtype: torch.dtype, block_size: int, heads: tuple[int, int], head_size: int, name: str, device: torch.device
) -> None:
    case = replace(
        FEATURES[name],
        batch=GPU_BATCH,
        dtype=dtype,
        block_size=block_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        num_sms=132,
    )
    run(case, device, 1e-2, max_num_tokens=2048)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_in_steps_of_many_tokens(name: str, block_size: int, device: torch.device) -> None:
    case = replace(FEATURES[name], batch=GPU_BATCH, dtype=torch.bfloat16, block_size=block_size, padding=4000)
    case = replace(case, num_heads=32, num_kv_heads=8, head_size=128, num_sms=132)
    run(case, device, 1e-2, max_num_tokens=2048)


@pytest.mark.gpu
def test_one_graph_serves_any_batch(device: torch.device) -> None:
    case = Case(batch=GPU_BATCH, dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_size=128, num_sms=132)
    plan = make_plan(case, device, max_num_tokens=2048)
    batch = Batch(case, device)
    batch.plan(plan)
    batch.attend(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.plan(plan)
        batch.attend(plan)
    # The same tokens belong to other sequences: lengths, starts and keys change in place.
    other = ((20, 5000), (700, 700), (40, 9000), (800, 900), (0, 0), (1, 30), (60, 60), (27, 28), (1, 1))
    assert sum(a for a, _ in other) == batch.num_tokens
    fresh = Batch(replace(case, batch=other), device, 1)
    blocks = min(batch.kv_cache.shape[1], fresh.kv_cache.shape[1])
    if int(fresh.block_table[fresh.block_table < 2**30].max()) >= blocks:
        pytest.fail("the second batch needs more blocks than the first")
    batch.kv_cache[:, :blocks] = fresh.kv_cache[:, :blocks]
    batch.query_THD.copy_(fresh.query_THD)
    columns = fresh.block_table.shape[1]
    batch.block_table[:, :columns] = fresh.block_table
    batch.query_start_loc.copy_(fresh.query_start_loc)
    batch.seq_lens.copy_(fresh.seq_lens)
    for _ in range(3):
        batch.out_THD.fill_(torch.nan)
        batch.lse_HT.fill_(torch.nan)
        graph.replay()
        fresh.out_THD, fresh.lse_HT = batch.out_THD, batch.lse_HT
        fresh.check(1e-2)
