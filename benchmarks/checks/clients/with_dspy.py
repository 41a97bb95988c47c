"""dspy: predictions by a JSON schema, and a tool."""

from __future__ import annotations

from typing import Literal

import dspy
from calls import ANSWER, DEMO, MODEL, QUESTION, call, run


class Model(dspy.LM):
    """A model whose server holds JSON schemas: dspy's catalog does not know its name."""

    supports_response_schema = property(lambda self: True)  # type: ignore[assignment]
    supported_params = property(lambda self: {"max_tokens", "response_format", "temperature"})  # type: ignore[assignment]


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
