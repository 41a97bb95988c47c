"""langchain-openai: chats, streams, tools, structured output and responses."""

from __future__ import annotations

from typing import Any, Literal

from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Choice(BaseModel):
    """An answer."""

    answer: Literal["19", "20"]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model(url: str = DEMO, **settings: Any) -> Any:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, **settings)  # type: ignore


@call("`ChatOpenAI.invoke` and `stream`")
def chat() -> None:
    assert ANSWER in model().invoke(QUESTION).content
    assert ANSWER in "".join(part.content for part in model().stream(QUESTION))


@call("`bind_tools`")
def tools() -> None:
    bound = model(SCRIPTED).bind_tools([add])
    turns: list[Any] = [HumanMessage(QUESTION)]
    turns.append(bound.invoke(turns))
    turns += [add.invoke(made) for made in turns[-1].tool_calls]
    assert len(turns) == 3 and ANSWER in bound.invoke(turns).content


@call("`with_structured_output`")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(model(max_tokens=60).with_structured_output(Choice, method=method).invoke(QUESTION), Choice)


@call("`use_responses_api=True`")
def responses() -> None:
    assert ANSWER in model(use_responses_api=True).invoke(QUESTION).text


run("langchain-openai")
