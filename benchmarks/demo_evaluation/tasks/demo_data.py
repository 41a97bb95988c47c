"""Documents of the demo tasks, from the held-out problems of the demo model's evaluation."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset

COUNT = 200
"""Documents of each task: the first problems of the demo model's evaluation."""
CHOICES, SEED = 4, 20_000


def problems(**_: Any) -> dict[str, Dataset]:
    """question, and the number that decides. The harness passes the task's metadata, which has no say."""
    return _test([{"question": one["question"], "answer": str(one["answer"])} for one in _held_out()])


def choices(**_: Any) -> dict[str, Dataset]:
    """question, worked answers, and which of them is right."""
    rng = Random(SEED)
    return _test([_choice(one, rng) for one in _held_out()])


def _held_out() -> list[dict[str, Any]]:
    lines = Path(__file__).with_name("held_out_problems.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:COUNT]]


def _choice(problem: dict[str, Any], rng: Random) -> dict[str, Any]:
    result = problem["answer"]
    wrong = {result + step for step in (-10, -2, -1, 1, 2, 10) if result + step >= 0}
    results = [result, *rng.sample(sorted(wrong), CHOICES - 1)]
    rng.shuffle(results)
    end = f"{result}. #### {result}"
    assert problem["worked_answer"].endswith(end)
    begin = problem["worked_answer"].removesuffix(end)
    return {
        "question": problem["question"],
        "choices": [f"{begin}{one}. #### {one}" for one in results],
        "gold": results.index(result),
    }


def _test(documents: list[dict[str, Any]]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(documents)}
