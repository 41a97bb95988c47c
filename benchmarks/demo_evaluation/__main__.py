"""Evaluation of the demo model on its held-out tasks, and the comparison of two evaluations answer by answer.

    PYTHONPATH=src:benchmarks:training python -m demo_evaluation --problems 1000 --recalls 300 --output all.json
    PYTHONPATH=src:benchmarks:training python -m demo_evaluation compare first.json second.json

The first takes the engine's flags. `--model` is demo unless it is given.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from bench.program import run_program
from bench.result_files import write_result
from demo_evaluation.compare import TaskComparison, read_items
from demo_evaluation.compare import compare as compare_items
from demo_evaluation.evaluate import TaskResult, evaluate_demo
from demo_tasks.tasks import EVALUATION_CONTEXT, EVALUATION_SEED
from phonograph.bench.records.record import provenance
from phonograph.cli import show
from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import OUTPUT, Json, note, start
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import counted

PROBLEMS, RECALLS = 100, 30
"""Default numbers of questions: a tenth of the published evaluation's, which takes minutes on a CPU."""

app = App(name="demo_evaluation", help_format="plaintext", version_flags=())


def _of_the_demo_model(command: Callable[..., int]) -> Callable[..., int]:
    """Set `--model demo` unless a model is named, since the tasks are those of the demo model."""

    @functools.wraps(command)
    def run(*arguments: Any, **keywords: Any) -> int:
        if not arguments:
            keywords["model"] = keywords.get("model") or "demo"
        return command(*arguments, **keywords)

    return run


@app.default
@_of_the_demo_model
@takes_engine_config
def evaluate(
    config: EngineConfig,
    *,
    problems: Annotated[int, Parameter(help="Held-out word problems to answer.")] = PROBLEMS,
    recalls: Annotated[int, Parameter(help="Recalls from a long context to answer.")] = RECALLS,
    recall_tokens: Annotated[int, Parameter(help="Tokens of a recall's prompt, at least.")] = EVALUATION_CONTEXT,
    eval_seed: Annotated[
        int, Parameter(help="Seed of problems and recalls; --seed is the engine's.")
    ] = EVALUATION_SEED,
    output: Annotated[
        Path | None, OUTPUT, Parameter(help="File for everything: answers, token ids, where it was run.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Answer the demo model's held-out tasks greedily and score them. --model is demo unless given."""
    origin = provenance()
    llm = start(config)
    with progress_bar() as report:
        results = evaluate_demo(
            llm,
            num_problems=problems,
            num_recalls=recalls,
            recall_tokens=recall_tokens,
            seed=eval_seed,
            expect=lambda seconds: note(f"{_questions(problems, recalls)}, about {seconds_text(seconds)}"),
            progress=lambda task, done, total, correct: report(task, done, total, f"{correct / done:.3f} right"),
        )
    facts = {
        **show.engine_facts(llm),
        "eval_seed": eval_seed,
        "recall_tokens": recall_tokens,
        "tasks": [_task_facts(result) for result in results],
    }
    items = [asdict(item) for result in results for item in result.items]
    save = None if output is None else functools.partial(write_result, output, origin, {**facts, "items": items})
    show.report({**origin, **facts}, lambda: _print_results(results), as_json=as_json, save=save)
    if not as_json:
        steps = sum((result.steps for result in results), Counter[str]())
        note(f"{llm.plan.resolution.label}, {show.steps_text(steps)}")
    return 0


@app.command
def compare(
    first: Annotated[Path, Parameter(help="A file that --output wrote.")],
    second: Annotated[Path, Parameter(help="Another, of the same questions.")],
    *,
    as_json: Json = False,
) -> int:
    """Compare two evaluations answer by answer; exit code 1 where their tokens differ."""
    comparisons = compare_items(read_items(first), read_items(second))
    if as_json:
        show.print_json({"tasks": [asdict(comparison) for comparison in comparisons]})
    else:
        _print_comparisons(comparisons)
    return int(any(comparison.divergences for comparison in comparisons))


def _questions(problems: int, recalls: int) -> str:
    kinds = (("problem", problems), ("recall", recalls))
    return " and ".join(counted(count, noun) for noun, count in kinds if count)


def seconds_text(seconds: float) -> str:
    """Return a rough duration: "5 s", "2 min", "1.5 h"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _task_facts(result: TaskResult) -> dict[str, Any]:
    return {
        "task": result.task,
        "count": len(result.items),
        "correct": result.num_correct,
        "score": result.score,
        "standard_error": result.standard_error,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "seconds": round(result.seconds, 4),
        "steps": dict(result.steps),
    }


def _print_results(results: list[TaskResult]) -> None:
    rows = [
        (
            result.task,
            f"{result.num_correct} of {len(result.items)}",
            f"{result.score:.4f} ± {result.standard_error:.4f}",
            str(result.prompt_tokens),
            str(result.output_tokens),
            f"{result.seconds:.1f}",
            f"{result.output_tokens / result.seconds:.0f}",
        )
        for result in results
    ]
    show.print_table(("task", "right", "score", "tokens in", "out", "seconds", "out/s"), rows)


def _print_comparisons(comparisons: list[TaskComparison]) -> None:
    rows = [
        (
            task.task,
            str(task.count),
            f"{task.first_score:.4f}",
            f"{task.second_score:.4f}",
            f"{task.difference:+.4f} ± {task.standard_error:.4f}",
            str(len(task.divergences)),
        )
        for task in comparisons
    ]
    show.print_table(("task", "answers", "first", "second", "difference", "tokens differ in"), rows)
    show.print_lines(
        [
            f"{found.task} {found.index}: from token {found.position} on, {found.first} against {found.second}"
            for task in comparisons
            for found in task.divergences
        ]
    )


def main(tokens: list[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a user error."""
    return run_program(app, "demo_evaluation", tokens)


if __name__ == "__main__":
    sys.exit(main())
