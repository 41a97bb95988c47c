"""Prompts are queued while steps run, and every step is what it would be had all been queued before."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest

from phonograph import LLM, SamplingParams
from phonograph.core.batch import ScheduledBatch

SLOTS = 3


def make_llm(**settings: Any) -> LLM:
    # Few blocks, so that some are preempted.
    return LLM(
        model="demo",
        device="cpu",
        max_num_seqs=SLOTS,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_kv_blocks=9,
        cudagraph_capture_sizes=[1, 2, 4, 16, 64],
        **settings,
    )


def workload(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 200) for _ in range(rng.randint(1, 60))] for _ in range(9)]
    return prompts, [SamplingParams(max_tokens=rng.randint(30, 60), ignore_eos=True, temperature=0.7) for _ in prompts]


def noted_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    noted: list[Any] = []
    submit = llm.engine.core.runner.submit

    def noting(batch: ScheduledBatch) -> Any:
        noted.append((batch.slots, batch.context_lens, batch.query_lens, batch.samples, batch.freed))
        return submit(batch)

    monkeypatch.setattr(llm.engine.core.runner, "submit", noting)
    return noted


def test_batches_are_those_of_prompts_queued_before(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = workload(0)
    lazily, before = make_llm(seed=5), make_llm(seed=5)
    batches, wanted = noted_batches(lazily, monkeypatch), noted_batches(before, monkeypatch)
    answers = lazily.generate(prompts, params)
    outputs = [before.session.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while before.session.has_unfinished:
        before.session.step()
    assert batches == wanted and len(batches) > 25
    assert [asdict(one)["outputs"] for one in answers] == [asdict(one)["outputs"] for one in outputs]
    assert before.engine.core.scheduler.stats.num_preemptions > 0


def test_the_first_step_does_not_wait_for_the_last_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    order: list[str] = []
    step, add = llm.session.step, llm.session.add

    def stepping() -> Any:
        order.append("step")
        return step()

    def adding(*args: Any, **keywords: Any) -> Any:
        order.append("add")
        return add(*args, **keywords)

    monkeypatch.setattr(llm.session, "step", stepping)
    monkeypatch.setattr(llm.session, "add", adding)
    prompts, _ = workload(9)
    prompts[7] = [-1]
    answers = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    assert order[: SLOTS + 1] == ["add"] * SLOTS + ["step"] and order.count("add") == len(prompts)
    assert [index for index, one in enumerate(answers) if one.error is not None] == [7]
    assert all(one.finished for one in answers)


def test_by_priority_all_are_queued_first() -> None:
    llm = make_llm(scheduling_policy="priority")
    prompts, _ = workload(3)
    finished: list[int] = []
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    step = llm.session.step

    def stepping() -> Any:
        changed = step()
        finished.extend(len(one.prompt_token_ids) for one in changed if one.finished)
        return changed

    llm.session.step = stepping  # pyright: ignore[reportAttributeAccessIssue]
    lengths = [len(prompt) for prompt in prompts]
    llm.generate(prompts, params, priority=[-length for length in lengths])
    assert finished[0] == max(lengths), "the longest was not among the first"
    assert finished[-1] == min(lengths)
