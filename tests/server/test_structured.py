"""Structured output and forced tool calls through OpenAI's client."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI
from servers import QUESTION, Server

ASK: Any = [{"role": "user", "content": QUESTION}]
BODY: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 300, "seed": 1}
SCHEMA: Any = {
    "type": "object",
    "properties": {"apples": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"$ref": "#/$defs/who"}},
    "required": ["apples", "of"],
    "additionalProperties": False,
    "$defs": {"who": {"enum": ["Tom", "Ann"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_of_a_schema(client: OpenAI, strict: bool | None) -> None:
    about = {"name": "apples", "schema": SCHEMA, "strict": strict}
    answer = client.chat.completions.create(**BODY, response_format={"type": "json_schema", "json_schema": about})  # pyright: ignore
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_the_other_fields(server: Server) -> None:
    fields: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "[0-9]{2} apples"}, "[0-9]{2} apples"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"], "n": 2}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, r"\{.*\}"),
        ({"guided_json": {"const": 1}}, "1"),
        ({"response_format": {"type": "text"}, "max_tokens": 3}, ".*"),
    ]
    for given, pattern in fields:
        answer = server.post("/v1/completions", {"prompt": "Tom", "max_tokens": 200, "seed": 1, **given})
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert re.fullmatch(pattern, choice["text"], re.DOTALL), (given, choice)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_without_a_way_on_is_the_fault_of_its_request(server: Server, stream: bool) -> None:
    """Found with a request beside it, which goes on; a stream has long begun by then, so an event says it."""
    fine = {"prompt": "Tom", "max_tokens": 200, "ignore_eos": True, "n": 2}
    grammar = f'start: "{"ab" * 40}" never\nnever: never "x"'
    dead = {"prompt": "Tom", "guided_grammar": grammar, "max_tokens": 200, "n": 2, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.post, "/v1/completions", fine)
        answer = server.post("/v1/completions", dead)
    assert answer.status_code == (200 if stream else 400)
    if stream:
        *_, last, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: ") if stream else answer.text)["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == "guided_grammar"
    assert "no token can follow" in error["message"]
    assert [choice["finish_reason"] for choice in beside.result().json()["choices"]] == ["length"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_that_cannot_be_enforced_are_refused_or_named_in_a_warning(server: Server, stream: bool) -> None:
    schema = {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True, "minItems": 1, "maxItems": 9}
    either = {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}
    body = {"prompt": "Tom", "max_tokens": 99, "guided_json": schema, "stream": stream}
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400 and "uniqueItems cannot be enforced" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "guided_json"
    taken = server.post("/v1/completions", {**body, "structured_outputs_strictness": "relaxed", "user": "x"})
    assert taken.status_code == 200
    assert taken.headers["warning"] == '299 - "no effect: user", 299 - "uniqueItems cannot be enforced"'
    taken = server.post("/v1/completions", {**body, "guided_json": either})
    assert taken.status_code == 200 and taken.headers["warning"] == '299 - "oneOf is treated as anyOf"'


def test_any_json_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(**{**BODY, "max_tokens": 8}, response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_forced_calls(client: OpenAI, stream: bool, named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "count"}} if named else "required"
    answer: Any = client.chat.completions.create(
        **{**BODY, "max_tokens": 600}, tools=TOOLS, tool_choice=choice, stream=stream, parallel_tool_calls=False
    )
    names: list[str] = []
    arguments: list[str] = []
    if stream:
        parts = [one for chunk in answer for one in chunk.choices]
        reason = parts[-1].finish_reason
        for part in parts:
            assert not part.delta.content
            for call in part.delta.tool_calls or []:
                if call.id:
                    names.append(call.function.name)
                    arguments.append("")
                arguments[call.index] += call.function.arguments
    else:
        (only,) = answer.choices
        reason = only.finish_reason
        assert only.message.content is None
        names = [call.function.name for call in only.message.tool_calls]
        arguments = [call.function.arguments for call in only.message.tool_calls]
    assert reason == ("stop" if named else "tool_calls") and names
    for name, text in zip(names, arguments, strict=True):
        if name == "count":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert name == "now" and isinstance(json.loads(text), dict)


PARTS: Any = [
    {"type": "object", "properties": {key: {"const": 1}}, "required": [key], "additionalProperties": False}
    for key in ("a", "b")
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "parameters",
    [{"anyOf": PARTS}, {"oneOf": PARTS}, {"allOf": PARTS[:1]}, {"const": {"a": 1}}, {"enum": [{"a": 1}, {"b": 1}]}],
)
def test_parameters_that_are_a_choice(client: OpenAI, parameters: Any, named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "f"}} if named else "required"
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = client.chat.completions.create(**BODY, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "f"
    jsonschema.validate(json.loads(call.function.arguments), parameters)


def test_found_calls_and_the_input_of_the_template(serve_with: Any) -> None:
    template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for message in messages %}{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    server = serve_with(chat_template=template, enable_auto_tool_choice=True, tool_call_parser="hermes")
    # The grammar has the demo model write what a model with tools would.
    grammar = r'root ::= "Well <tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": " [0-9] "}}\n</tool_call>"'
    body = {"messages": ASK, "tools": TOOLS, "guided_grammar": grammar, "max_tokens": 200}
    answer: httpx.Response = server.post("/v1/chat/completions", body)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well "
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and re.fullmatch(r'\{"a": [0-9]\}', call["function"]["arguments"])
    told: int = answer.json()["usage"]["prompt_tokens"]
    none: dict[str, Any] = server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).json()
    assert "<tool_call>" in none["choices"][0]["message"]["content"] and none["usage"]["prompt_tokens"] < told
    turn = [*ASK, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}]
    assert server.post("/v1/chat/completions", {**body, "messages": turn}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"name": "Anna", "age": 3}'),
        ("hermes", "Write <tool_call>\nadd(1)\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "Anna", "arguments": {}}\n</tool_call>\n'),
    ],
)
def test_text_without_a_call_is_content(serve_with: Any, form: str, text: str, stream: bool) -> None:
    server = serve_with(enable_auto_tool_choice=True, tool_call_parser=form)
    answer: Any = server.client().chat.completions.create(
        **BODY, tools=TOOLS, stream=stream, extra_body={"guided_choice": [text]}
    )
    if stream:
        parts = [one for chunk in answer for one in chunk.choices]
        assert "".join(part.delta.content or "" for part in parts) == text
        assert not any(part.delta.tool_calls for part in parts) and parts[-1].finish_reason == "stop"
    else:
        (choice,) = answer.choices
        assert choice.message.content == text and not choice.message.tool_calls and choice.finish_reason == "stop"
