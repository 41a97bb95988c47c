"""openai-agents: an agent with a function, over responses and over chats."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calls import ANSWER, MODEL, QUESTION, SCRIPTED, call, run
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent(kind: Any) -> Any:
    client = AsyncOpenAI(base_url=f"{SCRIPTED}/v1", api_key="none", max_retries=0)
    model = kind(model=MODEL, openai_client=client)
    return Agent(name="Adder", instructions="Add.", tools=[add], model=model, model_settings=ModelSettings())


@call("an agent with a function over `/v1/responses`")
def responses() -> None:
    assert ANSWER in asyncio.run(Runner.run(agent(OpenAIResponsesModel), QUESTION)).final_output


@call("the same, streamed")
def streamed() -> None:
    async def read() -> str:
        found = Runner.run_streamed(agent(OpenAIResponsesModel), QUESTION)
        async for _ in found.stream_events():
            pass
        return found.final_output

    assert ANSWER in asyncio.run(read())


@call("an agent with a function over `/v1/chat/completions`")
def chats() -> None:
    assert ANSWER in asyncio.run(Runner.run(agent(OpenAIChatCompletionsModel), QUESTION)).final_output


run("openai-agents")
