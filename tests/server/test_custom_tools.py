"""Custom tools of chats and responses: their input as text, whole and in parts, and back in the conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from client_types import check_type
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from servers import QUESTION, Server

from phonograph.config.server_config import ServerConfig
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.server.chat.conversation import read_messages
from phonograph.server.chat.custom_tools import CustomInputs, custom_tool
from phonograph.server.chat.tools import ToolChoice, read_tools
from phonograph.server.http.api_errors import ApiError
from phonograph.server.http.json_meter import JsonMeter
from phonograph.text.formats.answer_parts import ToolDelta

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches"}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "temperature": 0}
FORCED = {"type": "custom", "custom": {"name": "patch"}}


def inputs_of(text: str, width: int, name: str = "patch") -> str:
    reader = CustomInputs({"patch"})
    pieces = [text[start : start + width] for start in range(0, len(text), width)]
    deltas = [ToolDelta(0, name=name), *(ToolDelta(0, piece) for piece in pieces)]
    found = [one for delta in deltas for one in reader.read([delta], ended=False)] + reader.read([], ended=True)
    assert found[0].name == name and all(one.custom == (name == "patch") for one in found)
    return "".join(one.arguments for one in found)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
def test_inputs_in_parts(width: int) -> None:
    for text in ("", "a", 'x "y" \\ \n\t/ \u20ac \U0001f600 {"input": "z"}', "\u2028\x7f"):
        for ascii_only in (True, False):
            arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
            assert inputs_of(arguments, width) == inputs_of(f" {arguments} ", width) == text
            assert inputs_of(arguments, width, "add") == arguments
    # Cut by max_tokens, within an escape too.
    assert inputs_of('{"input": "ab\\u20', width) == "ab"
    # Arguments of another form are not lost.
    assert inputs_of('{"text": "ab"}', width) == '{"text": "ab"}'


def test_several_calls() -> None:
    reader = CustomInputs({"patch"})
    calls = [ToolDelta(0, '{"x', "patch"), ToolDelta(1, '{"a": 1}', "add"), ToolDelta(2, '{"input":"b', "patch")]
    found = reader.read(calls, ended=False) + reader.read([ToolDelta(2, 'c"}')], ended=True)
    assert found == [
        *(ToolDelta(0, "", "patch", custom=True), ToolDelta(0, '{"x', custom=True), ToolDelta(1, '{"a": 1}', "add")),
        *(ToolDelta(2, "b", "patch", custom=True), ToolDelta(2, "c", custom=True)),
    ]


def test_tools_and_choices() -> None:
    choice = read_tools([ADD, PATCH], None, None)
    assert choice is not None and choice.custom == {"patch"} and choice.form == "parsed" and not choice.formed
    assert [tool["type"] for tool in choice.tools] == ["function", "function"] and choice.tools[1].keys() == {
        "type",
        "function",
    }
    named = read_tools([ADD, {**PATCH, "custom": {**PATCH["custom"], "format": GRAMMAR}}], FORCED, None)
    assert isinstance(named, ToolChoice) and named.function == "patch" and named.formed == {"patch"}
    assert named.is_raw and named.structured == StructuredOutputs(grammar="start: /a+/")
    assert "start: /a+/" in named.tools[1]["function"]["description"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FORCED]}}
    chosen = read_tools([ADD, PATCH], allowed, None)
    assert chosen is not None and [tool["function"]["name"] for tool in chosen.tools] == ["patch"]


@pytest.mark.parametrize(
    "tool",
    [
        *(None, "x", {}, {"name": ""}, {"name": 5}, {"name": "x", "description": 5}, {"name": "x", "parameters": {}}),
        *({"name": "x", "format": form} for form in ("text", [], {"type": "json"}, {"type": "grammar"})),
        {"name": "x", "format": {"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "x"}}},
        *(
            {"name": "x", "format": {"type": "grammar", "syntax": "lark", "definition": definition}}
            for definition in (5, "", "\ud800")
        ),
    ],
)
def test_wrong_tools(tool: Any) -> None:
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        custom_tool(tool, "tools[0]")


def test_calls_in_a_conversation() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    (read,) = read_messages([{"role": "assistant", "tool_calls": [call]}], JsonMeter(ServerConfig()))
    function = {"name": "patch", "arguments": {"input": "x"}}
    assert read["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    for wrong in ({"type": "custom"}, {"type": "custom", "custom": {"name": "x"}}, {"type": "custom", "custom": 5}):
        with pytest.raises(ApiError, match="custom"):
            read_messages([{"role": "assistant", "tool_calls": [wrong]}], JsonMeter(ServerConfig()))


@pytest.mark.parametrize("choice", [FORCED, "required"])
def test_chats(server: Server, choice: Any) -> None:
    body = {**CHAT, "tools": [PATCH], "tool_choice": choice}
    answer = server.post("/v1/chat/completions", body).json()
    call = ChatCompletion.model_validate(answer).choices[0].message.tool_calls[0]  # type: ignore[index]
    assert call.type == "custom" and call.custom.name == "patch"
    text = ""
    for line in server.post("/v1/chat/completions", {**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            # The types of the package know functions alone in chunks.
            for one in json.loads(line.removeprefix("data: "))["choices"]:
                text += "".join(part["custom"]["input"] for part in one["delta"].get("tool_calls", ()))
    assert text == call.custom.input
    results = [answer["choices"][0]["message"], {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = server.post("/v1/chat/completions", {**body, "messages": [*CHAT["messages"], *results]})
    assert again.status_code == 200


def test_responses(server: Server, serve_with: Callable[..., Server]) -> None:
    tool = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    body = {"input": QUESTION, "max_output_tokens": 60, "temperature": 0, "tools": [tool]}
    body["tool_choice"] = {"type": "custom", "name": "patch"}
    answer = server.post("/v1/responses", body)
    assert "warning" not in answer.headers
    (item,) = Response.model_validate(answer.json()).output
    assert item.type == "custom_tool_call" and item.name == "patch" and {*item.input} == {"a"}
    lines = server.post("/v1/responses", {**body, "stream": True}).text.split("\n")
    sent = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for event in sent:
        check_type(ResponseStreamEvent, event)
    check_type(Response, answer.json())
    check: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [check.validate_python(event) for event in sent]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == item.input
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    turns = [{"role": "user", "content": QUESTION}, answer.json()["output"][0], result]
    assert server.post("/v1/responses", {**body, "input": turns}).status_code == 200
    for wrong in ([result], [{"type": "custom_tool_call", "call_id": "x", "name": "y"}]):
        assert server.post("/v1/responses", {**body, "input": wrong}).status_code == 400


def input_of(answer: dict[str, Any]) -> str:
    """Return the input of the only call."""
    if "output" in answer:
        (item,) = answer["output"]
        return item["input"]
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return call["custom"]["input"]


def parts_of(stream: str) -> list[str]:
    """Return the parts of the input of a stream's only call."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n") if line.startswith("data: {")]
    if "type" in events[0]:
        return [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    calls = [one["delta"].get("tool_calls", ()) for event in events for one in event["choices"]]
    return [call["custom"]["input"] for some in calls for call in some]


@pytest.mark.parametrize(
    ("syntax", "definition"), [("lark", 'start: "{" /[ab]{2,5}/ "::=}"'), ("regex", r"^\{[ab]{2,5}::=\}$")]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_grammar_holds_the_input_of_a_forced_tool(server: Server, path: str, syntax: str, definition: str) -> None:
    def body(definition: str) -> dict[str, Any]:
        form = {"syntax": syntax, "definition": definition}
        if path == "/v1/responses":
            tool = {"type": "custom", "name": "patch", "format": {"type": "grammar", **form}}
            choice = {"type": "custom", "name": "patch"}
            return {"input": QUESTION, "max_output_tokens": 60, "tools": [tool], "tool_choice": choice}
        tool = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": form}}}
        return {**CHAT, "tools": [tool], "tool_choice": FORCED}

    asked = {**body(definition), "temperature": 0}
    answer = server.post(path, asked)
    assert answer.status_code == 200 and "warning" not in answer.headers
    assert re.fullmatch(r"\{[ab]{2,5}::=\}", input_of(answer.json()))
    parts = parts_of(server.post(path, {**asked, "stream": True}).text)
    assert len(parts) > 1 and "".join(parts) == input_of(answer.json())
    wrong = server.post(path, body("("))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tools"


def test_grammars_that_are_not_held_are_named(serve_with: Callable[..., Server]) -> None:
    for form, choice, syntax, is_told in (
        ("hermes", "auto", "lark", True),
        ("hermes", "required", "lark", True),
        ("hermes", "required", "regex", False),
        ("hermes", "auto", "regex", False),
        ("qwen3_coder", "auto", "lark", False),
    ):
        server = serve_with(tool_call_parser=form)
        grammar = {"syntax": syntax, "definition": "start: /a+/" if syntax == "lark" else "a+"}
        tool = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}}
        answer = server.post("/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": choice})
        told = '299 - "no effect: format of custom tools"' if is_told else None
        assert answer.status_code == 200 and answer.headers.get("warning") == told, (form, choice, syntax)
