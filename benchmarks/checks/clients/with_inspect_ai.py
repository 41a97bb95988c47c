"""inspect-ai: an evaluation, and a solver that uses tools."""

from __future__ import annotations

import os
import tempfile

from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

os.environ["PHONOGRAPH_API_KEY"] = "none"
os.environ["INSPECT_DISPLAY"] = "none"


@tool
def add() -> Tool:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one number.
            b: the other.
        """
        return str(a + b)

    return execute


def score(task: Task, url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = eval(task, f"openai-api/phonograph/{MODEL}", model_base_url=f"{url}/v1", log_dir=folder)[0]
    assert log.status == "success" and log.results, log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0


DATA = [Sample(input=QUESTION, target=ANSWER)]


@call("an evaluation with `openai-api/`")
def plain() -> None:
    score(Task(dataset=DATA, solver=generate(), scorer=includes()), DEMO)


@call("`use_tools`")
def tools() -> None:
    score(Task(dataset=DATA, solver=[use_tools(add()), generate()], scorer=includes()), SCRIPTED)


run("inspect-ai")
