"""litellm: chats, and its bridges from responses and from messages."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run

ASK: Any = [{"role": "user", "content": QUESTION}]
SERVER: Any = {"api_base": f"{DEMO}/v1", "api_key": "none"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@call("`completion`, streamed too")
def chat() -> None:
    found: Any = litellm.completion(model=f"openai/{MODEL}", messages=ASK, **SERVER)
    parts: Any = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=ASK, stream=True, **SERVER)
    assert ANSWER in found.choices[0].message.content
    assert ANSWER in "".join(part.choices[0].delta.content or "" for part in parts)


@call("tools by choice, with reasoning")
def tools() -> None:
    server = {**SERVER, "api_base": f"{SCRIPTED}/v1"}
    found: Any = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=ASK, tools=[TOOL], **server)
    message = found.choices[0].message
    assert message.reasoning_content and message.tool_calls[0].function.name == "add"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": ANSWER}
    turns = [*ASK, message.model_dump(), result]
    found = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=turns, tools=[TOOL], **server)
    assert ANSWER in found.choices[0].message.content


@call("`responses`")
def responses() -> None:
    found: Any = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, **SERVER)
    assert ANSWER in found.output[0].content[0].text


@call("the bridge from `completion` to `/v1/responses`")
def to_responses() -> None:
    found: Any = litellm.completion(model=f"openai/responses/{MODEL}", messages=ASK, **SERVER)
    assert ANSWER in found.choices[0].message.content


@call("the bridge from messages to `/v1/chat/completions`")
def from_messages() -> None:
    asked = litellm.anthropic.messages.acreate(model=f"hosted_vllm/{MODEL}", messages=ASK, max_tokens=60, **SERVER)
    found: Any = asyncio.run(asked)
    assert ANSWER in found["content"][0]["text"]


run("litellm")
