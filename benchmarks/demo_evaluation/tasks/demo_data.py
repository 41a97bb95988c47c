"""The documents of the demo tasks, made from the demo model's families of problems: nothing to download or keep."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from random import Random
from typing import Any

from datasets import Dataset

from phonograph.demo.tasks import EVALUATION_SEED, Problem
from phonograph.demo.tasks import problems as draw

COUNT = 200
"""Documents of each task: the first of those that `phonograph eval demo` asks."""
CHOICES = 4


def problems(**_: Any) -> dict[str, Dataset]:
    """question, and the number that decides. The harness passes the task's metadata, which has no say."""
    return _test([{"question": one.question, "answer": str(one.answer)} for one in draw(EVALUATION_SEED, COUNT)])


def choices(**_: Any) -> dict[str, Dataset]:
    """question, worked answers, and which of them is right."""
    rng = Random(EVALUATION_SEED)
    return _test([_choice(one, rng) for one in draw(EVALUATION_SEED, COUNT)])


def _choice(problem: Problem, rng: Random) -> dict[str, Any]:
    result = problem.answer
    wrong = {result + step for step in (-10, -2, -1, 1, 2, 10) if result + step >= 0}
    results = [result, *rng.sample(sorted(wrong), CHOICES - 1)]
    rng.shuffle(results)
    end = f"{result}. #### {result}"
    assert problem.worked_answer.endswith(end)
    begin = problem.worked_answer.removesuffix(end)
    return {
        "question": problem.question,
        "choices": [f"{begin}{one}. #### {one}" for one in results],
        "gold": results.index(result),
    }


def _test(documents: list[dict[str, Any]]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(documents)}
