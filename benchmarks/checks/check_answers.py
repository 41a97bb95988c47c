"""Agreement of evaluations: scores by paired standard error, tokens by their gap in a float32 engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from checks.checks import Result
from checks.near_ties import logit_gaps
from demo_evaluation.compare import Divergence, TaskComparison, compare, read_items
from phonograph.engine.llm import LLM

NEAR_TIE = 0.5
"""Gap of float32 logits above which rounding to bfloat16 does not exchange two tokens."""
STANDARD_ERRORS = 3


def make_judge() -> LLM:
    """Make the most exact engine of the demo model: float32, on the CPU, without graphs."""
    return LLM(model="demo", device="cpu", dtype="float32", cudagraph_mode="NONE", max_num_seqs=4)


def compare_answers(name: str, first: Path, others: Mapping[str, Path], judge: LLM) -> Iterator[Result]:
    """Compare each of `others` with `first`. Answers to a question may differ only from a token that nearly ties with
    another.

    Args:
        name: of the first; others has theirs.
        judge: says how close two tokens are; what several of `others` share is asked once.
    """
    items = read_items(first)
    asked = json.loads(first.read_text(encoding="utf-8"))
    known: dict[Divergence, float] = {}
    for other, file in others.items():
        tasks = compare(items, read_items(file))
        divergences = [found for task in tasks for found in task.divergences]
        # There are no two tokens to judge if one answer ends and the other continues.
        judged = [found for found in divergences if found.first is not None and found.second is not None]
        new = [found for found in judged if found not in known]
        gaps = logit_gaps(judge, items, new, seed=asked["eval_seed"], recall_tokens=asked["recall_tokens"])
        known |= zip(new, gaps, strict=True)
        largest = max((known[found] for found in judged), default=0.0)
        ok = len(judged) == len(divergences) and largest <= NEAR_TIE
        ok = ok and all(abs(task.difference) <= STANDARD_ERRORS * task.standard_error for task in tasks)
        count = sum(task.count for task in tasks)
        text = f"{scores_text(tasks)}; {len(divergences)} of {count} answers differ"
        if divergences:
            text += f", first where two tokens' logits in float32 are {largest:.3f} apart or less"
        facts = {
            "answers": count,
            "answers_that_differ": len(divergences),
            "largest_logit_gap": largest,
            "tasks": {
                task.task: {"difference": task.difference, "standard_error": task.standard_error} for task in tasks
            },
        }
        yield Result(name=f"{other} beside {name}", ok=ok, text=text, facts=facts)


def scores_text(tasks: list[TaskComparison]) -> str:
    return ", ".join(f"{task.task} {task.difference:+.4f} ± {task.standard_error:.4f}" for task in tasks)
