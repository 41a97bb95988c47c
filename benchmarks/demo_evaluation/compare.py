"""Comparison of two evaluations of the same questions, answer by answer."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from demo_evaluation.evaluate import Item
from phonograph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """First position at which the tokens of two answers differ; None is after the end of one of them."""

    task: str
    index: int
    position: int
    first: int | None
    second: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One task, paired by question. `difference` is the second score minus the first, with its standard error."""

    task: str
    count: int
    first_score: float
    second_score: float
    difference: float
    standard_error: float
    divergences: list[Divergence]


def read_items(path: Path) -> list[Item]:
    """Read the answers from a result file of an evaluation.

    Raises:
        ConfigError: the file cannot be read, or is not the result of an evaluation.
    """
    try:
        return [Item(**item) for item in json.loads(path.read_text(encoding="utf-8"))["items"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"is not the result of an evaluation ({error}); demo_evaluation --output writes one"
        raise ConfigError("file", str(path), problem) from None


def compare(first: Sequence[Item], second: Sequence[Item]) -> list[TaskComparison]:
    """Compare two evaluations task by task.

    The standard error is that of a mean of paired differences. It is far below that of two independent scores, since
    most questions are answered alike.

    Raises:
        ConfigError: the evaluations have different questions.
    """
    left, right = ({(item.task, item.index): item for item in items} for items in (first, second))
    different = left.keys() ^ right.keys() or {
        key
        for key, item in left.items()
        if (item.expected, item.num_prompt_tokens) != (right[key].expected, right[key].num_prompt_tokens)
    }
    if different:
        task, index = min(different)
        problem = f"they have different questions: {task} {index}"
        raise ConfigError("evaluations", f"{len(left)} and {len(right)} items", problem)
    return [
        _compare_task(task, [(left[key], right[key]) for key in left if key[0] == task])
        for task in dict.fromkeys(task for task, _ in left)
    ]


def _compare_task(task: str, pairs: list[tuple[Item, Item]]) -> TaskComparison:
    count = len(pairs)
    differences = [int(second.correct) - int(first.correct) for first, second in pairs]
    return TaskComparison(
        task=task,
        count=count,
        first_score=sum(first.correct for first, _ in pairs) / count,
        second_score=sum(second.correct for _, second in pairs) / count,
        difference=statistics.fmean(differences),
        standard_error=statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.inf,
        divergences=[found for first, second in pairs if (found := _divergence(first, second)) is not None],
    )


def _divergence(first: Item, second: Item) -> Divergence | None:
    for position, (one, other) in enumerate(zip_longest(first.token_ids, second.token_ids)):
        if one != other:
            return Divergence(task=first.task, index=first.index, position=position, first=one, second=other)
    return None
