"""`strict` of functions: the grammar of a call that the model chooses, or a header that says that there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from servers import QUESTION, Server

from phonograph.text.formats.call_layouts import HERMES
from phonograph.text.formats.find_formats import TOOL_FORMATS, ToolFormat

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
UNFIT = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
TURNS = "{# <tool_call> #}{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}<|assistant|>"
TOLD = '299 - "no effect: strict of tools that the model chooses"'


def function(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {"name": "add", "parameters": schema} | ({} if strict is None else {"strict": strict})


def body(path: str, schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    chat = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "stream": False}
    tool = {"type": "function", "function": function(schema, strict)}
    if path == "/v1/responses":
        flat = {"type": "function", **function(schema, strict)}
        return {"input": QUESTION, "max_output_tokens": 60, "temperature": 0, "tools": [flat]}
    if path == "/v1/messages":
        about = function(schema, strict)
        about["input_schema"] = about.pop("parameters")
        return {**chat, "max_tokens": 60, "tools": [about], "temperature": 0}
    return {**chat, "tools": [tool], **({"options": {"num_predict": 60}} if "api" in path else {"max_tokens": 60})}


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")


@pytest.mark.parametrize("path", PATHS)
def test_the_schema_of_a_strict_function_is_compiled(serve_with: Callable[..., Server], path: str) -> None:
    server = serve_with(chat_template=TURNS)
    for schema, strict, status in ((SCHEMA, True, 200), (UNFIT, True, 400), (UNFIT, False, 200), (UNFIT, None, 200)):
        answer = server.post(path, body(path, schema, strict))
        assert answer.status_code == status, (schema, strict, answer.text)
        assert "warning" not in answer.headers
        if status == 400:
            assert "uniqueItems" in answer.text and "tools" in answer.text


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_every_form_of_calls_has_a_grammar(serve_with: Callable[..., Server], form: str) -> None:
    server = serve_with(chat_template=TURNS, tool_call_parser=form)
    for schema, strict, status in ((SCHEMA, True, 200), (UNFIT, True, 400), (UNFIT, False, 200)):
        answer = server.post(PATHS[0], body(PATHS[0], schema, strict))
        assert answer.status_code == status and "warning" not in answer.headers


WITHOUT = replace(TOOL_FORMATS["hermes"], layouts=())
HIDDEN = replace(TOOL_FORMATS["hermes"], layouts=(replace(HERMES[0], triggers=("<|end|>",)),))
"""A form without a layout, and one whose trigger is a special token that texts do not show."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", [WITHOUT, HIDDEN])
def test_a_form_of_calls_without_a_grammar_is_named(
    serve_with: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, path: str, form: ToolFormat
) -> None:
    monkeypatch.setitem(TOOL_FORMATS, "hermes", form)  # type: ignore[arg-type]
    server = serve_with(chat_template=TURNS)
    answer = server.post(path, body(path, SCHEMA, True))
    assert answer.status_code == 200 and answer.headers["warning"] == TOLD
    assert "warning" not in server.post(path, body(path, SCHEMA, None)).headers


def test_a_form_of_the_content_comes_first(serve_with: Callable[..., Server]) -> None:
    server = serve_with(chat_template=TURNS)
    asked = {**body(PATHS[0], SCHEMA, True), "response_format": {"type": "json_object"}, "user": "me"}
    answer = server.post(PATHS[0], asked)
    assert answer.headers["warning"] == f'299 - "no effect: user", {TOLD}'
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


def test_forced_calls_need_no_flag(serve_with: Callable[..., Server]) -> None:
    answer = serve_with(chat_template=TURNS).post(PATHS[0], {**body(PATHS[0], SCHEMA, True), "tool_choice": "required"})
    assert "warning" not in answer.headers and answer.json()["choices"][0]["message"]["tool_calls"]
