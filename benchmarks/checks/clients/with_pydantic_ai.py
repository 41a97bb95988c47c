"""pydantic-ai: agents with tools by choice, native output, chats and responses."""

from __future__ import annotations

from typing import Any, Literal

from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Choice(BaseModel):
    answer: Literal["19", "20"]


def model(kind: Any, url: str) -> Any:
    return kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@call("an agent")
def agent() -> None:
    assert ANSWER in Agent(model(OpenAIChatModel, DEMO)).run_sync(QUESTION).output


@call("tools by choice over `/v1/chat/completions` and `/v1/responses`")
def tools() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert ANSWER in Agent(model(kind, SCRIPTED), tools=[add]).run_sync(QUESTION).output


@call("`NativeOutput` and output by a tool")
def output() -> None:
    for kind in (NativeOutput(Choice), Choice):
        found = Agent(model(OpenAIChatModel, DEMO), output_type=kind).run_sync(
            QUESTION, model_settings={"max_tokens": 60}
        )
        assert isinstance(found.output, Choice)


run("pydantic-ai-slim")
