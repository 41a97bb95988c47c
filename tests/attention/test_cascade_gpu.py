"""Cascade attention on a GPU: FlashAttention 2 and 3 against float64, eagerly and in graphs replayed on other prefixes.

A test of a version that is not installed is skipped, with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_specs import llama
from cascade_arena import CascadeArena
from flash_kernels import kernel_missing, skip_unless_runnable
from paged import Batch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.flash_attn.providers import missing, provider_of
from phonograph.attention.selection import BUILT_IN, load, select
from phonograph.graphs.modes import GraphKey, GraphSet

pytest.importorskip("triton")


pytestmark = pytest.mark.gpu

VERSIONS = ("2", "3")
SLOTS, LONGEST = 64, 10_000


def arena_of(version: str, spec: AttentionSpec, *, query_len: int = 1, slots: int = SLOTS) -> CascadeArena:
    here = skip_unless_runnable(version, spec)
    return CascadeArena(
        load(select("flash_attn", version, spec, here, BUILT_IN)),
        spec,
        torch.device("cuda"),
        causal=True,
        num_reqs=slots,
        num_tokens=slots * query_len,
        num_blocks=(LONGEST + slots * 1800) // spec.block_size,
        max_keys=LONGEST,
    )


def page_of(version: str) -> int:
    provider = provider_of(version)
    return provider.block_size_multiple if provider is not None else 16


def ragged(rng: np.random.Generator, count: int, prefix_len: int, query_len: int, longest: int = 1500) -> Batch:
    """Suffixes of every magnitude, that of the query alone among them."""
    own = (longest ** rng.random(count)).astype(int)
    own[0] = 0
    return [(query_len, int(prefix_len + query_len + length)) for length in own]


def check_all(arena: CascadeArena, graph: torch.cuda.CUDAGraph, query_len: int) -> float:
    rng = np.random.default_rng(query_len)
    size, slots = arena.spec.block_size, arena.num_reqs
    # Prefixes around tiles of 128 keys and off them, long and short, of many requests and of few.
    cases = [(8192, slots), (8192, 9), (256, 8), (256 + size, slots), (384 - size, 17), (304, slots - 1), (4112, 33)]
    cases += [(size, 1), (size, 3), (2048, slots)]
    if arena.backend.capabilities.version != "2":  # which leaves the LSE of a sequence without keys elsewhere
        cases.append((0, 3))
    return max(
        arena.check(ragged(rng, count, length // size * size, query_len), graph, prefix_len=length // size * size)
        for length, count in cases
    )


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("version", VERSIONS)
def test_one_graph_for_every_prefix(version: str, query_len: int, record_property: Any) -> None:
    """Captured on a prefix of one block, replayed on up to 64 requests that share up to 8K tokens, padding included."""
    spec = llama(cascade=True, block_size=page_of(version), speculative_tokens=query_len - 1)
    arena = arena_of(version, spec, query_len=query_len)
    key = GraphKey(GraphSet.DECODE, SLOTS * query_len, SLOTS, query_len, cascade=True)
    size = spec.block_size
    with torch.inference_mode():
        graph = arena.capture([(query_len, size + query_len)] * SLOTS, key, prefix_len=size)
        largest = check_all(arena, graph, query_len)
    record_property("largest_error", f"{spec.dtype} {largest:.6f}")


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 64, "num_query_heads": 14, "num_kv_heads": 2},
        {"head_size": 256, "num_query_heads": 8, "num_kv_heads": 4, "dtype": "float16", "kv_cache_dtype": "float16"},
        {"num_query_heads": 8, "num_kv_heads": 8, "block_size": 64},
        {"num_query_heads": 64, "num_kv_heads": 8, "layout": KVLayout.HND, "block_size": 32},
        {"head_size": 96, "softcap": 20.0},
        {"lse": False, "block_size": 64},
        {"kv_cache_dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", VERSIONS)
def test_models(version: str, changes: dict[str, Any]) -> None:
    arena = arena_of(version, llama(cascade=True, **changes), slots=40)
    key = GraphKey(GraphSet.DECODE, 40, 40, 1, cascade=True)
    with torch.inference_mode():
        graph = arena.capture([(1, 257)] * 40, key, prefix_len=256)
        check_all(arena, graph, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_of_both_kinds_in_turn(version: str) -> None:
    """Ordinary steps between cascades, in graphs and eagerly: neither reads a plan of the other."""
    arena = arena_of(version, llama(cascade=True, block_size=page_of(version)))
    plain = GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1)
    cascade = GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1, cascade=True)
    rng = np.random.default_rng(5)
    with torch.inference_mode():
        ordinary = arena.capture([(1, 1)] * SLOTS, plain)
        cascading = arena.capture([(1, 257)] * SLOTS, cascade, prefix_len=256)
        for prefix_len, count in ((1024, SLOTS), (512, 12), (5120, 50)):
            arena.captured = cascade
            arena.check(ragged(rng, count, prefix_len, 1), cascading, prefix_len=prefix_len)
            arena.captured = plain
            arena.check(ragged(rng, count, 300, 1, longest=600), ordinary)


@pytest.mark.parametrize("version", VERSIONS)
def test_building_metadata_does_not_synchronize(version: str) -> None:
    arena = arena_of(version, llama(cascade=True, block_size=page_of(version), lse=False))
    with torch.inference_mode():
        common = arena.fill([(1, 2000)] * 20, 1024)
        for key in (None, GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1, cascade=True)):
            arena.run(arena.builder.build(common, key=key))
            torch.cuda.synchronize()
            try:
                torch.cuda.set_sync_debug_mode("error")
                arena.run(arena.builder.build(common, key=key))
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_the_engine(version: str, mode: str) -> None:
    """A hundred requests share 2048 tokens; their answers begin as they do without cascade."""
    from demo_tasks.tasks import problems
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.engine.llm import LLM

    absent = missing(version) or kernel_missing(version, 64, "bfloat16", torch.device("cuda"))
    if absent is not None:
        pytest.skip(absent)
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    answers: list[list[list[int]]] = []
    for cascade in (True, False):
        llm = LLM(
            model="demo",
            device="cuda",
            max_num_seqs=104,
            num_kv_blocks=2048 if page_of(version) <= 64 else 512,
            block_size=max(64, page_of(version)),
            max_cudagraph_capture_size=256,
            attention_backend="flash_attn",
            flash_attn_version=version,
            cudagraph_mode=mode,
            cascade_attention=cascade,
        )
        # Other conversations first, the same for all, and a question of one's own behind them.
        questions = [llm.encode_chat([{"role": "user", "content": one.question}]) for one in problems(3, 200)]
        common = [token for question in questions[100:] for token in question][:2048]
        asked = [common + question for question in questions[:100]]
        llm.generate(asked[:1], SamplingParams(max_tokens=1, detokenize=False))
        answers.append([output.outputs[0].token_ids for output in llm.generate(asked, greedy)])
        label = "eager cascade" if mode == "NONE" else "full cascade decode"
        assert (llm.step_counts[label] >= 15) == cascade, llm.step_counts
        if cascade and mode == "FULL":
            report = llm.verify(num_replays=2 * len(llm.plan.captures.largest_first()))
            assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
            assert {key for key in report.replays if key.cascade} == set(llm.plan.captures.cascade)
    same = sum(one[:8] == other[:8] for one, other in zip(*answers, strict=True))
    assert same >= 90, f"{same} of 100 answers begin alike"
