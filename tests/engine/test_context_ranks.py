"""Ranks that share the tokens of a KV head: the tokens of one rank, and attention against the reference."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rank_sessions import PARAMS, PROMPTS, generate, plan_of, session_of
from thread_ranks import ThreadRanks, engine_on_threads, on_ranks

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.composite.context_parallel import ContextParallelBackend, DividedTensors
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.core.limits import Limits
from phonograph.engine.startup.start import verify_engine
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode

CPU = torch.device("cpu")
DIVIDED: dict[str, Any] = {"decode_context_parallel_size": 2, "block_size": 4}
LIMITS = Limits(max_model_len=96, max_num_seqs=5, max_num_batched_tokens=40)
NUM_BLOCKS, SIZE = 40, 4
QUERIES, CONTEXTS = [1, 1, 3, 17], [0, 45, 2, 31]
DECODES = [1, 1, 1, 1], [0, 45, 2, 31]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with session_of(1, cudagraph_mode="NONE") as session:
        return [output.outputs[0].token_ids for output in generate(session, PROMPTS, PARAMS)]


@pytest.mark.parametrize("mode", GraphMode)
def test_tokens_are_those_of_one_rank(mode: GraphMode, expected: list[list[int]]) -> None:
    with session_of(4, cudagraph_mode=mode, **DIVIDED) as session:
        assert [output.outputs[0].token_ids for output in generate(session, PROMPTS, PARAMS)] == expected


def test_fp8_keys() -> None:
    """Keys of a step go through FP8 too, in both parts."""
    found: list[list[list[int]]] = []
    for size, settings in ((1, {}), (4, DIVIDED)):
        with session_of(size, kv_cache_dtype="fp8", **settings) as session:
            outputs = generate(session, PROMPTS[:3], PARAMS[:3])
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_verify_runs_on_every_rank() -> None:
    with engine_on_threads(plan_of(4, cudagraph_mode="FULL_AND_PIECEWISE", **DIVIDED)) as engine:
        report = verify_engine(engine, num_replays=20)
        assert report.ok and report.num_replays == 20, report.mismatches[:3]


def test_verify_finds_lengths_that_a_graph_has_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two neighbours does not compute them in its graphs: replays read those of an eager step."""
    write, recording, local = DividedTensors.write, ThreadRanks.recording, threading.local()

    @contextmanager
    def marked(self: ThreadRanks) -> Generator[None]:
        with recording(self):
            local.records = self.rank == 1
            yield
            local.records = False

    def faulty(self: DividedTensors, common: CommonMetadata, *, has_step: bool) -> None:
        if not getattr(local, "records", False):
            write(self, common, has_step=has_step)

    monkeypatch.setattr(ThreadRanks, "recording", marked)
    monkeypatch.setattr(DividedTensors, "write", faulty)
    with engine_on_threads(plan_of(4, cudagraph_mode="FULL", cudagraph_capture_sizes=[4], **DIVIDED)) as engine:
        report = verify_engine(engine, num_replays=4)
    assert {mismatch.rank for mismatch in report.mismatches} >= {1}


def test_a_rank_keeps_a_part_of_the_tokens() -> None:
    settings = {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 23, "block_size": 8}
    whole, divided = plan_of(4, **settings), plan_of(4, decode_context_parallel_size=2, **settings)
    assert whole.memory.kv_cache == divided.memory.kv_cache and whole.memory.num_blocks == divided.memory.num_blocks
    assert (whole.kv.block_sizes, divided.kv.block_sizes) == ((8,), (16,)) and divided.attention.block_size == 8
    assert divided.memory.attention > whole.memory.attention
    assert any("a block has 16 tokens, of which a rank keeps 8" in note for note in divided.notes)


@pytest.mark.parametrize(
    ("size", "settings", "words"),
    [
        (2, {}, "tensor_parallel_size=2 puts each of 2 KV heads on 1 rank; 1 works"),
        (4, {"decode_context_parallel_size": 3}, "puts each of 2 KV heads on 2 ranks; 1 or 2 works"),
        (4, {"kv_cache_layout": "HND"}, "kv_cache_layout='HND' has no rule for it, NHD has; 1 works"),
        (1, {}, "tensor_parallel_size=1 puts each of 2 KV heads on 1 rank; 1 works"),
    ],
)
def test_what_is_refused(size: int, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(size, **{**DIVIDED, **settings})
    assert str(raised.value).startswith("decode_context_parallel_size=") and words in str(raised.value)


def batch(queries: Sequence[int], contexts: Sequence[int], block_size: int, padding: int, seed: int) -> CommonMetadata:
    """Return a batch with a slot without a sequence, padding, and blocks in any order."""
    generator = torch.Generator().manual_seed(seed)
    lens = [query + context for query, context in zip(queries, contexts, strict=True)]
    starts = np.cumsum([0, *queries, 0]).astype(np.int32)
    most = -(-max(lens) // block_size)
    tables = torch.randperm(NUM_BLOCKS, generator=generator)[: len(lens) * most].view(len(lens), most).int()
    tables = torch.cat([tables, tables[:1]])
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (query, length) in enumerate(zip(queries, lens, strict=True))
        for position in range(length - query, length)
    ]
    host = np.array([*lens, 0], np.int32)
    return CommonMetadata(
        num_reqs=len(queries),
        num_decodes=0,
        num_tokens=sum(queries),
        num_decode_tokens=0,
        max_query_len=max(queries),
        max_seq_len=max(lens),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(host),
        block_table=tables,
        slot_mapping=torch.tensor([*slots, *[-1] * padding]),
        query_start_loc_cpu=starts,
        seq_lens_cpu=host,
    )


@pytest.mark.parametrize("lens", [(QUERIES, CONTEXTS), DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("writes", ["write_kv", "a kernel"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_attention_of_ranks_is_that_of_one(num_ranks: int, writes: str, lens: tuple[list[int], list[int]]) -> None:
    """Each rank has two query heads; the context, in float64 rounded once, is written by the tokens' slots.

    Decodes of one token have one part. Some ranks have no key of the shortest.
    """
    spec = AttentionSpec(
        num_query_heads=2 * num_ranks,
        num_kv_heads=1,
        head_size=16,
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=num_ranks * SIZE,
        lse=True,
    )
    padding = 3 if lens is not DECODES else 1
    common = batch(*lens, spec.block_size, padding, num_ranks)
    generator = torch.Generator().manual_seed(7)
    num_tokens = common.num_tokens + padding
    query = torch.randn(num_tokens, spec.num_query_heads, 16, generator=generator)
    key, value = torch.randn(2, num_tokens, 1, 16, generator=generator)
    whole = torch.randn(2, NUM_BLOCKS, spec.block_size, 1, 16, generator=generator)
    layer = AttentionLayer(index=0, scale=0.25)

    def attend(backend: Any, cache: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        builder = backend.make_builder()
        metadata = builder.build(common, key=None)
        call = AttentionCall(layer, cache, metadata)
        backend.schedule(metadata)
        if writes == "write_kv" or backend is reference:
            backend.write_kv(key, value, call)
        else:
            step_cache, slots = backend.kv_places(call, common.slot_mapping)
            kept = slots >= 0
            step_cache[0].flatten(0, 1)[slots[kept]], step_cache[1].flatten(0, 1)[slots[kept]] = key[kept], value[kept]
        out, lse = torch.full_like(own, torch.nan), torch.full((own.shape[1], num_tokens), torch.nan)
        backend.forward(own, call, out, lse)
        return out, lse

    reference = ReferenceBackend(spec, CPU, LIMITS)
    wanted, wanted_lse = attend(reference, whole_cache := whole.clone(), query)
    assert not torch.equal(whole_cache, whole)

    def on_rank(ranks: ThreadRanks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = replace(spec, num_query_heads=2, block_size=SIZE, non_causal=True)
        backend = ContextParallelBackend(own, CPU, LIMITS, make=ReferenceBackend, ranks=ranks, num_ranks=num_ranks)
        cache = whole[:, :, ranks.rank :: num_ranks].clone()
        heads = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        # Queries are views of a wider projection.
        return *attend(backend, cache, query[:, heads]), cache

    found = on_ranks(num_ranks, on_rank)
    torch.testing.assert_close(torch.cat([out for out, _, _ in found], 1), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([lse for _, lse, _ in found]), wanted_lse, rtol=1e-5, atol=1e-5)
    caches = torch.stack([cache for _, _, cache in found], 3).flatten(2, 3)
    assert torch.equal(caches, whole_cache)
