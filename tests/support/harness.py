"""Runs lm-evaluation-harness on the demo tasks, quickly: none of its own tasks are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

TASKS = Path(__file__).parents[2] / "benchmarks" / "demo_evaluation" / "tasks"
BOTH = ["demo_problems", "demo_choices"]


def evaluate(model: Any, tasks: list[str] = BOTH, *, limit: int, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the scores, and (task, document, answers) of each document."""
    found = simple_evaluate(
        model=model,
        tasks=tasks,  # pyright: ignore[reportArgumentType]
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=True,
        limit=limit,
        bootstrap_iters=0,
        **settings,
    )
    assert found is not None
    scores = {
        f"{task} {metric}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if metric.startswith(("exact_match,", "acc,"))
    }
    samples = {(task, one["doc_id"], str(one["resps"])) for task, ones in found["samples"].items() for one in ones}
    return scores, sorted(samples)
