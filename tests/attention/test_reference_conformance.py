"""The reference backend against the float64 oracle: features x layouts x block sizes x heads x dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities
from phonograph.core.device import known_device
from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape

CPU = torch.device("cpu")
FULL = (-1, -1)
FEATURES = {
    "plain": {},
    "left windows": {"windows": (FULL, (0, 0), (6, 0), (33, -1))},
    "windows on both sides": {"windows": ((5, 4), (-1, 3), (20, 0))},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "everything": {"windows": (FULL, (9, 0), (4, 7)), "softcap": 2.0, "alibi": True, "sinks": True},
}
CACHES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32 over e4m3": ("float32", "float8_e4m3fn"),
    "bfloat16 over e5m2": ("bfloat16", "float8_e5m2"),
}


def spec(**changes: object) -> AttentionSpec:
    settings = {
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "block_size": 8,
        "lse": True,
    }
    return AttentionSpec(**{**settings, **changes})  # type: ignore[arg-type]


def check(checked: AttentionSpec, *, seed: int = 0, shapes: tuple[BatchShape, ...] = ()) -> None:
    assert not ReferenceCapabilities().refusals(checked, known_device("cpu"))
    results = check_backend(ReferenceBackend, checked, CPU, shapes=shapes, seed=seed)
    assert results
    assert all(result.passed for result in results), [str(result) for result in results if not result.passed]


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_in_every_layout_and_dtype(feature: str, cache: str, layout: KVLayout) -> None:
    dtype, kv_cache_dtype = CACHES[cache]
    check(spec(dtype=dtype, kv_cache_dtype=kv_cache_dtype, layout=layout, **FEATURES[feature]))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_output_does_not_hang_on_the_lse_being_asked_for(feature: str, lse: bool) -> None:
    check(spec(lse=lse, **FEATURES[feature]), seed=1)


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128, 256])
def test_block_sizes(block_size: int, layout: KVLayout) -> None:
    check(spec(block_size=block_size, num_query_heads=2, num_kv_heads=1, layout=layout))


@pytest.mark.parametrize("head_size", [32, 40, 64, 72, 80, 96, 128, 160, 192, 256])
def test_head_sizes(head_size: int) -> None:
    check(spec(head_size=head_size))
    check(spec(head_size=head_size, dtype="float16", kv_cache_dtype="float8_e4m3fn", **FEATURES["everything"]))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (3, 1), (8, 2), (6, 2), (7, 1), (10, 5)])
def test_head_ratios(heads: tuple[int, int]) -> None:
    for feature in ("plain", "everything"):
        check(spec(num_query_heads=heads[0], num_kv_heads=heads[1], **FEATURES[feature]))


@pytest.mark.parametrize("kind", [kind for kind in AttentionKind if kind is not AttentionKind.DECODER])
@pytest.mark.parametrize("feature", FEATURES)
def test_bidirectional_kinds(kind: AttentionKind, feature: str) -> None:
    check(spec(kind=kind, **FEATURES[feature]))


def test_prompts_longer_than_a_tile() -> None:
    """Tiles of queries begin and end inside the prompt, and windows leave whole tiles of keys unseen."""
    shape = BatchShape(name="long", query_lens=(1, 300, 290), seq_lens=(260, 300, 421), padded_tokens=1)
    for feature in ("left windows", "windows on both sides", "softcap", "everything"):
        check(spec(num_query_heads=2, num_kv_heads=1, **FEATURES[feature]), shapes=(shape,))


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    decodes = draw(st.lists(st.integers(1, 90), max_size=6))
    prefills = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=3))
    return BatchShape(
        name="drawn",
        query_lens=tuple([1] * len(decodes) + [length for length, _ in prefills]),
        seq_lens=tuple(decodes + [length + context for length, context in prefills]),
        padded_reqs=draw(st.integers(1, 3)),
        padded_tokens=draw(st.integers(0, 4)),
        causal=draw(st.sampled_from([None, None, False])),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=shapes(),
    block_size=st.sampled_from([8, 16, 24, 64]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    head_size=st.sampled_from([32, 48, 64, 120]),
    cache=st.sampled_from(sorted(CACHES)),
    layout=st.sampled_from(KVLayout),
    window=st.tuples(st.integers(-1, 70), st.integers(-1, 30)),
    softcap=st.sampled_from([0.0, 0.7, 20.0]),
    alibi=st.booleans(),
    sinks=st.booleans(),
    lse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_drawn_batches(
    shape: BatchShape,
    block_size: int,
    heads: tuple[int, int],
    head_size: int,
    cache: str,
    layout: KVLayout,
    window: tuple[int, int],
    softcap: float,
    alibi: bool,
    sinks: bool,
    lse: bool,
    seed: int,
) -> None:
    kv_heads, group = heads
    dtype, kv_cache_dtype = CACHES[cache]
    drawn = spec(
        num_query_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        layout=layout,
        windows=(window,),
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        lse=lse,
    )
    check(drawn, seed=seed, shapes=(shape,))
