"""POST /v1/responses: items in, items and events out, by OpenAI's own client and types."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from threading import Semaphore
from typing import Any

import httpx
import pydantic
import pytest
from chat_forms import CHAT_FORMS
from client_types import check_type
from found_parts import PARTS as BEGINNING
from found_parts import USAGE
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from scripted_engine import scripted_engine
from servers import QUESTION, Server

from phonograph.config.server_config import ServerConfig
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.server.http.api_errors import failed
from phonograph.server.responses.response_body import ResponseBody, response_request
from phonograph.server.responses.response_events import ResponseWriter
from phonograph.server.responses.response_input import sealed, unsealed
from phonograph.text.formats import find_formats
from phonograph.text.formats.answer_parts import Found, ToolDelta

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": None, "strict": None}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
HEAD: dict[str, Any] = {
    **{"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True},
    **{"tool_choice": "auto", "tools": []},
}
PARTS = [
    *BEGINNING,
    Found("Then"),
    Found(" this."),
]
KINDS = ["reasoning", "message", "function_call", "function_call", "message"]


def read(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against OpenAI's types."""
    events: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check_type(ResponseStreamEvent, event)
        events.append(event)
    return events


def check_order(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check numbers, indices and the nesting of items; return the last response."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    output: list[dict[str, Any]] = []
    inside: dict[str, Any] | None = None
    text = ""
    for event in events[2:-1]:
        kind = event["type"]
        assert event["output_index"] == len(output)
        if kind == "response.output_item.added":
            assert inside is None and event["item"]["status"] == "in_progress"
            inside, text = event["item"], ""
            continue
        assert inside is not None
        if kind == "response.output_item.done":
            assert event["item"]["id"] == inside["id"] and event["item"]["type"] == inside["type"]
            output.append(event["item"])
            inside = None
            continue
        assert event["item_id"] == inside["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == text
        elif kind.endswith("text.done"):
            assert event["text"] == text
        else:
            assert kind.startswith("response.content_part.") and event["content_index"] == 0
            assert event["part"]["text"] == text
    assert inside is None and events[-1]["response"]["output"] == output
    return events[-1]["response"]


def test_the_events_of_all_parts() -> None:
    writer = ResponseWriter(HEAD, seals=True)
    data = writer.begin(USAGE) + b"".join(writer.write(found, []) for found in PARTS) + writer.end("stop", None, USAGE)
    response = check_order(read(data))
    output = response["output"]
    assert [item["type"] for item in output] == KINDS
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert unsealed(output[0]["encrypted_content"]) == "I think."
    assert output[1]["content"][0]["text"] == "Let me." and output[4]["content"][0]["text"] == "Then this."
    assert [(item["name"], item["arguments"]) for item in output[2:4]] == [("add", '{"a": 1}'), ("now", "{}")]
    assert len({item["call_id"] for item in output[2:4]}) == 2 and {item["status"] for item in output} == {"completed"}
    assert response["status"] == "completed" and response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 16,
    }


def nameless(value: Any) -> Any:
    """Return a response without what differs from one to the next."""
    if isinstance(value, dict):
        return {key: nameless(one) for key, one in value.items() if key not in ("id", "call_id", "completed_at")}
    return [nameless(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_of_any_pieces_is_the_whole_answer(seed: int) -> None:
    """Pieces of the parts before the second call; later text would be in another place of a whole answer."""
    rng, parts = random.Random(seed), PARTS[:6]
    writer = ResponseWriter(HEAD)
    writer.begin(USAGE)
    for found in parts:
        for text in cut(rng, found.reasoning):
            writer.write(Found(reasoning=text), [])
        for text in cut(rng, found.content):
            writer.write(Found(text), [])
        for call in found.calls:
            if call.name is not None:
                writer.write(Found(calls=[ToolDelta(call.index, "", call.name)]), [])
            for text in cut(rng, call.arguments):
                writer.write(Found(calls=[ToolDelta(call.index, text)]), [])
    streamed = read(writer.end("length", None, USAGE))[-1]["response"]
    whole = Found("".join(one.content for one in parts), [call for one in parts for call in one.calls], "I think.")
    found = ResponseWriter(HEAD).whole(whole, [], "length", None, USAGE)
    check_type(Response, found)
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    text = whole.content
    assert found["output"][1]["content"][0]["text"] == text and text.rstrip() == "Let me."
    found["output"][1]["content"][0]["text"] = text.rstrip()
    assert nameless(found) == nameless(streamed)


def cut(rng: random.Random, text: str) -> Iterator[str]:
    while text:
        size = rng.choice([1, 2, 5])
        yield text[:size]
        text = text[size:]


def test_the_last_item_of_a_truncated_answer_is_incomplete() -> None:
    writer = ResponseWriter(HEAD)
    data = writer.begin(USAGE) + writer.write(Found("Hi", [ToolDelta(0, '{"a', "add")]), [])
    *_, last = read(data + writer.end("length", None, USAGE))
    assert last["type"] == "response.incomplete"
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_an_error_within_a_stream() -> None:
    writer = ResponseWriter(HEAD)
    data = writer.begin(USAGE) + writer.write(Found("Hi"), []) + writer.error(failed("it failed", code="x"))
    last = read(data)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it failed"}


def request_of(**fields: Any) -> Any:
    body = ResponseBody.model_validate({"input": "Hi", **fields})
    body.check()
    return response_request(body, ServerConfig())


def test_items_become_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"type": "message", "role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": []},
        CALL,
        {**CALL, "call_id": "c2", "name": "now", "arguments": ""},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed("Thus é.")},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        USER,
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("c1", "add", {"a": 1}), ("c2", "now", {}))
    ]
    assert request_of(input=items, instructions="Be kind.").messages == [
        {"role": "system", "content": "Be kind.\n\nBe short."},
        {"role": "user", "content": "One\n\na\nb"},
        {
            **{"role": "assistant", "content": "", "reasoning": "So.", "reasoning_content": "So."},
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "name": "now", "content": "noon"},
        {"role": "assistant", "content": "Two", "reasoning": "Thus é.", "reasoning_content": "Thus é."},
        {"role": "user", "content": "Hi"},
    ]


def test_fields_become_parts_of_the_request() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    found = request_of(
        text={"format": form},
        reasoning={"effort": "high"},
        tools=[TOOL, NOW],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        parallel_tool_calls=False,
        max_output_tokens=5,
        temperature=0.5,
        seed=3,
        logit_bias={"7": 1.5},
        stop_token_ids=[9],
        ignore_eos=True,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    structured = found.sampling["structured_outputs"]
    assert structured.json == json.dumps(SCHEMA) or structured.json == SCHEMA
    assert {name: found.sampling[name] for name in ("temperature", "seed", "logprobs")} == {
        **{"temperature": 0.5, "seed": 3, "logprobs": 2}
    }
    others = {"logit_bias": {7: 1.5}, "stop_token_ids": [9], "ignore_eos": True}
    assert {name: found.sampling[name] for name in others} == others
    assert found.thinking.effort == "high" and found.max_tokens == 5 and not found.tools.parallel
    assert [tool["function"]["name"] for tool in found.tools.tools] == ["now"]
    named = request_of(tools=[TOOL], tool_choice={"type": "function", "name": "add"}).tools
    assert (named.form, named.function) == ("named", "add")
    assert request_of(tools=[TOOL], tool_choice="required").sampling["structured_outputs"] is not None
    assert request_of(tools=[TOOL], tool_choice="none").tools is None
    assert request_of(text={"format": {"type": "text"}, "verbosity": "low"}).sampling == {}
    assert request_of(text={"format": {"type": "json_object"}}).sampling["structured_outputs"].json_object


JSON = {"type": "json_object"}
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": 5}, "input", "a string or a list"),
    ({"input": []}, "input", "a string or a list"),
    ({"input": ["Hi"]}, "input", "each an object"),
    ({"input": [{}]}, "input[0]", "items of type 'None'"),
    ({"input": [{"type": []}]}, "input[0]", "items of type '[]'"),
    ({"input": [{"role": "boss", "content": ""}]}, "input[0].role", "must be one of"),
    ({"input": [{"role": ["user"], "content": ""}]}, "input[0].role", "must be one of"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0]", "reads text"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "a string"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "send the item itself, or previous"),
    ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call' are not supported"),
    ({"input": [OUTPUT, CALL]}, "input[0].call_id", "an earlier function_call"),
    ({"input": [CALL, {**OUTPUT, "call_id": "c2"}]}, "input[1].call_id", "call_id='c2'"),
    ({"input": [CALL, {**OUTPUT, "call_id": ["c1"]}]}, "input[1].call_id", "an earlier function_call"),
    ({"input": [CALL, {**OUTPUT, "output": None}]}, "input[1].output", "is missing"),
    ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments", "the JSON text of an object"),
    ({"input": [{**CALL, "arguments": [1]}]}, "input[0].arguments", "the JSON text of an object"),
    ({"input": [{**CALL, "name": None}]}, "input[0].name", "needs a name"),
    ({"input": [{**CALL, "call_id": 5}]}, "input[0].call_id", "needs a call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content", "another server"),
    ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content", "another server"),
    ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input[0].content[0]", "'x' are not supported"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "Response with id 'resp_1' not found."),
    ({"conversation": "conv_1"}, "conversation", "only responses are stored"),
    ({"prompt": {"id": "p"}}, "prompt", "only responses are stored"),
    ({"background": True, "store": False}, "background", "background can only be used when `store` is true"),
    ({"background": True, "stream": True}, "background", "background with stream is not supported"),
    ({"truncation": "auto"}, "truncation", "only disabled"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "tools of type 'web_search' are not supported"),
    ({"tools": [TOOL, {"type": "custom"}]}, "tools[1]", "a custom tool with a name"),
    ({"tools": ["add"]}, "tools[0]", "an object with a type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "needs a name"),
    ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", "must be a dict"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0]", "unknown key 'defer_loading'"),
    ({"tools": [TOOL, TOOL]}, "tools", "the same name"),
    ({"tools": [TOOL, {"type": "file_search"}]}, "tools[1]", "tools of type 'file_search' are not supported"),
    ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools[0].name", "a namespace needs a name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "must be a list"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]}, "tools[0].tools[0]", "type 'x'"),
    ({"input": [{**CALL, "namespace": 5}]}, "input[0].namespace", "must be a string"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice", "function, custom or allowed_tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among the tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": "required", "text": {"format": JSON}}, "tool_choice", "text.format"),
    ({"tools": [TOOL]}, "tool_choice", "which its chat template does not show"),
    ({"tools": [{**TOOL, "parameters": {"not": {}}}], "tool_choice": "required"}, "tools", "cannot be enforced"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regex": "a"}, "text": {"format": JSON}}, "structured_outputs", "contradicts text.format"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "not supported"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", "must be text, json_object or json_schema"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "a name and a schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format", "cannot be"),
    ({"text": {"format": 5}}, "text.format", "an object with a type"),
    ({"text": {"colour": 1}}, "text.colour", "unknown field"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "must be one of"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort", "must be a string"),
    ({"reasoning": {"budget": 5}}, "reasoning.budget", "unknown field"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "--reasoning-parser"),
    ({"include": ["x"]}, "include", "is not among"),
    ({"include": [["x"]]}, "include", "is not among"),
    ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20 at most"),
    ({"top_logprobs": -1, "include": ["message.output_text.logprobs"]}, "top_logprobs", "top_logprobs=-1"),
    ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ({"max_output_tokens": 1024}, "max_output_tokens", "context holds 1024"),
    ({"input": "Hi " * 3000}, "input", "more than 1024 tokens"),
    ({"temperature": -1}, "temperature", "temperature=-1"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"metadata": {"a": "\ud800"}}, None, ""),
    ({"tools": [{**TOOL, "description": "\ud800"}], "tool_choice": "none"}, None, "not valid JSON in UTF-8"),
    ({"stream_options": {}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ({"messages": []}, "messages", "no such field"),
    ({"model": "gpt-5"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("body", "param", "says"), WRONG)
def test_refusals_name_the_field(server: Server, body: dict[str, Any], param: str | None, says: str) -> None:
    content = json.dumps({"input": "Hi", **body}).encode()
    answer = httpx.post(f"{server.url}/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert says in error["message"] and (param is None or error["param"] == param)


def test_fields_without_effect_are_named(server: Server) -> None:
    fields: dict[str, Any] = {
        **{"user": "me", "client_metadata": {"a": "b"}, "max_tool_calls": 3, "prompt_cache_key": "x"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    }
    answer = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1, **fields})
    assert answer.status_code == 200 and answer.json()["store"] is True
    for name in (*("user", "client_metadata", "max_tool_calls", "prompt_cache_key", "reasoning.summary"),):
        assert name in answer.headers["warning"]
    assert "reasoning.effort" in answer.headers["warning"] and "web_search_call" in answer.headers["warning"]
    neutral = {"store": False, "background": False, "truncation": "disabled", "previous_response_id": None}
    assert "warning" not in server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1, **neutral}).headers


def test_openais_client(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0, "metadata": {"a": "b"}}
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    response = client.responses.create(**asked)
    assert response.output_text == chat.json()["choices"][0]["message"]["content"]
    assert response.status == "completed" and response.metadata == {"a": "b"} and response.temperature == 0
    assert response.usage is not None and response.usage.total_tokens == chat.json()["usage"]["total_tokens"]
    Response.model_validate(response.model_dump())
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == response.output_text
    cut = client.responses.create(**{**asked, "max_output_tokens": 3})
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    answer = server.post("/v1/responses", {**asked, "stream": True, "include": ["message.output_text.logprobs"]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = check_order(read(answer.content))
    (part,) = found["output"][0]["content"]
    assert "".join(one["token"] for one in part["logprobs"]).startswith(response.output_text)
    # The last turn answers the question about the first one.
    again = [{"role": "user", "content": QUESTION}, *response.output, {"role": "user", "content": QUESTION}]
    assert client.responses.create(**{**asked, "input": again}).output_text


def test_each_step_is_an_event() -> None:
    """The engine makes a step when the client has the text of the one before."""
    steps, deltas = Semaphore(), list[str]()
    text = "".join(f"{number:04} " for number in range(7))  # five tokens each
    with scripted_engine(
        lambda _: text, form=CHAT_FORMS["llama3"], before_step=lambda: steps.acquire(timeout=20)
    ) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        with client.responses.stream(model="scripted", input="Count.") as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
                    steps.release()
    assert len(deltas) == 7 and "".join(deltas) == text


class Numbers(pydantic.BaseModel):
    """Form of an answer."""

    a: bool
    b: bool


def test_forms_and_forced_calls(server: Server) -> None:
    client = server.client()
    parsed = client.responses.parse(model="demo", input=QUESTION, text_format=Numbers)
    assert isinstance(parsed.output_parsed, Numbers)
    for choice in ("required", {"type": "function", "name": "add"}):
        asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "tools": [TOOL], "tool_choice": choice}
        asked["parallel_tool_calls"] = False
        (call,) = client.responses.create(**asked).output
        assert call.type == "function_call" and json.loads(call.arguments)["a"] in (1, 2)
        answer = server.post("/v1/responses", {**asked, "stream": True})
        (item,) = check_order(read(answer.content))["output"]
        assert json.loads(item["arguments"])["a"] in (1, 2) and item["name"] == "add"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        asked |= {"input": [{"role": "user", "content": QUESTION}, call, result], "tool_choice": "none"}
        assert client.responses.create(**asked).output_text


START, END = "<|user|>", "<|system|>"
TURNS = "{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}<|assistant|>"


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(find_formats._MARKERS, "qwen3", (START, END))  # type: ignore[index]


@pytest.mark.usefixtures("thinking")
def test_reasoning_comes_first_and_returns(serve_with: Callable[..., Server]) -> None:
    seen = "{% for message in messages %}[{{ message.reasoning or '' }}]{% endfor %}" + TURNS + START
    server = serve_with(chat_template=seen, reasoning_parser="qwen3")
    body = {"input": QUESTION, "temperature": 0, "thinking_token_budget": 7, "max_output_tokens": 60}
    whole = server.post("/v1/responses", {**body, "include": ["reasoning.encrypted_content"]}).json()
    reasoning, message = whole["output"]
    assert reasoning["type"] == "reasoning" and message["type"] == "message" and message["content"][0]["text"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 7}
    streamed = check_order(read(server.post("/v1/responses", {**body, "stream": True}).content))
    assert nameless(streamed["output"][1]) == nameless(message)
    assert streamed["output"][0]["content"] == reasoning["content"]
    assert streamed["output"][0]["encrypted_content"] is None
    # As Codex sends it: without the text.
    again = [{"role": "user", "content": QUESTION}, {**reasoning, "content": None}, message, USER]
    text = reasoning["content"][0]["text"]
    ids = [server.post("/tokenize", {"prompt": one}).json()["count"] for one in (f"[{text}]", "[]")]
    num_prompt = [
        server.post("/v1/responses", {**body, "input": items}).json()["usage"]["input_tokens"]
        for items in (again, [again[0], *again[2:]])
    ]
    assert num_prompt[0] - num_prompt[1] == ids[0] - ids[1]


def test_calls_of_the_model(serve_with: Callable[..., Server]) -> None:
    text = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text += '\n<tool_call>{"name": "now"}</tool_call>'
    defaults = {"structured_outputs": StructuredOutputs(choice=[text])}
    server = serve_with(defaults, chat_template="{# <tool_call> #}" + TURNS)
    body = {"input": QUESTION, "tools": [{**TOOL, "strict": False}, NOW], "max_output_tokens": 200}
    whole = server.post("/v1/responses", body).json()
    streamed = check_order(read(server.post("/v1/responses", {**body, "stream": True}).content))
    for found in (whole, streamed):
        message, *calls = found["output"]
        assert message["content"][0]["text"] == "I add. "
        assert [(call["name"], call["arguments"]) for call in calls] == [("add", '{"a": 1}'), ("now", "{}")]
        assert found["tools"] == body["tools"] and found["tool_choice"] == "auto"
    off = server.post("/v1/responses", {**body, "tool_choice": "none"}).json()
    assert [item["type"] for item in off["output"]] == ["message"] and off["output"][0]["content"][0]["text"] == text
