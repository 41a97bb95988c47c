"""dspy: predictions by a JSON schema, and a tool."""

from __future__ import annotations

from typing import Literal

import dspy
from calls import ANSWER, DEMO, MODEL, QUESTION, call, run


def model() -> dspy.LM:
    return dspy.LM(f"openai/{MODEL}", api_base=f"{DEMO}/v1", api_key="none", cache=False, max_tokens=200)


@call("`LM`")
def plain() -> None:
    assert ANSWER in model()(QUESTION)[0]["text"] if isinstance(model()(QUESTION)[0], dict) else model()(QUESTION)[0]


@call("`Predict` with the JSON adapter")
def predict() -> None:
    class Solve(dspy.Signature):
        question: str = dspy.InputField()
        answer: Literal["19", "20"] = dspy.OutputField()

    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Solve)(question=QUESTION).answer in ("19", "20")


run("dspy")
