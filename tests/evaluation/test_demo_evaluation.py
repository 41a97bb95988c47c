"""The demo model's evaluation: what it asks, how it scores, and that no graph mode changes an answer."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from demo_evaluation.compare import compare
from demo_evaluation.evaluate import TaskResult, evaluate_demo
from demo_tasks.tasks import PROBLEM_TOKENS, RECALL_TOKENS, problems, recalls
from phonograph import LLM, SamplingParams
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode


def test_each_item_is_the_models_own_answer_to_its_question(demo_llm: LLM) -> None:
    before = Counter(demo_llm.step_counts)
    reports: list[tuple[str, int, int, int]] = []
    solved, recalled = evaluate_demo(
        demo_llm, num_problems=13, num_recalls=3, recall_tokens=150, seed=5, progress=lambda *one: reports.append(one)
    )
    assert solved.steps + recalled.steps == Counter(demo_llm.step_counts) - before
    assert [report[:3] for report in reports] == [("problems", done, 13) for done in range(1, 14)] + [
        ("recalls", done, 3) for done in range(1, 4)
    ]
    assert [report[3] for report in reports if report[1] == report[2]] == [solved.num_correct, recalled.num_correct]
    tokenizer = demo_llm.tokenizer
    assert tokenizer is not None
    facts = list(recalls(5, 3, 150, count_tokens=lambda text: len(tokenizer.encode(text))))
    asked = [(one.question, str(one.answer)) for one in problems(5, 13)] + [(one.prompt, one.answer) for one in facts]
    items = solved.items + recalled.items
    assert [(item.task, item.index) for item in items] == [("problems", i) for i in range(13)] + [
        ("recalls", i) for i in range(3)
    ]
    for item, (question, expected) in zip(items, asked, strict=True):
        # One at a time, with room to spare: what shares a batch must not matter.
        alone = demo_llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=200))[0]
        assert item.token_ids == alone.outputs[0].token_ids
        assert (item.text, item.num_prompt_tokens) == (alone.outputs[0].text, len(alone.prompt_token_ids))
        assert item.expected == expected
        assert item.correct == (re.findall(r"-?\d+", item.text)[-1:] == [expected])
    assert all(item.num_prompt_tokens >= 150 for item in recalled.items)
    assert solved.output_tokens == sum(len(item.token_ids) for item in solved.items)


def test_held_out_scores(demo_llm: LLM) -> None:
    """A part of the evaluation that `python -m demo_evaluation` runs whole."""
    solved, recalled = evaluate_demo(demo_llm, num_problems=40, num_recalls=2)
    print(f"problems {solved.score:.3f} ± {solved.standard_error:.3f}, recalls {recalled.score:.3f}")
    assert solved.score >= 0.90
    assert recalled.num_correct == 2
    assert all(item.num_prompt_tokens >= 3500 for item in recalled.items)


def test_the_estimate_is_measured_and_leaves_no_prompt_in_the_prefix_cache(demo_llm: LLM) -> None:
    hits = demo_llm.engine.core.scheduler.stats.prefix_hits
    expected: list[float] = []
    results = evaluate_demo(
        demo_llm, num_problems=20, num_recalls=2, recall_tokens=600, seed=77, expect=expected.append
    )
    seconds = sum(result.seconds for result in results)
    print(f"expected {expected[0]:.2f} s, took {seconds:.2f} s")
    assert len(expected) == 1 and seconds / 10 < expected[0] < seconds * 10  # other programs may take the processor
    # Recalls begin alike, in one block of 16 tokens.
    assert demo_llm.engine.core.scheduler.stats.prefix_hits - hits <= 16


def test_random_weights_score_nothing() -> None:
    llm = LLM(model="demo", load_format="dummy", max_num_seqs=8, enforce_eager=True)
    reports: list[int] = []
    solved, recalled = evaluate_demo(
        llm, num_problems=6, num_recalls=2, recall_tokens=70, progress=lambda *one: reports.append(one[3])
    )
    assert solved.score == recalled.score == 0.0
    assert reports == [0] * 8
    # They ramble on until they are stopped.
    assert max(len(item.token_ids) for item in solved.items) == PROBLEM_TOKENS
    assert max(len(item.token_ids) for item in recalled.items) == RECALL_TOKENS


def test_the_same_answers_in_every_mode(demo_llm: LLM) -> None:
    asked = {"num_problems": 12, "num_recalls": 2, "recall_tokens": 300}
    expected = evaluate_demo(demo_llm, **asked)
    labels: set[str] = set()
    for mode in GraphMode:
        llm = LLM(
            model="demo", dtype="float32", max_num_seqs=8, cudagraph_mode=mode, cudagraph_capture_sizes=[2, 8, 512]
        )
        results = evaluate_demo(llm, **asked)
        labels.update(label for result in results for label in result.steps)
        for first, second in zip(expected, results, strict=True):
            (comparison,) = compare(first.items, second.items)
            assert comparison.divergences == [], mode
            assert comparison.difference == comparison.standard_error == 0.0
    assert labels == {"eager", "full decode", "full mixed", "piecewise"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"num_problems": 0, "num_recalls": 0}, "problems"),
        ({"num_problems": -1}, "problems"),
        ({"num_problems": 1_000_000}, "problems"),
        ({"num_recalls": 100_001}, "recalls"),
        ({"num_recalls": -3}, "recalls"),
        ({"num_problems": 1, "num_recalls": 1, "recall_tokens": 8150}, "recall_tokens"),
        ({"num_problems": 1, "num_recalls": 1, "recall_tokens": 3}, "recall_tokens"),
    ],
)
def test_invalid_arguments(demo_llm: LLM, asked: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}="):
        evaluate_demo(demo_llm, **asked)
    assert not demo_llm.session.has_unfinished


def test_standard_error_is_that_of_a_share() -> None:
    def result(num_right: int, count: int) -> TaskResult:
        from demo_evaluation.evaluate import Item

        items = [
            Item(task="t", index=i, correct=i < num_right, expected="", text="", num_prompt_tokens=1, token_ids=[])
            for i in range(count)
        ]
        return TaskResult(task="t", items=items, seconds=1.0, steps=Counter())

    assert result(750, 1000).standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 1000))
    assert result(9, 9).standard_error == 0.0
