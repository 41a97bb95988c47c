"""Bodies of the chat protocols with a wrong value in each place: a client error or an answer, and never a fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import Server

JSON = {"content-type": "application/json"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
JUNK: list[Any] = [
    *(None, True, 0, -1, 10**30, float("nan"), "", "x", "\ud800", "\x00é😀"),
    *([], [[]], [None], ["x"], {}, {"type": []}, {"a": {"b": [1]}}, [{"type": "text", "text": "\ud800"}]),
]
RESPONSE = {
    "model": "demo",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"role": "user", "content": "c"},
    ],
    "instructions": "d",
    "max_output_tokens": 1,
    "temperature": 1,
    "tools": [{"type": "function", "name": "f", "description": "e", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
}
FORMED = {
    **{"model": "demo", "input": "a", "max_output_tokens": 1, "chat_template_kwargs": {"a": 1}},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
}
MESSAGE = {
    "model": "demo",
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": "d"},
                {"type": "text", "text": "e"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "1"}],
                    "is_error": True,
                }
            ],
        },
    ],
    "max_tokens": 1,
    "tools": [{"name": "f", "description": "g", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["h"],
    "metadata": {"user_id": "i"},
    "stream": True,
}
OLLAMA = {
    "model": "demo",
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "b",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_name": "f", "tool_call_id": "c", "content": "1"},
    ],
    "format": SCHEMA,
    "options": {"num_predict": 1, "temperature": 1, "seed": 5, "stop": ["h"], "num_ctx": 100, "repeat_last_n": 64},
    "keep_alive": "5m",
    "think": True,
    "logprobs": True,
    "top_logprobs": 1,
}
GENERATE = {"model": "demo", "prompt": "a", "system": "b", "options": {"num_predict": 1}, "think": "low"}
BODIES = [
    *[("/v1/responses", RESPONSE), ("/v1/responses", FORMED), ("/v1/messages", MESSAGE)],
    *[("/api/chat", OLLAMA), ("/api/generate", GENERATE)],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a body but the body itself."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*path, key)
        yield from places(one, (*path, key))


@pytest.mark.parametrize(("url", "body"), BODIES)
def test_a_wrong_value_in_each_place(server: Server, url: str, body: dict[str, Any]) -> None:
    assert server.post(url, body).status_code == 200
    answers: dict[int, int] = {}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for number, (*path, last) in enumerate(places(body)):
            for junk in JUNK[number % 2 :: 2]:  # each half has numbers, texts, lists and objects
                changed = copy.deepcopy(body)
                inner: Any = changed
                for key in path:
                    inner = inner[key]
                inner[last] = junk
                answer = client.post(url, content=json.dumps(changed).encode(), headers=JSON)
                assert answer.status_code in (200, 400, 404), (path, last, junk, answer.text)
                assert b"internal_error" not in answer.content and b"response.failed" not in answer.content
                assert b'{"error":' not in answer.content or answer.is_client_error
                answers[answer.status_code] = answers.get(answer.status_code, 0) + 1
    # Neither all refused nor all taken.
    assert min(answers[400], answers[200]) > 5
