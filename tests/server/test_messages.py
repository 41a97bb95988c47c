"""POST /v1/messages: Anthropic's blocks in, blocks and events out, and errors in its form."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from client_types import check_type
from found_parts import PARTS, USAGE
from servers import QUESTION, Server

from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.server.http.api_errors import failed
from phonograph.server.messages.message_body import MessageBody, message_request
from phonograph.server.messages.message_events import SIGNATURE, MessageWriter
from phonograph.text.formats import find_formats
from phonograph.text.formats.answer_parts import Found, ToolDelta


def library() -> Any:
    """Import the client when a test needs it: most workers run none of these tests."""
    return pytest.importorskip("anthropic", reason="needs anthropic of the extra dev")


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL: dict[str, Any] = {"name": "add", "description": "Adds", "input_schema": SCHEMA}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "temperature": 0}


def read(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    events: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        # Clients know `ping` without a type, and raise at `error`.
        if events[-1]["type"] not in ("ping", "error"):
            check_type(library().types.RawMessageStreamEvent, events[-1])
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream make, and check their order."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, inside, pieces = events[0]["message"], None, ""
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert inside is None and event["index"] == len(message["content"])
            inside, pieces = event["content_block"], ""
            continue
        assert inside is not None and event["index"] == len(message["content"])
        if kind == "content_block_stop":
            if inside["type"] == "tool_use":
                inside["input"] = json.loads(pieces or "{}")
            message["content"].append(inside)
            inside = None
            continue
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            pieces += delta["partial_json"]
        else:
            key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
            inside[key] += delta[key]
    assert inside is None
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def nameless(value: Any) -> Any:
    """Return a message without its ids."""
    if isinstance(value, dict):
        return {key: nameless(one) for key, one in value.items() if key != "id"}
    return [nameless(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(4))
def test_the_events_of_all_parts(seed: int) -> None:
    rng, writer = random.Random(seed), MessageWriter("msg_1", "m")
    data = writer.begin(USAGE)
    for found in PARTS:
        pieces = [Found(found.content, found.calls, found.reasoning)]
        if found.content and rng.random() < 0.5:
            pieces = [Found(found.content), Found("", found.calls)]
        data += b"".join(writer.write(piece, []) for piece in pieces)
    streamed = message_of(read(data + writer.end("stop", None, USAGE)))
    whole = Found("Let me.", [call for one in PARTS for call in one.calls], "I think.")
    found = MessageWriter("msg_1", "m").whole(whole, [], "stop", None, USAGE)
    check_type(library().types.Message, found)
    assert nameless(found) == nameless(streamed)
    thinking, text, *calls = found["content"]
    assert thinking == {"type": "thinking", "thinking": "I think.", "signature": SIGNATURE}
    assert text == {"type": "text", "text": "Let me."}
    assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 1}), ("now", {})]
    assert len({call["id"] for call in calls}) == 2 and found["stop_reason"] == "tool_use"
    assert found["usage"] == {
        **{"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3, "output_tokens": 9},
        "output_tokens_details": {"thinking_tokens": 4},
    }


@pytest.mark.parametrize(
    ("reason", "stop", "is_cut", "expected"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("stop", 5, False, ("end_turn", None)),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
    ],
)
def test_reasons_of_the_end(reason: Any, stop: Any, is_cut: bool, expected: tuple[str, str | None]) -> None:
    found = MessageWriter("msg_1", "m", is_cut=is_cut).whole(Found("Hi"), [], reason, stop, USAGE)
    assert (found["stop_reason"], found["stop_sequence"]) == expected


@pytest.mark.parametrize(
    ("text", "found"), [('{"a": [1, {"b": "x', {"a": [1, {}]}), ("", {}), ("nonsense", {}), ("[1", {})]
)
def test_arguments_that_are_cut(text: str, found: dict[str, Any]) -> None:
    writer = MessageWriter("msg_1", "m")
    message = writer.whole(Found("", [ToolDelta(0, text, "add")]), [], "length", None, USAGE)
    assert message["content"][0]["input"] == found and message["stop_reason"] == "max_tokens"


def test_an_error_within_a_stream() -> None:
    writer = MessageWriter("msg_1", "m")
    data = writer.begin(USAGE) + writer.write(Found("Hi"), []) + writer.error(failed("it failed", code="x"))
    assert read(data)[-1] == {"type": "error", "error": {"type": "api_error", "message": "it failed"}}


def test_turns_become_messages() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "So.", "signature": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]},
                {**result, "tool_use_id": "t2", "content": "broken", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "assistant", "content": "Two"},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
        {"role": "user", "content": [result]},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("t1", "add", {"a": 1}), ("t2", "now", {}))
    ]
    body = MessageBody.model_validate(
        {"messages": turns, "max_tokens": 5, "system": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}
    )
    assert message_request(body).messages == [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "a\n\nb"},
        {
            **{"role": "assistant", "content": "I add.", "reasoning": "So.", "reasoning_content": "So."},
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "2\n3"},
        {"role": "tool", "tool_call_id": "t2", "name": "now", "content": "Error: broken"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Two\n\nthree"},
        {"role": "tool", "tool_call_id": "t1", "name": "add", "content": ""},
    ]


def request_of(**fields: Any) -> Any:
    body = MessageBody.model_validate({"messages": [USER], "max_tokens": 5, **fields})
    body.check()
    return message_request(body)


def test_fields_become_parts_of_the_request() -> None:
    found = request_of(
        stop_sequences=["END"],
        top_k=5,
        tools=[{**TOOL, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}, NOW],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        output_config={"effort": "max"},
        chat_template_kwargs={"x": 1},
    )
    assert found.thinking.variables == {"x": 1}
    assert found.sampling == {"stop": ["END"], "top_k": 5} and found.max_tokens == 5 and found.cuts
    function = {"name": "add", "description": "Adds", "strict": True, "parameters": SCHEMA}
    assert found.tools.tools[0] == {"type": "function", "function": function}
    assert found.tools.form == "parsed" and not found.tools.parallel and not found.continues
    thinking = found.thinking
    assert (thinking.effort, thinking.enabled, thinking.shown, thinking.budget) == ("max", True, False, 1024)
    off = request_of(thinking={"type": "disabled"}, output_config={"effort": "max"}).thinking
    assert (off.effort, off.enabled, off.shown, off.budget) == (None, False, True, None)
    assert request_of(thinking={"type": "adaptive"}).thinking.enabled and request_of().thinking.enabled is None
    forced = request_of(tools=[TOOL], tool_choice={"type": "tool", "name": "add"})
    assert (forced.tools.form, forced.tools.function) == ("named", "add")
    assert request_of(tools=[TOOL], tool_choice={"type": "any"}).sampling["structured_outputs"] is not None
    assert request_of(tools=[TOOL], tool_choice={"type": "none"}).tools is None
    form = {"type": "json_schema", "schema": SCHEMA}
    assert request_of(output_config={"format": form}).sampling["structured_outputs"].json is not None
    assert request_of(messages=[USER, {"role": "assistant", "content": "So"}]).continues


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages: must be a list of one message or more"),
    ({"messages": []}, "messages: must be a list of one message or more"),
    ({"messages": [{"role": "tool", "content": ""}]}, "role must be user, assistant or system"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "role must be user, assistant or system"),
    ({"messages": [{"role": "user"}]}, "content must be a string or a list of blocks"),
    ({"messages": [{**USER, "name": "x"}]}, "unknown key 'name' in a message"),
    (user(5), "a block must be an object with a type"),
    (user({"type": "text"}), "the text of a block must be a string"),
    (user({"type": "image", "source": {}}), "blocks of type 'image' are not supported here"),
    (user(USE), "blocks of type 'tool_use' are not supported here"),
    (user(RESULT), "tool_use_id='t1' is not that of an earlier tool_use block"),
    (user({**RESULT, "tool_use_id": ["t1"]}), "is not that of an earlier tool_use block"),
    (
        {"messages": [USER, {"role": "assistant", "content": [RESULT]}]},
        "blocks of type 'tool_result' are not supported",
    ),
    ({"messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}, USER]}, "must be an object"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "id": None}]}, USER]}, "needs a id"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "send their results as tool_result blocks"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]},
        "'redacted_thinking' are not supported",
    ),
    ({"system": [{"type": "image"}]}, "parts of type 'image' are not supported"),
    ({"system": 5}, "system"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"temperature": -1}, "temperature=-1"),
    ({"stop_sequences": [5]}, "stop_sequences: must be a string or a list of strings"),
    ({"stop_sequences": ["x"] * 65}, "takes 64 at most (max_request_stops)"),
    ({"tools": [5]}, "tools[0] must be an object"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools of type 'web_search_20250305'"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "input_schema of a function must be a dict"),
    ({"tools": [{**TOOL, "parameters": {}}]}, "unknown key 'parameters' in a function"),
    ({"tools": [TOOL]}, "tool_choice auto needs the form of the model's calls"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "must be auto, any, tool or none"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "an object that names a function"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "not among the tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"thinking": {"type": "between_tools"}}, "must be enabled, disabled, adaptive"),
    ({"thinking": {"type": ["enabled"]}}, "must be enabled, disabled, adaptive"),
    ({"thinking": {"type": "enabled", "budget_tokens": "5"}}, "budget_tokens must be an integer"),
    ({"thinking": {"type": "enabled", "effort": 5}}, "unknown key 'effort' in thinking"),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "must be summarized or omitted"),
    ({"output_config": {"effort": "much"}}, "output_config.effort='much' must be one of"),
    ({"output_config": {"effort": 5}}, "output_config.effort must be a string"),
    ({"output_config": {"form": 5}}, "unknown key 'form' in output_config"),
    ({"output_config": {"format": {"type": "json"}}}, "must have the type json_schema and a schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "cannot be compiled"),
    ({"container": "x"}, "container is not supported by this server"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported by this server"),
    ({"logprobs": 5}, "unknown field 'logprobs'"),
    ({"messages": [{**USER, "content": "Hi " * 3000}]}, "prompt is too long: messages has more than 1024 tokens"),
]


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error" and body["error"].keys() == {"type", "message"}
    return body["error"]


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_refusals_in_anthropics_form(server: Server, body: dict[str, Any], says: str) -> None:
    error = error_of(server.post("/v1/messages", {"messages": [USER], "max_tokens": 5, **body}))
    assert error["type"] == "invalid_request_error" and says in error["message"]


def test_errors_of_each_layer_have_the_form(server: Server, serve_with: Callable[..., Server]) -> None:
    found = error_of(server.post("/v1/messages", {"messages": [USER], "max_tokens": 5, "model": "claude"}), 404)
    assert found["type"] == "not_found_error" and "'claude' does not exist" in found["message"]
    assert error_of(server.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error_of(server.post("/v1/messages/batches", {}), 404)["type"] == "not_found_error"
    assert "not JSON" in error_of(httpx.post(f"{server.url}/v1/messages", content=b"{"))["message"]
    small = serve_with(max_request_bytes=100)
    assert error_of(small.post("/v1/messages", {"x": "y" * 200}), 413)["type"] == "request_too_large"
    closed = serve_with(api_key=("KEY",))
    for headers in ({}, {"x-api-key": "other"}, {"authorization": "KEY"}):
        answer = closed.post("/v1/messages", ASK, headers=headers)
        assert error_of(answer, 401)["type"] == "authentication_error"
    for headers in ({"x-api-key": "KEY"}, {"authorization": "Bearer KEY"}):
        assert closed.post("/v1/messages", {**ASK, "max_tokens": 1}, headers=headers).status_code == 200
    assert closed.get("/v1/models", headers={"x-api-key": "KEY"}).status_code == 200


def test_an_answer_and_its_stream_are_those_of_the_chat(server: Server) -> None:
    chat = server.post("/v1/chat/completions", ASK).json()
    text = chat["choices"][0]["message"]["content"]
    whole = server.post("/v1/messages", ASK).json()
    answer = server.post("/v1/messages?beta=true", {**ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    streamed = message_of(read(answer.content))
    for found in (whole, streamed):
        assert found["content"] == [{"type": "text", "text": text}] and found["stop_reason"] == "end_turn"
        usage = found["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert server.post("/v1/messages/count_tokens", {"messages": ASK["messages"]}).json() == {
        "input_tokens": chat["usage"]["prompt_tokens"]
    }
    salted = [server.post("/v1/messages", {**ASK, "cache_salt": salt}).json()["usage"] for salt in ("a", "b", "a")]
    assert [usage["cache_read_input_tokens"] > 0 for usage in salted] == [False, False, True]
    stopped = server.post("/v1/messages", {**ASK, "stop_sequences": ["####"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "####")
    # An answer that continues the last message.
    begun = [*ASK["messages"], {"role": "assistant", "content": text[:8]}]
    assert server.post("/v1/messages", {**ASK, "messages": begun}).json()["content"][0]["text"] == text[8:]
    cut = server.post("/v1/messages", {**ASK, "max_tokens": 3}).json()
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3
    # More tokens than the context has are no error.
    filled = server.post("/v1/messages", {**ASK, "max_tokens": 32_000})
    assert filled.json()["content"] == whole["content"]
    long = {**ASK, "messages": [{"role": "user", "content": "one " * 500}], "max_tokens": 32_000}
    long["temperature"] = 2
    found = server.post("/v1/messages", long).json()
    assert found["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_fields_without_effect_are_named(server: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        **{"messages": [USER], "max_tokens": 1, "metadata": {"user_id": "x"}, "context_management": {"edits": []}},
        **{"system": [{"type": "text", "text": "x", **cached}], "thinking": {"type": "enabled", "budget_tokens": 5}},
        "tools": [{**TOOL, "eager_input_streaming": True}],
        "tool_choice": {"type": "none"},
    }
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    names = "metadata, context_management, cache_control, tools.eager_input_streaming, thinking"
    assert answer.headers["warning"] == f'299 - "no effect: {names}"'
    assert "warning" not in server.post("/v1/messages", {"messages": [USER], "max_tokens": 1}).headers


def test_forced_calls_and_forms(server: Server) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}):
        body = {**ASK, "tools": [TOOL], "tool_choice": choice}
        streamed = message_of(read(server.post("/v1/messages", {**body, "stream": True}).content))
        for found in (server.post("/v1/messages", body).json(), streamed):
            (call,) = found["content"]
            assert call["name"] == "add" and call["input"]["a"] in (1, 2) and found["stop_reason"] == "tool_use"
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    (text,) = server.post("/v1/messages", {**ASK, "output_config": form}).json()["content"]
    assert json.loads(text["text"])["a"] in (1, 2)


START, END = "<|user|>", "<|system|>"
TURNS = "{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}<|assistant|>"
SWITCHED = TURNS + "{% if enable_thinking is false %}<|user|><|system|>{% else %}<|user|>{% endif %}"


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(find_formats._MARKERS, "qwen3", (START, END))  # type: ignore[index]


@pytest.mark.usefixtures("markers")
def test_thinking(serve_with: Callable[..., Server]) -> None:
    server = serve_with(chat_template=SWITCHED, reasoning_parser="qwen3")
    body = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 7}}
    whole = server.post("/v1/messages", body)
    thinking, text = whole.json()["content"]
    assert thinking["thinking"] and text["text"] and "warning" not in whole.headers
    assert whole.json()["usage"]["output_tokens_details"] == {"thinking_tokens": 7}
    streamed = message_of(read(server.post("/v1/messages", {**body, "stream": True}).content))
    assert streamed["content"] == whole.json()["content"]
    for stream in (True, False):
        answer = server.post(
            "/v1/messages", {**body, "thinking": {**body["thinking"], "display": "omitted"}, "stream": stream}
        )
        hidden = message_of(read(answer.content)) if stream else answer.json()
        assert hidden["content"] == [text]
    (plain,) = server.post("/v1/messages", {**ASK, "thinking": {"type": "disabled"}}).json()["content"]
    assert plain["type"] == "text"
    fixed = serve_with(chat_template=TURNS + START, reasoning_parser="qwen3")
    error = error_of(fixed.post("/v1/messages", {**ASK, "thinking": {"type": "disabled"}}))
    assert "cannot turn its reasoning off" in error["message"]


def test_calls_of_the_model(serve_with: Callable[..., Server]) -> None:
    text = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text += '\n<tool_call>{"name": "now"}</tool_call>'
    defaults = {"structured_outputs": StructuredOutputs(choice=[text])}
    server = serve_with(defaults, chat_template="{# <tool_call> #}" + TURNS)
    body = {**ASK, "tools": [TOOL, NOW], "max_tokens": 200}
    whole = server.post("/v1/messages", body).json()
    streamed = message_of(read(server.post("/v1/messages", {**body, "stream": True}).content))
    assert (
        nameless(whole["content"])
        == nameless(streamed["content"])
        == [
            {"type": "text", "text": "I add. "},
            {"type": "tool_use", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "name": "now", "input": {}},
        ]
    )
    assert whole["stop_reason"] == streamed["stop_reason"] == "tool_use"
    ids = [block["id"] for block in whole["content"][1:]]
    results = [{"type": "tool_result", "tool_use_id": name, "content": "2"} for name in ids]
    again = [
        *body["messages"],
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": results},
    ]
    assert server.post("/v1/messages", {**body, "messages": again}).status_code == 200
