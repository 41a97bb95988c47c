"""Counts of the tokens of each expert: exact, without padding, and absent by default."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoints import make_checkpoint
from transformers import PreTrainedModel

from phonograph import LLM, SamplingParams
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.plan import make_plan
from phonograph.errors import ConfigError
from phonograph.models.spec import read_model_spec
from phonograph.server.observe.metrics import EngineCollector

VOCAB_SIZE = read_model_spec("demo").vocab_size
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)
PROMPTS = [[5, 99, 3, 3, 42, 17, 200, 8, 1], [7, 7, 7], [1000, 2]]


@pytest.fixture(scope="module")
def qwen2_moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Return a checkpoint with experts in its second layer only, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("qwen2_moe")
    return folder, make_checkpoint("qwen2_moe", folder, seed=1, vocab_size=VOCAB_SIZE)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"tokenizer": str(MODEL_DIRECTORY), "device": "cpu", "dtype": "float32", "block_size": 8}
    return LLM(str(folder), **{**defaults, "max_num_seqs": 4, "max_num_batched_tokens": 16, **settings})


def wanted_load(reference: PreTrainedModel, sequences: Sequence[list[int]]) -> list[int]:
    """Return the tokens of each expert by transformers' router, of all tokens but the last of each sequence."""
    total = torch.zeros(reference.config.num_experts, dtype=torch.int64)
    for ids in sequences:
        with torch.no_grad():
            (logits,) = reference(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        chosen = logits.topk(reference.config.num_experts_per_tok).indices.flatten()
        total += torch.bincount(chosen, minlength=len(total))
    return total.tolist()


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_counts_are_those_of_the_routers(mode: str, qwen2_moe: tuple[Path, PreTrainedModel]) -> None:
    """Steps have padding, and those before serving have synthetic batches: neither counts."""
    folder, reference = qwen2_moe
    llm = make_llm(folder, expert_load_metrics=True, cudagraph_mode=mode, enable_prefix_caching=False)
    load = llm.engine.core.expert_load
    assert list(load) == [1] and not load[1].any()
    answers = llm.generate(PROMPTS, GREEDY)
    sequences = [[*prompt, *one.outputs[0].token_ids] for prompt, one in zip(PROMPTS, answers, strict=True)]
    assert load[1].tolist() == wanted_load(reference, sequences)


def test_off_by_default(qwen2_moe: tuple[Path, PreTrainedModel]) -> None:
    llm = make_llm(qwen2_moe[0])
    llm.generate(PROMPTS[:1], GREEDY)
    assert not llm.engine.core.expert_load


def test_reports_have_the_counts(qwen2_moe: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = qwen2_moe
    asyncio.run(check_reports(folder, reference))


async def check_reports(folder: Path, reference: PreTrainedModel) -> None:
    settings: dict[str, Any] = {"tokenizer": str(MODEL_DIRECTORY), "device": "cpu", "dtype": "float32"}
    async with AsyncLLM(str(folder), expert_load_metrics=True, **settings) as engine:
        outputs = [output async for output in engine.generate(PROMPTS[0], GREEDY)]
        ids = [*PROMPTS[0], *outputs[-1].outputs[0].token_ids]
        assert engine.expert_load == {1: wanted_load(reference, [ids])}


def metrics_of(load: dict[int, list[int]]) -> Iterator[tuple[dict[str, str], float]]:
    engine = SimpleNamespace(expert_load=load)
    collector = EngineCollector(cast("AsyncLLM", engine), "model", {})
    for family in collector._experts():
        assert family.name == "phonograph:expert_tokens"
        yield from ((sample.labels, sample.value) for sample in family.samples)


def test_metrics_have_a_series_for_each_expert() -> None:
    assert not [*metrics_of({})]
    labels = [{"model_name": "model", "layer": "3", "expert": str(expert)} for expert in range(2)]
    assert [*metrics_of({3: [4, 5]})] == [*zip(labels, (4, 5), strict=True)]


def test_refused_without_experts() -> None:
    config = EngineConfig(model="demo", expert_load_metrics=True)
    with pytest.raises(ConfigError, match="expert_load_metrics=True: LlamaForCausalLM has no experts; leave it out"):
        make_plan(config, read_model_spec("demo"), known_device("cpu"))
