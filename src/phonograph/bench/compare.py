"""Two evaluations of the same questions, answer by answer: what a mode, backend or change of code did to the model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phonograph.bench.demo_eval import Item
from phonograph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two answers part: the first position at which their tokens differ; None behind the end of one of them."""

    task: str
    index: int
    position: int
    first: int | None
    second: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One task, paired by question. difference: score of the second less that of the first."""

    task: str
    count: int
    first_score: float
    second_score: float
    difference: float
    standard_error: float
    divergences: list[Divergence]


def read_items(path: Path) -> list[Item]:
    """The answers in a result file of an evaluation.

    Raises:
        ConfigError: there is no such file, or it is not one of these.
    """
    try:
        return [Item(**item) for item in json.loads(path.read_text(encoding="utf-8"))["items"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"is not the result of an evaluation ({error}); eval demo --output writes one"
        raise ConfigError("file", str(path), problem) from None


def compare(first: Sequence[Item], second: Sequence[Item]) -> list[TaskComparison]:
    """Compares two evaluations, task by task.

    The standard error is that of a mean of paired differences: far below that of two independent scores, since most
    questions are answered alike.

    Raises:
        ConfigError: they did not ask the same.
    """
    left, right = ({(item.task, item.index): item for item in items} for items in (first, second))
    unpaired = sorted(left.keys() ^ right.keys())
    unlike = [key for key in left.keys() & right.keys() if _asked(left[key]) != _asked(right[key])]
    if unpaired or unlike:
        task, index = (unpaired or sorted(unlike))[0]
        raise ConfigError(
            "evaluations", f"{len(left)} and {len(right)} items", f"they differ in what was asked: {task} {index}"
        )
    return [
        _compare_task(task, [(left[key], right[key]) for key in left if key[0] == task])
        for task in dict.fromkeys(task for task, _ in left)
    ]


def _asked(item: Item) -> tuple[str, int]:
    return item.expected, item.num_prompt_tokens


def _compare_task(task: str, pairs: list[tuple[Item, Item]]) -> TaskComparison:
    count = len(pairs)
    differences = [int(second.correct) - int(first.correct) for first, second in pairs]
    mean = sum(differences) / count
    spread = sum((difference - mean) ** 2 for difference in differences)
    return TaskComparison(
        task=task,
        count=count,
        first_score=sum(first.correct for first, _ in pairs) / count,
        second_score=sum(second.correct for _, second in pairs) / count,
        difference=mean,
        standard_error=math.sqrt(spread / (count - 1) / count) if count > 1 else math.inf,
        divergences=[found for first, second in pairs if (found := _divergence(first, second)) is not None],
    )


def _divergence(first: Item, second: Item) -> Divergence | None:
    if first.token_ids == second.token_ids:
        return None
    shorter = min(len(first.token_ids), len(second.token_ids))
    position = next((i for i in range(shorter) if first.token_ids[i] != second.token_ids[i]), shorter)
    return Divergence(
        task=first.task,
        index=first.index,
        position=position,
        first=first.token_ids[position] if position < len(first.token_ids) else None,
        second=second.token_ids[position] if position < len(second.token_ids) else None,
    )
