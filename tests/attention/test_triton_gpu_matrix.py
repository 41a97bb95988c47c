"""Our attention kernels over a matrix of models, caches and features, each with many batches, eagerly and in a graph.

A combination is one model and cache with one window and one batch. Models are a covering set: each value of a factor
meets each of every other one. What a test checked goes into the XML report as properties, which `scripts/gpu-checks`
adds up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_specs import llama
from covering import pairwise
from paged import Arena, Batch, attend

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import known_device
from phonograph.testing.conformance_batch import make_layer
from phonograph.testing.oracle import dense_attention

pytest.importorskip("triton")

from phonograph.attention.triton.backend import TritonBackend

FULL = (-1, -1)
FACTORS: dict[str, tuple[Any, ...]] = {
    "head_size": (128, 64, 32, 40, 72, 80, 96, 112, 160, 192, 256),
    "group": (4, 1, 2, 7, 8, 16),
    "block_size": (16, 64, 128, 32, 48, 256),
    "cache": (
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float8_e4m3fn"),
        ("bfloat16", "float8_e5m2"),
        ("float16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
    ),
    "features": (
        {},
        {"softcap": 1.5},
        {"alibi": True},
        {"sinks": True},
        {"softcap": 20.0, "alibi": True, "sinks": True},
    ),
    "windows": ((FULL,), (FULL, (63, 0)), ((0, 0),), ((200, -1),), ((31, 7),), (FULL, (-1, 3))),
    "kv_heads": (2, 1, 3),
    "layout": tuple(KVLayout),
    "causal": (True, False),
    "lse": (True, False),
    # Padded tokens of a step: kernels for long queries have two configurations.
    "tokens": (1040, 3000),
}
MODELS = pairwise(FACTORS)
SLOTS = 24
LONGEST = 20000


def spec_of(model: dict[str, Any]) -> AttentionSpec:
    dtype, kv_cache_dtype = model["cache"]
    return AttentionSpec(
        num_query_heads=model["group"] * model["kv_heads"],
        num_kv_heads=model["kv_heads"],
        head_size=model["head_size"],
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=model["block_size"],
        layout=model["layout"],
        windows=model["windows"],
        lse=model["lse"],
        **model["features"],
    )


def batches(seed: int, size: int) -> list[Batch]:
    """Batches of up to 1040 tokens and SLOTS sequences around the borders of blocks of `size`, and drawn ones."""
    rng = np.random.default_rng(seed)

    def decodes(count: int, longest: int = 3000) -> list[tuple[int, int]]:
        return [(1, int(length)) for length in rng.integers(1, longest, count)]

    def queries(count: int, low: int, high: int, context: int) -> list[tuple[int, int]]:
        lengths = rng.integers(low, high, count)
        return [(int(n), int(n + rng.integers(0, context + 1))) for n in lengths]

    return [
        [(1, 2 * size + 3)],
        [(1, LONGEST - seed), *decodes(SLOTS - 1, 200)],
        [(1, length) for length in (1, size - 1, size, size + 1, 3 * size + 5, 2, 127, 128, 129)],
        decodes(SLOTS),
        decodes(SLOTS - 5),
        [(4, int(length)) for length in rng.integers(4, 2000, SLOTS)],
        [(16, 16), (16, 16 + size), (16, 1999)],
        queries(12, 2, 17, 1500),
        [(5, 5), (size + 1, size + 1), (2 * size + 3, 2 * size + 3)],
        [(17, 17), (17, 4000), (128, 128), (129, 129 + size)],
        queries(4, 17, 250, 0),
        queries(4, 17, 250, 3000),
        [(1000, 1000)],
        [(1, size), (1, 1), *queries(3, 2, 17, 300), *queries(3, 17, 300, 2000)],
        [*decodes(10), *queries(6, 2, 17, 1000), *queries(2, 17, 400, 5000)],
        [(1, LONGEST), (5, 5)],
        [],
    ]


NUM_BATCHES = len(batches(0, 16))


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def memory_back() -> Iterator[None]:
    """Give device memory back after tests that take much of it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def name_of(model: dict[str, Any]) -> str:
    parts = (
        f"D{model['head_size']}",
        f"{model['group'] * model['kv_heads']}over{model['kv_heads']}",
        f"S{model['block_size']}{model['layout'].value}",
        "_".join(dict.fromkeys(model["cache"])),
        *model["features"],
        *(f"window{left}_{right}" for left, right in model["windows"]),
        "causal" if model["causal"] else "bidirectional",
        *(["lse"] if model["lse"] else []),
        f"T{model['tokens']}",
    )
    return "-".join(parts)


def check_all(arena: Arena, tried: list[Batch], record_property: Callable[[str, object], None]) -> None:
    with torch.inference_mode():
        graph = arena.capture(tried[-2])
        largest = max(arena.check(batch, graph) for batch in tried)
    record_property("combinations", len(tried) * len(arena.layers))
    record_property("largest_error", f"{arena.spec.dtype} {largest:.6f}")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(MODELS)), ids=[name_of(model) for model in MODELS])
def test_matrix(number: int, device: torch.device, record_property: Callable[[str, object], None]) -> None:
    model = MODELS[number]
    tried = batches(number, model["block_size"])
    arena = Arena(
        TritonBackend,
        spec_of(model),
        device,
        causal=model["causal"],
        num_reqs=SLOTS,
        num_tokens=model["tokens"],
        num_blocks=SLOTS + 1 + max(sum(keys for _, keys in batch) for batch in tried) // model["block_size"],
        max_keys=LONGEST,
        seed=number,
    )
    check_all(arena, tried, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_contexts_of_128k(
    kv_cache_dtype: str, block_size: int, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    spec = llama(block_size=block_size, kv_cache_dtype=kv_cache_dtype, windows=(FULL, (4095, 0)))
    tried: list[Batch] = [
        [(1, 131072)],
        [(1, 700), (1, 131071), (1, 1), (7, 131000), (40, 41)],
        [(1, 131072), (300, 131072)],
        [(1, 3)],
    ]
    arena = Arena(
        TritonBackend,
        spec,
        device,
        causal=True,
        num_reqs=8,
        num_tokens=512,
        num_blocks=280_000 // block_size,
        max_keys=131072,
    )
    check_all(arena, tried, record_property)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "kv_cache_dtype"), [(KVLayout.NHD, "bfloat16"), (KVLayout.HND, "float8_e5m2")])
def test_caches_beyond_offsets_of_32_bits(
    layout: KVLayout, kv_cache_dtype: str, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    spec = llama(layout=layout, kv_cache_dtype=kv_cache_dtype)
    blocks = 2**31 // (spec.block_size * spec.num_kv_heads * spec.head_size) + 1000
    arena = Arena(
        TritonBackend,
        spec,
        device,
        causal=True,
        num_reqs=8,
        num_tokens=512,
        num_blocks=blocks,
        max_keys=4096,
        first_block=blocks - 600,
    )
    tried: list[Batch] = [[(1, 4000), (1, 17)], [(1, 300), (5, 800), (300, 3000)], [(400, 4000)]]
    check_all(arena, tried, record_property)


def test_the_design() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(str(model[a]), str(model[b])) for model in MODELS}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)
    assert sum(len(model["windows"]) for model in MODELS) * NUM_BATCHES >= 1500
    h100 = known_device("h100")
    for number, model in enumerate(MODELS):
        assert not TritonCapabilities().refusals(spec_of(model), h100)
        for batch in batches(number, model["block_size"]):
            assert len(batch) <= SLOTS and sum(queries for queries, _ in batch) <= 1040
            assert all(keys >= queries for queries, keys in batch)
            assert [n for n, _ in batch if n == 1] == [n for n, _ in batch][: sum(n == 1 for n, _ in batch)]


TINY = AttentionSpec(
    num_query_heads=4,
    num_kv_heads=2,
    head_size=32,
    dtype="float16",
    kv_cache_dtype="float16",
    block_size=16,
    windows=(FULL, (5, 0)),
    softcap=2.0,
    alibi=True,
    sinks=True,
    lse=True,
    layout=KVLayout.HND,
)


def small_arena(device: torch.device, spec: AttentionSpec = TINY) -> Arena:
    return Arena(
        TritonBackend, spec, device, causal=True, num_reqs=4, num_tokens=40, num_blocks=20, max_keys=64, seed=3
    )


def test_small(device: torch.device) -> None:
    arena = small_arena(device)
    with torch.inference_mode():
        for batch in ([(1, 40), (1, 1), (3, 20), (20, 33)], [(1, 9)], []):
            arena.check(batch)


def test_a_shared_prefix(device: torch.device) -> None:
    """Decodes, with drafts too, beside a prefill."""
    spec = replace(TINY, windows=(FULL, (699, 0)), alibi=False)
    arena = Arena(
        TritonBackend, spec, device, causal=True, num_reqs=8, num_tokens=60, num_blocks=90, max_keys=700, seed=3
    )
    with torch.inference_mode():
        for batch in ([(1, 600), (1, 513), (1, 700), (3, 620), (1, 590), (20, 533)], [(1, 600)] * 6, [(1, 9)]):
            arena.check(batch, prefix_len=512 if len(batch) > 1 else 0)
            for window in spec.windows:
                decodes = arena.plans[window][0]
                if device.type == "cpu":  # for the programs of a GPU this batch is too small to be worth it
                    assert (decodes.records[0, -1] > 0) == (len(batch) > 1)
                assert decodes.prefixes is not None and not decodes.prefixes.arrivals.any()


def test_the_reference_is_the_oracle(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    for window, causal in ((FULL, True), ((3, 0), True), ((2, 4), False), (FULL, False)):
        layer = make_layer(TINY, 0, window, device, generator)
        query = torch.randn(6, 4, 32, generator=generator).double().to(device)
        keys, values = torch.randn(2, 11, 2, 32, generator=generator).double().to(device)
        got = attend(query, keys, values, layer, causal=causal)
        wanted = dense_attention(query.cpu().numpy(), keys.cpu().numpy(), values.cpu().numpy(), layer, causal=causal)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one.cpu().numpy(), other, rtol=1e-10, atol=1e-12)


class Careless(TritonBackend):
    """Wrong in ways that a test has to notice, by the name of what it does."""

    fault = ""

    def forward(self, query_THD: Any, call: Any, out_THD: Any, lse_HT: Any = None) -> None:
        super().forward(query_THD, call, out_THD, lse_HT)
        if self.fault == "a row":
            out_THD[2] *= 1.05
        if self.fault == "padding":
            out_THD[-1] = 1
        if self.fault == "lse":
            lse_HT[1, 0] += 0.1
        if self.fault == "cache":
            call.kv_cache[0, 0, 0] = 0


@pytest.mark.parametrize("fault", ["a row", "padding", "lse", "cache"])
def test_faults_show(fault: str, device: torch.device) -> None:
    arena = small_arena(device)
    careless = Careless(arena.spec, device, arena.backend.limits)
    careless.fault, arena.backend = fault, careless
    with torch.inference_mode(), pytest.raises(AssertionError):
        arena.check([(1, 40), (1, 1), (3, 20)])
