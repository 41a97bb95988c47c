"""Samples of one prompt, and prompts with a common beginning: what the engine computes, and that answers stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph import LLM, SamplingParams
from phonograph.core.batch import ScheduledBatch
from phonograph.runner.step_attention import StepAttention
from phonograph.scheduling import prompt_tails

PROMPT = [5 + position * position % 190 for position in range(64)]
"""Three blocks of 16 tokens, a tail of 15 and the last token."""


def make_llm(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[LLM, list[ScheduledBatch]]:
    """Return an engine, and a list that gets its batches."""
    sizes = {"max_num_seqs": 24, "max_model_len": 128, "cudagraph_capture_sizes": [1]}
    llm = LLM("demo", device="cpu", seed=5, **sizes | settings)
    batches: list[ScheduledBatch] = []
    submit = llm.engine.core.runner.submit
    monkeypatch.setattr(llm.engine.core.runner, "submit", lambda batch: (batches.append(batch), submit(batch))[1])
    return llm, batches


def prefill_lens(batches: list[ScheduledBatch]) -> list[list[int]]:
    return [lens for batch in batches if (lens := batch.query_lens[batch.num_decodes :])]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_samples_compute_the_prompt_once(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=20, max_tokens=12, ignore_eos=True, temperature=1.0, logprobs=0)
    llm, batches = make_llm(monkeypatch, kv_cache_layout=layout)
    (answer,) = llm.generate([PROMPT], params)
    assert prefill_lens(batches) == [[64], [1] * 19]
    alone, batches = make_llm(monkeypatch, enable_prefix_caching=False)
    (wanted,) = alone.generate([PROMPT], params)
    assert sum(map(sum, prefill_lens(batches))) == 20 * 64
    for one, other in zip(answer.outputs, wanted.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    assert len({tuple(one.token_ids) for one in answer.outputs}) > 10


def test_more_samples_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that wait for a slot find the end of the prompt with one that still runs."""
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    params = SamplingParams(n=20, max_tokens=12, ignore_eos=True, temperature=1.0, logprobs=0)
    llm, batches = make_llm(monkeypatch, max_num_seqs=6)
    (answer,) = llm.generate([PROMPT], params)
    (wanted,) = make_llm(monkeypatch)[0].generate([PROMPT], params)
    assert [one.token_ids for one in answer.outputs] == [one.token_ids for one in wanted.outputs]
    # The first ends before the next five, which have copied the end.
    assert sum(map(sum, prefill_lens(batches))) == 64 + 19


def test_prompts_compute_a_common_beginning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that arrive together: the second is admitted when the first is computed, into the same step."""
    llm, batches = make_llm(monkeypatch, max_num_batched_tokens=40)
    prompts = [PROMPT[:48] + [100 + number] * 9 for number in range(6)]
    llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    assert sum(map(sum, prefill_lens(batches))) == 48 + 6 * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_pages_are_copied_in_all_layers(dtype: torch.dtype) -> None:
    caches = [torch.randn(2, 40, 8, 2, 4).to(dtype), torch.randn(2, 40, 2, 8, 4).to(dtype).transpose(2, 3)]
    before = [cache.float() for cache in caches]
    runtime: Any = None
    backends: Any = [SimpleNamespace(capabilities=None)]
    # The last layer is another view of the first one's pages.
    attention = StepAttention(backends, [], [*caches, caches[0].view(2, 40, 4, 4, 4)], [], runtime)
    copies = [(source, 20 + source) for source in range(18)] + [(3, 19)]
    attention.copy_pages(copies)
    for cache, was in zip(caches, before, strict=True):
        for source, target in copies:
            was[:, target] = was[:, source]
        assert torch.equal(cache.float(), was)
