"""Anthropic's own client with this server: its messages, its stream helper, and its types for every event."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from client_types import check_type
from servers import QUESTION, Server

from phonograph.core.structured_outputs import StructuredOutputs


def library() -> Any:
    """Import the client when a test needs it: most workers run none of these tests."""
    return pytest.importorskip("anthropic", reason="needs anthropic of the extra dev")


TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}
TURNS = "{# <tool_call> #}{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}<|assistant|>"
ASK: dict[str, Any] = {"model": "demo", "max_tokens": 60, "messages": [{"role": "user", "content": QUESTION}]}


def client(server: Server) -> Any:
    return library().Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)


def check_events(server: Server, body: dict[str, Any]) -> None:
    """Check every event of a stream against the types of the package."""
    lines = server.post("/v1/messages", {**body, "stream": True}).text.split("\n")
    for line in lines:
        if line.startswith("data: ") and (found := json.loads(line.removeprefix("data: ")))["type"] != "ping":
            check_type(library().types.RawMessageStreamEvent, found)


def test_messages_and_streams(server: Server) -> None:
    found = client(server).messages.create(**ASK, extra_body={"temperature": 0})
    library().types.Message.model_validate(found.model_dump(warnings=False))
    with client(server).messages.stream(**ASK, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == found.content[0].text == final.content[0].text and final.stop_reason == "end_turn"
    counted = client(server).messages.count_tokens(model="demo", messages=ASK["messages"])
    usage = found.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert final.usage.output_tokens == usage.output_tokens
    check_events(server, ASK)


def test_calls_with_results(serve_with: Callable[..., Server]) -> None:
    text = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    server = serve_with({"structured_outputs": StructuredOutputs(choice=[text])}, chat_template=TURNS)
    asked = {**ASK, "tools": [TOOL], "max_tokens": 200}
    with client(server).messages.stream(**asked) as stream:
        final = stream.get_final_message()
    words, call = final.content
    assert words.text == "I add. " and (call.name, call.input) == ("add", {"a": 1}) and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    turns = [*asked["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    assert client(server).messages.create(**{**asked, "messages": turns}).content
    check_events(server, asked)


def test_errors(server: Server, serve_with: Callable[..., Server]) -> None:
    with pytest.raises(library().NotFoundError) as missing:
        client(server).messages.create(**{**ASK, "model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(library().BadRequestError, match="prompt is too long"):
        client(server).messages.create(**{**ASK, "messages": [{"role": "user", "content": "Hi " * 3000}]})
    closed = serve_with(api_key=("KEY",))
    with pytest.raises(library().AuthenticationError):
        client(closed).messages.create(**ASK)
    opened = library().Anthropic(base_url=closed.url, api_key="KEY", max_retries=0)
    assert opened.messages.create(**ASK).content
