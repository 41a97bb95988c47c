"""Comparing evaluations: paired statistics against scipy's, and where answers part."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from demo_evaluation.compare import compare, read_items
from demo_evaluation.evaluate import Item
from phonograph.errors import ConfigError


def _item(index: int, correct: bool = True, token_ids: tuple[int, ...] = (5, 6, 7), task: str = "problems") -> Item:
    return Item(
        task=task,
        index=index,
        correct=correct,
        expected=str(index),
        text="",
        num_prompt_tokens=10 + index,
        token_ids=list(token_ids),
    )


def test_paired_difference_and_its_standard_error() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.random(57) < 0.8, rng.random(57) < 0.6
    (found,) = compare(
        [_item(i, bool(right)) for i, right in enumerate(first)],
        # In any order: pairs are made by question.
        [_item(i, bool(second[i])) for i in rng.permutation(57).tolist()],
    )
    paired = second.astype(float) - first.astype(float)
    assert found.difference == pytest.approx(paired.mean())
    assert found.standard_error == pytest.approx(stats.sem(paired))
    assert (found.first_score, found.second_score) == pytest.approx((first.mean(), second.mean()))
    assert found.count == 57 and found.divergences == []


def test_tasks_are_apart_and_one_answer_has_no_spread() -> None:
    first = [_item(0), _item(1), _item(0, task="recalls")]
    second = [_item(0), _item(1, correct=False), _item(0, task="recalls")]
    problems, recalls = compare(first, second)
    assert (problems.task, problems.count, problems.difference) == ("problems", 2, -0.5)
    assert (recalls.task, recalls.count, recalls.difference) == ("recalls", 1, 0.0)
    assert math.isinf(recalls.standard_error)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 2, 3), (1, 9, 3), (1, 2, 9)),
        ((8, 2), (1, 2), (0, 8, 1)),
        ((1, 2), (1, 2, 3), (2, None, 3)),
        ((1, 2, 3), (1, 2), (2, 3, None)),
        ((), (4,), (0, None, 4)),
    ],
)
def test_the_first_token_that_differs(one, other, expected) -> None:
    (found,) = compare([_item(0), _item(1, token_ids=one)], [_item(0), _item(1, token_ids=other)])
    (divergence,) = found.divergences
    assert (divergence.position, divergence.first, divergence.second) == expected
    assert (divergence.task, divergence.index) == ("problems", 1)


def test_other_questions_cannot_be_compared() -> None:
    items = [_item(0), _item(1)]
    with pytest.raises(ConfigError, match="problems 1"):
        compare(items, items[:1])
    with pytest.raises(ConfigError, match="problems 0"):
        compare(items, [replace(items[0], expected="other"), items[1]])
    with pytest.raises(ConfigError, match="problems 1"):
        compare(items, [items[0], replace(items[1], num_prompt_tokens=99)])


def test_files(tmp_path: Path) -> None:
    items = [_item(0), _item(1, correct=False, token_ids=())]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"date": "today", "items": [asdict(item) for item in items]}))
    assert read_items(path) == items
    for text in ("", "[]", "{}", '{"items": [{"task": "problems"}]}', '{"items": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="demo_evaluation --output"):
            read_items(path)
    with pytest.raises(ConfigError, match="nowhere"):
        read_items(tmp_path / "nowhere.json")
