"""The gap between two tokens' logits where answers part, against the log-probabilities that the engine reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.near_ties import logit_gaps
from demo_evaluation.compare import compare
from demo_evaluation.evaluate import evaluate_demo
from demo_tasks.tasks import problems
from phonograph import LLM
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import ConfigError


def test_gaps_are_those_of_the_logits(demo_llm: LLM) -> None:
    results = evaluate_demo(demo_llm, num_problems=3, num_recalls=2, recall_tokens=200, seed=5)
    items = [item for result in results for item in result.items]
    prompt = demo_llm.encode_chat([{"role": "user", "content": list(problems(5, 3))[1].question}])
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3)
    position = demo_llm.generate([prompt], params)[0].outputs[0].logprobs[6]
    others = [
        replace(item, token_ids=[*item.token_ids[:6], position.token_ids[3]] if item is items[1] else item.token_ids)
        for item in items
    ]
    divergences = [found for task in compare(items, others) for found in task.divergences]
    (gap,) = logit_gaps(demo_llm, items, divergences, seed=5, recall_tokens=200)
    assert gap == pytest.approx(position.logprobs[0] - position.logprobs[3], abs=1e-4)
    assert logit_gaps(demo_llm, items, [], seed=5, recall_tokens=200) == []

    recall = next(item for item in items if item.task == "recalls")
    others = [replace(item, token_ids=[7, *item.token_ids]) if item is recall else item for item in items]
    divergences = [found for task in compare(items, others) for found in task.divergences]
    (gap,) = logit_gaps(demo_llm, items, divergences, seed=5, recall_tokens=200)
    assert gap > 1
    with pytest.raises(ConfigError, match="eval_seed"):
        logit_gaps(demo_llm, items, divergences, seed=6, recall_tokens=230)
