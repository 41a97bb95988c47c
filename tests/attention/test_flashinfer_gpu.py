"""The FlashInfer adapter on the library itself: eager, captured, and replayed on other batches.

Its kernels are made by nvcc at the first run, which takes minutes. Skipped where the library is absent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_specs import llama
from paged import Arena, Batch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.backend import MakeBackend
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities, prefill_routine
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.testing.conformance import check_backend

pytest.importorskip("triton")

from phonograph.attention.composite.backend import SplitBackend
from phonograph.attention.flashinfer.backend import FlashInferBackend

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
FULL = (-1, -1)
LLAMA = llama()
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": "float16", "kv_cache_dtype": "float16"},
    "blocks of 64, HND": {"block_size": 64, "layout": KVLayout.HND},
    "blocks of 128": {"block_size": 128},
    "blocks of 48": {"block_size": 48},
    "head size 64": {"head_size": 64, "num_query_heads": 14, "num_kv_heads": 2},
    "head size 256": {"head_size": 256, "num_query_heads": 16},
    "window": {"windows": ((37, 0),)},
    "softcap": {"softcap": 1.5, "windows": ((200, -1),)},
    "one head": {"num_query_heads": 4, "num_kv_heads": 4},
}


@pytest.fixture(autouse=True)
def installed() -> None:
    missing = FlashInferCapabilities().missing()
    if missing is not None:
        pytest.skip(missing)


@pytest.mark.parametrize("name", SPECS)
def test_conformance(name: str) -> None:
    results = check_backend(FlashInferBackend, replace(LLAMA, non_causal=True, **SPECS[name]), DEVICE)
    assert results and all(result.passed for result in results), [str(one) for one in results if not one.passed]


class PlannedArena(Arena):
    """Captures on a batch that fills the graph, as the engine does."""

    def __init__(self, key: GraphKey, spec: AttentionSpec, backend: MakeBackend = FlashInferBackend) -> None:
        super().__init__(
            backend,
            spec,
            DEVICE,
            causal=True,
            num_reqs=key.num_reqs,
            num_tokens=key.num_tokens,
            num_blocks=60000 // spec.block_size,
            max_keys=9000,
        )
        if spec.kv_cache_dtype.startswith("float8"):
            scales = {name: torch.full((spec.num_kv_heads,), 0.05, device=DEVICE) for name in ("k_scale", "v_scale")}
            self.layers = [replace(layer, **scales) for layer in self.layers]


def check_all(arena: Arena, key: GraphKey, batches: list[Batch]) -> None:
    with torch.inference_mode():
        for captured in (batches[0], batches[-1]):
            graph = arena.capture(captured, key)
            for batch in batches:
                arena.check(batch, graph)


FEATURES = ("plain", "blocks of 64, HND", "head size 64", "head size 256", "window", "softcap")
DECODES: list[Batch] = [
    [(1, 1)] * 24,
    [(1, 9000), (1, 16), (1, 33)],
    [(1, 17)],
    [(1, 700 + 13 * row) for row in range(21)],
    [],
    [(1, 3000), *[(1, 2)] * 20],
]
UNIFORM: list[Batch] = [[(4, 4)] * 24, [(4, 8000), (4, 16), (4, 33)], [(4, 40 + row) for row in range(20)]]
RAGGED: list[Batch] = [
    [(4, 4)] * 24,
    [(1, 8000), (4, 16), (2, 33)],
    [(1 + row % 4, 40 + 17 * row) for row in range(24)],
    [(3, 5000), *[(1, 2)] * 20],
]
"""Decodes with drafts."""
MIXED: list[Batch] = [
    [(500, 500)],
    [(1, 9000), (1, 16), (3, 40), (200, 1333)],
    [(1, 40 + 31 * row) for row in range(24)],
    [(1, 5)],
    [(129, 129), (300, 4000)],
    [(1, 64), (1, 65), *[(17, 90)] * 20],
]


# Few with FP8 caches: each feature is another minute of nvcc.
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "bfloat16") for name in FEATURES),
        *((name, cache) for name in ("plain", "window") for cache in ("float8_e4m3fn", "float8_e5m2")),
    ],
)
def test_decode_graphs(name: str, cache: str) -> None:
    spec = replace(LLAMA, kv_cache_dtype=cache, speculative_tokens=3, **SPECS[name])
    one, four = GraphKey(GraphSet.DECODE, 24, 24, 1), GraphKey(GraphSet.DECODE, 96, 24, 4)
    check_all(PlannedArena(one, spec), one, DECODES)
    check_all(PlannedArena(four, spec), four, UNIFORM + RAGGED)


ONE_LAUNCH = partial(FlashInferBackend, splits_mixed=False)


def split(spec: AttentionSpec, device: torch.device, limits: Limits) -> SplitBackend:
    return SplitBackend(spec, device, limits, decode=ONE_LAUNCH, prefill=ONE_LAUNCH)


@pytest.mark.parametrize("backend", [FlashInferBackend, ONE_LAUNCH, split], ids=["two launches", "one launch", "split"])
@pytest.mark.parametrize("name", FEATURES)
def test_mixed_graphs(name: str, backend: MakeBackend) -> None:
    spec = replace(LLAMA, **SPECS[name])
    if prefill_routine(spec, torch.cuda.get_device_capability()) != "fa3":
        pytest.skip("mixed graphs need its FA3, so a Hopper GPU")
    for tokens in (500, 900):
        key = GraphKey(GraphSet.MIXED, tokens, 24)
        check_all(PlannedArena(key, spec, backend), key, MIXED)
    # More slots than tokens.
    few = GraphKey(GraphSet.MIXED, 5, 24)
    check_all(PlannedArena(few, spec, backend), few, [[(5, 5)], [(1, 900), (1, 2), (2, 40)], [(1, 1)] * 5])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 8, 16, 24, 32, 40, 48, 56])
def test_sizes_at_which_a_peer_hung(max_num_seqs: int) -> None:
    key = GraphKey(GraphSet.DECODE, max_num_seqs, max_num_seqs, 1)
    batches: list[Batch] = [[(1, 1)] * max_num_seqs, [(1, 3000)], [(1, 40 + row) for row in range(max_num_seqs)]]
    check_all(PlannedArena(key, LLAMA), key, batches)


def test_planning_does_not_synchronize() -> None:
    key = GraphKey(GraphSet.DECODE, 24, 24, 1)
    arena = PlannedArena(key, replace(LLAMA, lse=False))
    with torch.inference_mode():
        arena.capture(DECODES[0], key)
        commons = [arena.fill(batch) for batch in DECODES if batch]
        metadata = [arena.builder.build(common, key=None) for common in commons][-1]
        arena.run(metadata)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for common in commons:
                arena.builder.build(common, key=key)
                arena.run(arena.builder.build(common, key=None))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_plans_of_steps_in_flight_are_not_overwritten() -> None:
    """The device is far behind while the host plans on: each replay must see the plan made for it."""
    key = GraphKey(GraphSet.DECODE, 24, 24, 1)
    arena = PlannedArena(key, LLAMA)
    with torch.inference_mode():
        graph = arena.capture(DECODES[0], key)
        alone: list[torch.Tensor] = []
        lengths = [24, 3, 17, 9]
        full = arena.fill([(1, 700 + 13 * row) for row in range(24)])
        arena.run(arena.builder.build(full, key=key))  # writes the new keys
        commons = []
        for count in lengths:
            lens = full.seq_lens_cpu.copy()
            lens[count:] = 0
            commons.append(replace(full, num_reqs=count, num_decodes=count, num_tokens=count, seq_lens_cpu=lens))
        device_lens = [torch.from_numpy(common.seq_lens_cpu).to(DEVICE) for common in commons]

        def step(number: int) -> torch.Tensor:
            arena.builder.build(commons[number], key=key)
            arena.lens.copy_(device_lens[number])
            graph.replay()
            return arena.outs[0].clone()

        for number in range(len(lengths)):
            alone.append(step(number))
            torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        ahead = [step(number) for number in range(len(lengths))]
        torch.cuda.synchronize()
        for number, (one, other) in enumerate(zip(alone, ahead, strict=True)):
            assert torch.equal(one[:24], other[:24]), number


@pytest.mark.parametrize("planned", ["once", "each time"])
def test_equal_runs_give_equal_bits(planned: str) -> None:
    """Eagerly, as attention runs between pieces: many short prefills beside decodes, of which a few are long."""
    spec = replace(LLAMA, block_size=64, lse=False)
    decodes = [(1, 1 + 97 * row) for row in range(36)] + [(1, 63696), (1, 40000), (1, 20000)]
    prefills = [(2 + row % 15, 2 + row % 15 + (37 * row) % 1900) for row in range(181)]
    arena = Arena(
        FlashInferBackend,
        spec,
        DEVICE,
        causal=True,
        num_reqs=256,
        num_tokens=1664,
        num_blocks=1 + sum(-(-keys // 64) for _, keys in decodes + prefills),
        max_keys=65536,
    )
    with torch.inference_mode():
        common = arena.fill(decodes + prefills)
        metadata = arena.builder.build(common, key=None)
        arena.run(metadata)
        first = arena.outs[0][: arena.end].clone()
        unlike = torch.zeros(arena.end, dtype=torch.int64, device=DEVICE)
        for _ in range(300):
            arena.outs[0].fill_(torch.nan)
            if planned == "each time":
                metadata = arena.builder.build(common, key=None)
            arena.run(metadata)
            unlike += (arena.outs[0][: arena.end] != first).flatten(1).any(1)
    assert first.isfinite().all()
    rows = {row: times for row, times in enumerate(unlike.tolist()) if times}
    assert not rows, f"rows unlike the first run, with how often they were: {rows}"
