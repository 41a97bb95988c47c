"""Ranks on GPUs: the tokens of one rank, graphs equal to eager on every rank, and the end of a rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from peer_sums import check_sums

from phonograph.attention.flash_attn.providers import missing
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError, MemoryLimitError, RankError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SETTINGS: dict[str, Any] = {
    **{"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 512, "max_model_len": 512},
    **{"max_num_batched_tokens": 128, "max_cudagraph_capture_size": 16, "seed": 0},
}


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = 1, 9, 40, 175, 3, 18
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


PARAMS = [SamplingParams(temperature=0.8, seed=index, max_tokens=24, ignore_eos=True) for index in range(6)]
PARAMS[2] = PARAMS[5] = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PARAMS[3] = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)


def tokens(llm: LLM, vocab_size: int) -> list[list[int]]:
    outputs = llm.generate(prompts(vocab_size), PARAMS)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS, tensor_parallel_size=2) as llm:
        yield llm


def test_verify_runs_on_every_rank(two: LLM) -> None:
    report = two.verify(num_replays=200)
    assert report.ok, report.mismatches[:3]


def test_the_demo_model_gives_the_tokens_of_one_rank(two: LLM) -> None:
    with LLM("demo", **SETTINGS) as one:
        assert tokens(two, 2048) == tokens(one, 2048)


def test_grammars_are_masked_on_rank_0(two: LLM) -> None:
    schema = StructuredOutputs(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    params = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=schema)
    with LLM("demo", **SETTINGS) as one:
        texts = [llm.generate(["Tom has 12 apples."], params)[0].outputs[0].text for llm in (one, two)]
    assert texts[0] == texts[1] and texts[0].startswith("{")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama3", {"cudagraph_mode": "FULL_AND_PIECEWISE"}),
        ("qwen2", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ("olmo2", {"cudagraph_mode": "NONE"}),
        ("mixtral", {}),
        ("qwen3_5", {}),
        ("nemotron_h", {}),
        ("granite4_h", {}),
        ("falcon_h1", {}),
    ],
)
def test_two_ranks_give_the_tokens_of_one(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=3)
    found: list[list[list[int]]] = []
    for size in (1, 2):
        with LLM(str(tmp_path), **SETTINGS, **settings, tensor_parallel_size=size) as llm:
            found.append(tokens(llm, VOCAB_SIZE))
            if size == 2 and settings.get("cudagraph_mode") != "NONE":
                assert llm.verify(num_replays=20).ok
    assert found[0] == found[1]


def test_ranks_that_share_the_tokens_of_a_head(tmp_path: Path) -> None:
    """Decode context parallelism, with one KV head on both ranks."""
    make_checkpoint("llama3", tmp_path, seed=3, num_attention_heads=2, num_key_value_heads=1)
    found: list[list[list[int]]] = []
    for size in (1, 2):
        with LLM(str(tmp_path), **SETTINGS, tensor_parallel_size=size, decode_context_parallel_size=size) as llm:
            found.append(tokens(llm, VOCAB_SIZE))
            if size == 2:
                assert llm.verify(num_replays=20).ok
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["flash_attn 2", "flash_attn 3", "flashinfer"])
def test_libraries_attend_parts_of_a_context(backend: str, tmp_path: Path) -> None:
    """Log-probabilities of the tokens are those that one rank gives them by our kernels, in prompts of its own."""
    backend, _, version = backend.partition(" ")
    absent = missing(version) if version else FlashInferCapabilities().missing()
    if absent is not None:
        pytest.skip(absent)
    make_checkpoint("llama3", tmp_path, seed=3, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    settings = {**SETTINGS, "dtype": "bfloat16"}
    shared: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    shared |= {"attention_backend": backend, "flash_attn_version": int(version) if version else None}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)
    with LLM(str(tmp_path), **settings, **shared) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts(VOCAB_SIZE), params)]
        assert llm.verify(num_replays=20).ok
    with LLM(str(tmp_path), **settings) as llm:
        wholes = [prompt + one.token_ids for prompt, one in zip(prompts(VOCAB_SIZE), outputs, strict=True)]
        scored = llm.generate(wholes, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    for one, other in zip(outputs, scored, strict=True):
        assert one.logprobs is not None and other.prompt_logprobs is not None
        pairs = zip(one.token_ids, one.logprobs, other.prompt_logprobs[-24:], strict=True)
        differences = [abs(found[token].logprob - wanted[token].logprob) for token, found, wanted in pairs]
        assert sum(differences) / 24 < 0.08, "other contexts make it 1.4 to 3.8"


def test_both_gpus_give_their_memory_back_and_wake_up_with_their_graphs() -> None:
    """Sums over peer memory and NCCL go on, because their buffers stay; rank 1 alone may lack memory."""
    with LLM("demo", **{**SETTINGS, "num_kv_blocks": 8192}, tensor_parallel_size=2, enable_sleep_mode=True) as llm:
        expected = tokens(llm, 2048)
        free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
        for level in (1, 2, 2, 1, 2):
            llm.sleep(level)
            asleep = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
            assert all(now > before + llm.plan.memory.kv_cache for now, before in zip(asleep, free, strict=True))
            llm.wake_up(["weights"])
            llm.wake_up()
            assert tokens(llm, 2048) == expected
        llm.sleep(1)
        taken = torch.empty(torch.cuda.mem_get_info(1)[0] - (40 << 20), dtype=torch.uint8, device="cuda:1")
        with pytest.raises(MemoryLimitError, match="^rank 1: no memory to wake up"):
            llm.wake_up()
        assert llm.is_sleeping() and torch.cuda.mem_get_info(0)[0] > free[0] + llm.plan.memory.kv_cache
        del taken
        torch.cuda.empty_cache()
        llm.wake_up()
        assert tokens(llm, 2048) == expected
        report = llm.verify(num_replays=50)
        assert report.ok, report.mismatches[:3]


@pytest.mark.parametrize(
    "speculation",
    [{"method": "eagle3", "model": "demo-eagle3"}, {"method": "draft_model", "model": "demo"}],
    ids=["head", "model"],
)
def test_drafts_of_rank_0_are_those_of_one_rank(speculation: dict[str, Any]) -> None:
    """In whole graphs too, some of which rank 0 times. Acceptance may differ where two tokens are almost equal."""
    speculation = {**speculation, "num_speculative_tokens": 3}
    found: list[list[list[int]]] = []
    accepted: list[int] = []
    for size in (1, 2):
        fixed = {"speculative_config": {**speculation, "adaptive_depth": False}, "tensor_parallel_size": size}
        with LLM("demo", **SETTINGS, **fixed) as llm:
            found.append(tokens(llm, 2048))
            accepted.append(llm.engine.core.scheduler.stats.drafts.accepted)
    assert found[0] == found[1]
    assert accepted[0] > 0 and abs(accepted[0] - accepted[1]) <= 0.05 * accepted[0] + 3
    whole = {**SETTINGS, "dtype": "bfloat16", "tensor_parallel_size": 2, "speculative_config": speculation}
    with LLM("demo", **whole) as llm:
        tokens(llm, 2048)
        assert llm.verify(num_replays=60).ok


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 4 GPUs, found \d GPUs here"):
        LLM("demo", **{**SETTINGS, "device": "cuda"}, tensor_parallel_size=4)


def test_a_killed_rank_ends_the_engine_within_seconds() -> None:
    before = set(psutil.Process().children(recursive=True))
    with LLM("demo", **SETTINGS, tensor_parallel_size=2) as llm:
        llm.generate([[5, 6, 7]], PARAMS[2])
        ranks = set(psutil.Process().children(recursive=True)) - before
        ranks = {one for one in ranks if "spawn_main" in " ".join(one.cmdline())}
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match="the process of rank 1 ended by SIGKILL"):
            llm.generate(prompts(2048), PARAMS)
        assert time.monotonic() - began < 8


def test_sums_over_peer_memory_are_those_of_nccl(tmp_path: Path) -> None:
    check_sums(tmp_path)
