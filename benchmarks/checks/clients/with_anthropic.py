"""anthropic: messages, their stream, tools and counts."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run

demo = Anthropic(base_url=DEMO, api_key="none", max_retries=0)
scripted = Anthropic(base_url=SCRIPTED, api_key="none", max_retries=0)
ASK: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}]}
TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@call("`messages.create`")
def create() -> None:
    assert ANSWER in demo.messages.create(**ASK).content[0].text


@call("`messages.stream`")
def stream() -> None:
    with demo.messages.stream(**ASK) as found:
        assert ANSWER in "".join(found.text_stream)


@call("tools by choice, with thinking")
def tools() -> None:
    with scripted.messages.stream(**ASK, tools=[TOOL]) as found:
        content = found.get_final_message().content
    assert [block.type for block in content] == ["thinking", "text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": content[-1].id, "content": ANSWER}
    turns = [*ASK["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert ANSWER in scripted.messages.create(**{**ASK, "messages": turns}, tools=[TOOL]).content[-1].text


@call("`messages.count_tokens`")
def count() -> None:
    assert demo.messages.count_tokens(model=MODEL, messages=ASK["messages"]).input_tokens > 5


run("anthropic")
