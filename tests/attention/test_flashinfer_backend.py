"""The FlashInfer adapter on wrappers that compute with the oracle: its plans, what graphs freeze, and every hazard."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from functools import partial
from typing import ClassVar

import attention_specs
import fake_flashinfer as fake
import numpy as np
import pytest
import torch
from divided_attention import DECODES, MIXED, check_divided
from paged import Arena, Batch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.backend import MakeBackend
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import load, select
from phonograph.core.device import known_device
from phonograph.core.limits import Limits
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport
from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape

pytest.importorskip("triton")

from phonograph.attention.composite.backend import SplitBackend
from phonograph.attention.flashinfer import backend as module
from phonograph.attention.flashinfer import host_plans as staging
from phonograph.attention.flashinfer import planner
from phonograph.attention.flashinfer.backend import FlashInferBackend

CPU = torch.device("cpu")
ONE_LAUNCH = partial(FlashInferBackend, splits_mixed=False)
FULL = (-1, -1)
TINY = replace(attention_specs.TINY, head_size=64, dtype="float16", kv_cache_dtype="float16")
pytestmark = pytest.mark.usefixtures("quick_kv_write")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    # Where the real one is installed, these tests still are about the adapter.
    return fake.install(monkeypatch)


@pytest.fixture
def quick_pages(monkeypatch) -> None:
    def page_indices(table, lens, out, *, page_size):
        counts = -(-lens // page_size)
        assert len(out) >= int(counts.sum())
        out[: int(counts.sum())] = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])

    monkeypatch.setattr(module, "page_indices", page_indices)


@pytest.fixture(params=["fa2", "fa3"])
def routine(request, monkeypatch) -> str:
    monkeypatch.setattr(module, "_NO_GPU", ((8, 0) if request.param == "fa2" else (9, 0), fake.NUM_SMS))
    return request.param


@pytest.mark.parametrize(
    "spec",
    [
        TINY,
        replace(TINY, windows=((6, 0),), layout=KVLayout.HND, lse=False),
        replace(TINY, softcap=1.5, head_size=128, num_query_heads=6, num_kv_heads=1, block_size=48),
    ],
    ids=["plain", "window", "softcap"],
)
def test_conformance(spec: AttentionSpec, routine: str) -> None:
    """Eager steps of every kind; rows of no request are zeros, of no slot's row too many."""
    results = check_backend(FlashInferBackend, replace(spec, non_causal=True), CPU)
    assert len(results) == 8 + (spec.lse and spec.windows == ((-1, -1),))
    assert all(result.passed for result in results), [str(result) for result in results if not result.passed]


@pytest.mark.usefixtures("quick_pages", "routine")
@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_ranks_share_the_tokens_of_a_head(lens: tuple[list[int], list[int]]) -> None:
    check_divided(FlashInferBackend, 2, lens, size=16, head_size=64, dtype="float16")


class FakeGraph:
    """Stand-in for a CUDA graph: repeats kernels on frozen addresses and runs no Python of the wrappers."""

    def __init__(self, arena: FakeArena, metadata: object) -> None:
        self.arena, self.metadata = arena, metadata
        with fake.recording() as self.launches:
            arena.run(metadata)

    def replay(self) -> None:
        with fake.replaying(self.launches):
            self.arena.run(self.metadata)


class FakeArena(Arena):
    def capture(self, batch: Batch, key: GraphKey | None = None) -> FakeGraph:
        self.captured = key or self.graph_key
        metadata = self.builder.build(self.fill(batch), key=self.captured)
        self.poison()
        return FakeGraph(self, metadata)


def arena_of(
    key: GraphKey, spec: AttentionSpec = TINY, causal: bool = True, backend: MakeBackend = FlashInferBackend
) -> FakeArena:
    arena = FakeArena(
        backend,
        spec,
        CPU,
        causal=causal,
        num_reqs=key.num_reqs,
        num_tokens=key.num_tokens,
        num_blocks=30,
        max_keys=100,
        seed=key.num_tokens,
    )
    arena.graph_key = key
    return arena


DECODES: list[Batch] = [[(1, 1)], [(1, 40), (1, 16), (1, 33)], [(1, 90), (1, 17)], [], [(1, 1)] * 4]
UNIFORM: list[Batch] = [[(3, 3)], [(3, 40), (3, 16)], [], [(3, 90), (3, 17), (3, 4)], [(3, 33)] * 4]
RAGGED: list[Batch] = [[(3, 3)] * 4, [(1, 40), (3, 16)], [(2, 2), (1, 1)], [(3, 90), (1, 17), (2, 4), (1, 50)]]
MIXED: list[Batch] = [
    [(1, 40), (1, 1), (3, 20), (8, 33)],
    [(13, 13)],
    [(1, 90)],
    [],
    [(1, 3), (1, 16), (1, 17), (1, 1)],
    [(2, 40), (5, 90)],
    [(1, 1), (12, 77)],
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", [TINY, replace(TINY, windows=((9, -1),), softcap=2.0, layout=KVLayout.HND)])
@pytest.mark.usefixtures("quick_pages")
def test_a_graph_serves_any_batch(spec: AttentionSpec, causal: bool, routine: str) -> None:
    keys = [(GraphKey(GraphSet.DECODE, 4, 4, 1), DECODES), (GraphKey(GraphSet.DECODE, 12, 4, 3), UNIFORM + RAGGED)]
    if routine == "fa3":
        # More tokens than slots, and more slots than tokens.
        keys += [(GraphKey(GraphSet.MIXED, 13, 4), MIXED), (GraphKey(GraphSet.MIXED, 13, 30), MIXED)]
    for key, batches in keys:
        arena = arena_of(key, spec, causal)
        for captured in (-1, 0):
            graph = arena.capture(batches[captured])
            for batch in batches:
                arena.check(batch, graph)


def test_a_replay_without_a_plan_shows(routine: str) -> None:
    """A peer hung so: a graph replayed on another batch's plan. The stand-in has to notice, or it proves nothing."""
    arena = arena_of(GraphKey(GraphSet.DECODE, 4, 4, 1))
    graph = arena.capture(DECODES[1])
    arena.builder.build = lambda common, key: module.FlashInferMetadataBuilder.build(arena.builder, common, key=None)
    with pytest.raises(AssertionError, match="relative error|not zero"):
        arena.check(DECODES[2], graph)


def batch_for(key: GraphKey, rng: np.random.Generator, max_keys: int) -> Batch:
    if key.graphs is GraphSet.DECODE:
        count = int(rng.integers(1, key.num_reqs + 1))
        return [(key.query_len, int(rng.integers(key.query_len, max_keys + 1))) for _ in range(count)]
    lengths = [1] * int(rng.integers(0, min(key.num_reqs, key.num_tokens)))
    rest = key.num_tokens - len(lengths)
    lengths.append(int(rng.integers(1, min(rest, max_keys) + 1)))
    return [(n, int(rng.integers(n, max_keys + 1))) for n in lengths]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 8, 16, 24, 32, 40, 48, 56])
@pytest.mark.usefixtures("quick_pages")
def test_every_size_up_to_max_num_seqs(max_num_seqs: int, routine: str) -> None:
    """Sizes at which a peer hung at start-up. All graphs share one builder, and alternate."""
    rng = np.random.default_rng(max_num_seqs)
    spec = replace(TINY, num_query_heads=2, lse=False, speculative_tokens=2)
    limits = Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=3 * max_num_seqs, max_model_len=64)
    backend = FlashInferBackend(spec, CPU, limits)
    builder = backend.make_builder()
    sizes = sorted({1, max_num_seqs // 2 or 1, max_num_seqs - 1 or 1, max_num_seqs})
    keys = [GraphKey(GraphSet.DECODE, n * q, n, q) for n in sizes for q in (1, 3)]
    if routine == "fa3":
        keys += [GraphKey(GraphSet.MIXED, n, max_num_seqs) for n in (*sizes, 3 * max_num_seqs)]
    arenas: list[FakeArena] = []
    for key in keys:
        arena = FakeArena(
            FlashInferBackend,
            spec,
            CPU,
            causal=True,
            num_reqs=key.num_reqs,
            num_tokens=key.num_tokens,
            num_blocks=4 * max_num_seqs + 1,
            max_keys=64,
        )
        arena.graph_key, arena.backend, arena.builder = key, backend, builder
        arenas.append(arena)
    captured = [arena.capture(batch_for(arena.graph_key, rng, 64)) for arena in arenas]
    for number in rng.permutation(len(arenas)):
        arenas[number].check(batch_for(keys[number], rng, 64), captured[number])


def common(query_lens: list[int], lens: list[int], slots: int, rows: int) -> CommonMetadata:
    starts = np.full(slots + 1, sum(query_lens), np.int32)
    starts[: len(query_lens) + 1] = np.cumsum([0, *query_lens])
    seq_lens = np.zeros(slots, np.int32)
    seq_lens[: len(lens)] = lens
    return CommonMetadata(
        num_reqs=len(lens),
        num_decodes=query_lens.count(1),
        num_tokens=sum(query_lens),
        num_decode_tokens=query_lens.count(1),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(lens, default=0),
        # What the device holds when a plan is made is the step before.
        query_start_loc=torch.full((slots + 1,), 10**6, dtype=torch.int32),
        seq_lens=torch.full((slots,), 10**6, dtype=torch.int32),
        block_table=torch.full((slots, 8), 10**6, dtype=torch.int32),
        slot_mapping=torch.full((rows,), 10**6),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
    )


LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)


PARTS: list[Batch] = [
    [(1, 40), (1, 1), (3, 20), (8, 33)],
    [(13, 13)],
    [(1, 90)],
    [(1, 3), (1, 16), (1, 17), (1, 1)],
    [(2, 40), (5, 90)],
    [(1, 1), (12, 77)],
]


@pytest.mark.usefixtures("quick_pages")
def test_both_parts_of_a_split_batch() -> None:
    """Decodes by the decode wrapper, prefills by FA3, which leaves the rows before its first query alone."""
    key = GraphKey(GraphSet.MIXED, 13, 4)

    def split(spec, device, limits):
        return SplitBackend(spec, device, limits, decode=ONE_LAUNCH, prefill=ONE_LAUNCH)

    arena = arena_of(key, backend=split)
    graph = arena.capture(PARTS[1])
    for batch in PARTS:
        arena.check(batch, graph)


def test_wrappers_are_made_once_for_each_shape_and_share_buffers() -> None:
    builder = FlashInferBackend(TINY, CPU, LIMITS).make_builder()

    def parts(key: GraphKey | None, slots: int, rows: int):
        return builder.build(common([1, 1], [20, 30], slots, rows), key=key).parts

    four = parts(GraphKey(GraphSet.DECODE, 4, 4, 1), 4, 4)
    eight = parts(GraphKey(GraphSet.DECODE, 8, 8, 1), 8, 8)
    mixed = parts(GraphKey(GraphSet.MIXED, 4, 8), 8, 4)
    more = parts(GraphKey(GraphSet.MIXED, 20, 8), 8, 20)
    # A mixed graph's decodes have the wrapper of the decode graph with as many slots.
    assert mixed[0].wrapper is four[0].wrapper and more[0].wrapper is eight[0].wrapper
    made = (*four, *eight, mixed[1], more[1])
    assert [(part.first, part.end) for part in made] == [(0, 4), (0, 8), (0, 4), (0, 20)]
    wrappers = [part.wrapper for part in made]
    again = parts(GraphKey(GraphSet.MIXED, 4, 8), 8, 4)
    assert again[1].wrapper is mixed[1].wrapper
    assert len({wrapper.floats.data_ptr() for wrapper in wrappers}) == 1
    assert len({wrapper.integers.data_ptr() for wrapper in wrappers}) == 4
    assert len({wrapper.indices.data_ptr() for wrapper in wrappers}) == 1
    addresses = [(w.pages.data_ptr(), w.last_page.data_ptr(), w.integers.data_ptr()) for w in wrappers]
    # Both kinds are planned for one step, so they share nothing that a plan writes.
    assert [len({address[:2] for address in some}) for some in (addresses, addresses[:2], addresses[2:])] == [2, 1, 1]
    parts(GraphKey(GraphSet.DECODE, 4, 4, 1), 4, 4)
    parts(None, 2, 2)
    assert addresses == [(w.pages.data_ptr(), w.last_page.data_ptr(), w.integers.data_ptr()) for w in wrappers]


@pytest.mark.parametrize(
    ("key", "query_lens", "slots", "rows", "expected"),
    [
        (None, [1, 1], 2, 2, [(False, 0, 2)]),
        (None, [1, 1, 5], 3, 7, [(False, 0, 2), (False, 2, 7)]),
        (None, [5], 1, 5, [(False, 0, 5)]),
        (None, [], 2, 0, []),
        (None, [], 2, 3, []),
        (GraphKey(GraphSet.PIECEWISE, 10, 8), [1, 4], 8, 10, [(False, 0, 1), (False, 1, 5)]),
        # A prefill of one token behind others is a prefill.
        (GraphKey(GraphSet.PIECEWISE, 10, 8), [4, 1], 8, 10, [(False, 0, 5)]),
        (GraphKey(GraphSet.DECODE, 8, 2, 4), [4], 2, 8, [(True, 0, 8)]),
        (GraphKey(GraphSet.MIXED, 10, 8), [1, 4], 8, 10, [(True, 0, 8), (True, 0, 10)]),
        (GraphKey(GraphSet.MIXED, 5, 8), [1, 4], 8, 5, [(True, 0, 5), (True, 0, 5)]),
        # The rows behind a graph's are those of others.
        (GraphKey(GraphSet.DECODE, 4, 4, 1), [1, 1], 4, 9, [(True, 0, 4)]),
        (GraphKey(GraphSet.MIXED, 10, 8), [1, 4], 8, 7, [(True, 0, 7), (True, 0, 7)]),
    ],
)
def test_parts_of_a_batch_and_their_rows(
    key: GraphKey | None, query_lens: list[int], slots: int, rows: int, expected: list[tuple[bool, int, int]]
) -> None:
    builder = FlashInferBackend(TINY, CPU, LIMITS).make_builder()
    lens = [length + 3 for length in query_lens]
    parts = builder.build(common(query_lens, lens, slots, rows), key=key).parts
    assert [(part.wrapper.in_graph, part.first, part.end) for part in parts] == expected


def test_a_plan_is_made_from_the_hosts_lengths() -> None:
    builder = FlashInferBackend(TINY, CPU, LIMITS).make_builder()
    given, key = common([1, 1, 5, 1], [16, 33, 34, 2], 8, 12), GraphKey(GraphSet.MIXED, 12, 8)
    decode, prefill = (part.wrapper for part in builder.build(given, key=key).parts)
    assert decode.pages.tolist() == [0, 1, 4, 4, 4, 4, 4, 4, 4]
    assert decode.last_page.tolist() == [16, 1, 0, 0, 0, 0, 0, 0]
    # Its pages lie behind those of the decodes.
    assert prefill.queries.tolist() == [2, 2, 2, 7, 8, 8, 8, 8, 8, 12]
    assert prefill.pages.tolist() == [4, 4, 4, 7, 8, 8, 8, 8, 8, 8]
    assert prefill.last_page.tolist() == [0, 0, 2, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("backend", "changes"), [(ONE_LAUNCH, {}), (FlashInferBackend, {"speculative_tokens": 3})])
def test_one_launch_for_all(backend: MakeBackend, changes: dict[str, int]) -> None:
    """A part of a split batch has one kind of sequence; decodes with drafts have no wrapper that takes their rows."""
    builder = backend(replace(TINY, **changes), CPU, LIMITS).make_builder()
    metadata = builder.build(common([1, 1, 5, 2], [16, 1, 33, 2], 8, 12), key=GraphKey(GraphSet.MIXED, 12, 8))
    (prefill,) = (part.wrapper for part in metadata.parts)
    assert prefill.queries.tolist() == [0, 1, 2, 7, 9, 9, 9, 9, 9, 12]
    assert prefill.pages.tolist() == [0, 1, 2, 5, 6, 6, 6, 6, 6, 6]
    assert prefill.last_page.tolist() == [16, 1, 1, 2, 0, 0, 0, 0, 0]


def test_page_numbers_are_written_inside_the_graph() -> None:
    """The device's table is complete only in the graph, so page numbers are laid out there."""
    backend = FlashInferBackend(TINY, CPU, LIMITS)
    builder = backend.make_builder()
    given = common([1, 1], [40, 20], 4, 4)
    metadata = builder.build(given, key=GraphKey(GraphSet.DECODE, 4, 4, 1))
    given.seq_lens.copy_(torch.tensor([40, 20, 0, 0]))
    given.block_table.copy_(torch.arange(32).view(4, 8))
    backend.schedule(metadata)
    assert metadata.indices[:6].tolist() == [0, 1, 2, 8, 9, 0]
    assert metadata.parts[0].wrapper.indices.data_ptr() == metadata.indices.data_ptr()


class LateFence(staging.Fence):
    """Stands for a device that has not read a step's copies before it is waited for."""

    pending: ClassVar[list[LateFence]] = []

    def record(self) -> None:
        self.pending.append(self)

    def wait(self) -> None:
        if self in self.pending:
            del self.pending[: len(self.pending) - self.pending[::-1].index(self)]


def test_memory_of_a_running_copy_is_not_written(monkeypatch) -> None:
    monkeypatch.setattr(staging, "Fence", LateFence)
    monkeypatch.setattr(planner, "Fence", LateFence)
    builder = FlashInferBackend(TINY, CPU, LIMITS).make_builder()
    LateFence.pending.clear()
    plan, fill = fake._Wrapper._planned, staging.HostPlan.fill
    checked = []

    def planned(self, *args):
        # The wrapper's own pinned buffer.
        fence = builder._planner._fences.get(id(self))
        assert fence not in LateFence.pending
        checked.append(fence)
        plan(self, *args)

    def filled(self, *args, **kwargs):
        assert self.fence not in LateFence.pending
        fill(self, *args, **kwargs)

    monkeypatch.setattr(fake._Wrapper, "_planned", planned)
    monkeypatch.setattr(staging.HostPlan, "fill", filled)
    for step in range(12):
        key = (None, GraphKey(GraphSet.DECODE, 4, 4, 1), GraphKey(GraphSet.MIXED, 9, 8))[step % 5 % 3]
        slots, rows = (key.num_reqs, key.num_tokens) if key else (2, 4)
        query_lens = [1, 1] if key and key.graphs is GraphSet.DECODE else [1, 3]
        builder.build(common(query_lens, [20, 30], slots, rows), key=key)
        assert LateFence.pending
    assert len(checked) > 15 and None in checked and checked[-1] is not None


def test_consecutive_steps_have_arrays_of_their_own() -> None:
    plans = staging.HostPlans(4, CPU)
    turns = staging._TURNS
    taken = [plans.take() for _ in range(turns + 1)]
    assert len({plan.pages.data_ptr() for plan in taken[:turns]}) == turns
    assert taken[turns] is taken[0]


@pytest.mark.parametrize(
    ("head_size", "group"), [*((size, group) for size in (64, 128, 256) for group in (1, 2, 8)), (128, 71)]
)
def test_workspaces_hold_the_largest_plans(head_size: int, group: int, routine: str) -> None:
    """The stand-in allocates as the library does, and raises where that would; lengths play no part."""
    spec = replace(TINY, num_query_heads=group, num_kv_heads=1, head_size=head_size, speculative_tokens=6)
    limits = Limits(max_num_seqs=90, max_num_batched_tokens=1000, max_model_len=4096)
    builder = FlashInferBackend(spec, CPU, limits).make_builder()
    rng = np.random.default_rng(0)
    for slots in (90, 1, 2, 17):
        lens = rng.integers(7, 4096, slots).tolist()
        for count in (slots, 1):
            builder.build(
                common([1] * count, lens[:count], slots, slots), key=GraphKey(GraphSet.DECODE, slots, slots, 1)
            )
            key = GraphKey(GraphSet.DECODE, 7 * slots, slots, 7)
            builder.build(common([7] * count, lens[:count], slots, 7 * slots), key=key)
            builder.build(common([1] * count, lens[:count], slots, count), key=None)
            builder.build(common([7] * count, lens[:count], slots, 7 * count + 5), key=None)
    if routine == "fa3":
        for rows in (1000, 90, 1):
            builder.build(common([rows], [4096], 90, rows), key=GraphKey(GraphSet.MIXED, rows, 90))
    builder.build(common([1000], [4096], 1, 1000), key=None)


def test_scales_of_an_fp8_cache() -> None:
    spec = replace(TINY, kv_cache_dtype="float8_e4m3fn", lse=False)
    shape = BatchShape(name="mixed", query_lens=(1, 3), seq_lens=(20, 33), padded_tokens=2)
    with pytest.raises(BackendError, match="k_scale of layer 0 differs from head to head .* triton takes both"):
        check_backend(FlashInferBackend, spec, CPU, shapes=(shape,))


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
def test_one_scale_for_a_layer(cache: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "_NO_GPU", ((9, 0), fake.NUM_SMS))
    arena = arena_of(GraphKey(GraphSet.DECODE, 12, 4, 3), replace(TINY, kv_cache_dtype=cache))
    same = {name: torch.full((2,), value) for name, value in (("k_scale", 0.05), ("v_scale", 0.031))}
    arena.layers = [replace(layer, **same) for layer in arena.layers]
    graph = arena.capture(UNIFORM[-1])
    for batch in UNIFORM:
        arena.check(batch, graph)
    arena.check([(1, 40), (1, 1), (5, 20)])


def test_missing(monkeypatch) -> None:
    from phonograph.attention.flashinfer import capabilities

    spec, h100 = replace(TINY, head_size=128, lse=False), known_device("h100")
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'flashinfer': cannot run: .* pip install flashinfer-python"):
        load(select("flashinfer", None, spec, h100))
    monkeypatch.setattr(capabilities, "find_spec", lambda name: name)
    assert isinstance(load(select("FlashInfer", None, spec, h100))(TINY, CPU, LIMITS), FlashInferBackend)


def test_a_version_that_does_not_fit(library, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.2" if name == "flashinfer-python" else "?")

    class Old(fake.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale):
            raise AssertionError

    library.BatchDecodeWithPagedKVCacheWrapper = Old
    wanted = "flashinfer-python 0.1.2: BatchDecodeWithPagedKVCacheWrapper.plan does not take window_left, .*seq_lens"
    with pytest.raises(BackendError, match=wanted):
        FlashInferBackend(TINY, CPU, LIMITS)
    del library.BatchDecodeWithPagedKVCacheWrapper
    with pytest.raises(BackendError, match="has no BatchDecodeWithPagedKVCacheWrapper.__init__"):
        FlashInferBackend(TINY, CPU, LIMITS)


def test_kernels_that_cannot_be_made(monkeypatch) -> None:
    builder = FlashInferBackend(TINY, CPU, LIMITS).make_builder()

    def broken(self, *args, **kwargs):
        raise RuntimeError("Ninja build failed")

    monkeypatch.setattr(fake.BatchDecodeWithPagedKVCacheWrapper, "plan", broken)
    with pytest.raises(BackendError, match="nvcc and ninja.*Ninja build failed"):
        builder.build(common([1], [20], 1, 1), key=None)


def test_support() -> None:
    def level(device: str, **changes: object) -> GraphSupport:
        return FlashInferCapabilities().graph_support(replace(TINY, **changes), known_device(device)).level

    assert level("h200") is GraphSupport.ALWAYS
    assert level("h200", kv_cache_dtype="float8_e4m3fn") is GraphSupport.UNIFORM_BATCH
    assert level("a100-80gb") is level("b200") is GraphSupport.UNIFORM_BATCH
