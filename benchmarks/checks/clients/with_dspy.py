"""dspy: predictions by a JSON schema, and a tool."""

from __future__ import annotations

from typing import Any, Literal

import dspy
from calls import ANSWER, DEMO, MODEL, QUESTION, call, run

# dspy's catalog of models does not know that the server holds JSON schemas.
KNOWN = {"supports_response_schema": True, "supported_params": {"max_tokens", "response_format", "temperature"}}
Model: Any = type("Model", (dspy.LM,), KNOWN)


def model() -> dspy.LM:
    return Model(f"openai/{MODEL}", api_base=f"{DEMO}/v1", api_key="none", cache=False, max_tokens=200)


@call("`LM`")
def plain() -> None:
    assert ANSWER in str(model()(QUESTION)[0])


@call("`Predict` with the JSON adapter")
def predict() -> None:
    class Solve(dspy.Signature):
        question: str = dspy.InputField()
        answer: Literal["19", "20"] = dspy.OutputField()

    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Solve)(question=QUESTION).answer in ("19", "20")


run("dspy")
