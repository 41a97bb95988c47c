"""The floors, against what they were published as and against counting."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.attention import CASES
from bench.floor import H200, attention_work, decode_floor, decode_work, expected_experts, this_chip
from phonograph.attention.attention_spec import AttentionSpec
from phonograph.kernels.routing import Routing
from phonograph.models.spec import ModelSpec, read_model_spec

HEADS = AttentionSpec(
    num_query_heads=32,
    num_kv_heads=8,
    head_size=128,
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    block_size=16,
)
NO_WINDOW = (-1, -1)


@pytest.fixture(scope="module")
def llama_8b() -> ModelSpec:
    return read_model_spec("llama-3.1-8b", config_only=True)


@pytest.mark.parametrize(
    ("num_seqs", "context", "published_ms"),
    [
        (1, 1024, 3.5),
        (8, 1024, 3.7),
        (32, 1024, 4.5),
        (128, 1024, 7.4),
        (256, 512, 8.8),
        (1, 32768, 4.5),
        (8, 32768, 11.4),
    ],
)
def test_decode_floor(llama_8b: ModelSpec, num_seqs: int, context: int, published_ms: float) -> None:
    floor = decode_floor(H200, llama_8b, HEADS, num_seqs=num_seqs, context=context)
    assert floor * 1e3 == pytest.approx(published_ms, abs=0.07)


@pytest.mark.parametrize(
    ("num_seqs", "context", "published_ms"),
    [(1, 1024, 1.43), (8, 1024, 6.15), (32, 1024, 13.0), (128, 1024, 16.9), (256, 512, 16.9)],
)
def test_decode_floor_of_experts(num_seqs: int, context: int, published_ms: float) -> None:
    """Qwen3-30B-A3B: a step reads the experts that its tokens choose, each once."""
    heads = replace(HEADS, num_kv_heads=4)
    model = read_model_spec("qwen3-30b-a3b", config_only=True)
    floor = decode_floor(H200, model, heads, num_seqs=num_seqs, context=context)
    assert floor * 1e3 == pytest.approx(published_ms, rel=0.03)


@pytest.mark.parametrize(
    ("num_seqs", "context", "stated_ms"), [(1, 1024, 1.39), (8, 1024, 4.51), (32, 1024, 11.5), (256, 512, 24.0)]
)
def test_decode_floor_of_states(num_seqs: int, context: int, stated_ms: float, tmp_path: Path) -> None:
    """Qwen3.6-35B-A3B, whose sizes are its class's: 30 of 40 layers read and write a state of each sequence."""
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = replace(HEADS, num_query_heads=16, num_kv_heads=2, head_size=256)
    floor = decode_floor(H200, read_model_spec(tmp_path), heads, num_seqs=num_seqs, context=context)
    assert floor * 1e3 == pytest.approx(stated_ms, rel=0.01)


def test_windows_bound_the_keys(llama_8b: ModelSpec) -> None:
    attention = replace(llama_8b.layers[0].attention, window=(99, 0))
    half = (replace(llama_8b.layers[0], mixer=attention),) * 16 + llama_8b.layers[16:]
    step = {"num_seqs": 3, "context": 1000}
    (_, whole), (_, less) = (decode_work(model, HEADS, **step) for model in (llama_8b, replace(llama_8b, layers=half)))
    assert less.num_bytes == pytest.approx(0.55 * whole.num_bytes)


def test_work_of_experts_against_counting() -> None:
    """The bytes are the mean of random choices; the operations are those of each token's experts."""
    routing = Routing(num_experts=7, top_k=3)
    rng = random.Random(0)
    counts = [len({expert for _ in range(4) for expert in rng.sample(range(7), 3)}) for _ in range(20_000)]
    assert expected_experts(routing, 4) == pytest.approx(sum(counts) / len(counts), rel=0.01)
    model = read_model_spec("qwen3-30b-a3b", config_only=True)
    (one, _), (many, _) = (decode_work(model, HEADS, num_seqs=rows, context=1) for rows in (1, 10**6))
    expert = 3 * 2048 * 768
    assert many.num_bytes - one.num_bytes == pytest.approx(2 * 48 * 120 * expert)
    assert many.num_operations / 10**6 == one.num_operations == pytest.approx(one.num_bytes)


def test_a_tied_embedding_is_read_as_the_head(llama_8b: ModelSpec) -> None:
    step = {"num_seqs": 1, "context": 1}
    tied = decode_floor(H200, replace(llama_8b, tie_word_embeddings=True), HEADS, **step)
    assert tied == pytest.approx(decode_floor(H200, llama_8b, HEADS, **step))


@pytest.mark.parametrize(
    ("case", "published_us"),
    [
        ("decode_1x8k", 8),
        ("decode_8x32k", 248),
        ("decode_skew", 93),
        ("spec4_32x2k", 63),
        ("prefill_1x2k", 43),
        ("prefill_1x16k", 2749),
        ("prefill_8x1k", 86),
        ("chunk_2k_of_32k", 1332),
        ("mixed_64dec4k_1x2k", 258),
        ("mixed_8dec32k_1x512", 250),
    ],
)
def test_attention_floor(case: str, published_us: float) -> None:
    floor = H200.seconds(*attention_work(HEADS, CASES[case].lengths, NO_WINDOW)) * 1e6
    assert floor == pytest.approx(published_us, rel=0.02, abs=0.5)


def test_attention_work_against_counting() -> None:
    rng = random.Random(0)
    for _ in range(200):
        length = rng.randrange(1, 40)
        query, left = rng.randrange(1, length + 1), rng.choice([-1, 0, 1, 5, 20, 60])
        keys: set[int] = set()
        pairs = 0
        for position in range(length - query, length):
            seen = range(0 if left < 0 else max(0, position - left), position + 1)
            keys.update(seen)
            pairs += len(seen)
        num_bytes, num_operations = attention_work(HEADS, [(query, length)], (left, 0))
        assert num_bytes == len(keys) * 2 * 8 * 128 * 2 + query * 2 * 32 * 128 * 2
        assert num_operations == pairs * 4 * 32 * 128
    fp8 = attention_work(replace(HEADS, kv_cache_dtype="float8_e4m3fn"), [(1, 100)], NO_WINDOW)[0]
    assert fp8 == 100 * 2 * 8 * 128 + 2 * 32 * 128 * 2


def test_no_floor_without_a_measurement() -> None:
    assert this_chip("cpu") is None
