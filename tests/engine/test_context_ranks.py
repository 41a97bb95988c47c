"""Ranks that share the tokens of a KV head: the tokens of one rank, and attention against the reference."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from divided_attention import DECODES, MIXED, check_divided
from rank_sessions import PARAMS, PROMPTS, generate, plan_of, session_of
from thread_ranks import ThreadRanks, engine_on_threads

from phonograph.attention.composite.context_parallel import DividedTensors
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.engine.startup.start import verify_engine
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode

DIVIDED: dict[str, Any] = {"decode_context_parallel_size": 2, "block_size": 4}


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


@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("writes", ["write_kv", "a kernel"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_attention_of_ranks_is_that_of_one(num_ranks: int, writes: str, lens: tuple[list[int], list[int]]) -> None:
    """Decodes of one token have one part."""
    check_divided(ReferenceBackend, num_ranks, lens, size=4, writes=writes)
