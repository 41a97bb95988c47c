"""Fields that this server does not know: an error by default, dropped and named with unknown_fields=warn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servers import Server

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "stream": True}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_unknown_fields_are_dropped_and_named(
    path: str, body: dict[str, Any], server: Server, serve_with: Callable[..., Server]
) -> None:
    more = {**body, "enable_magic": 1, 'quote"\n\u00e9': None, "user": "me"}
    refused = server.post(path, more)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "enable_magic"
    answer = serve_with(unknown_fields="warn").post(path, more)
    assert answer.status_code == 200
    assert answer.headers["warning"] == (
        '299 - "no effect: user", 299 - "dropped, as this endpoint has no such field: enable_magic, quote\\"?\\\\xe9"'
    )
    assert "warning" not in serve_with(unknown_fields="warn").post(path, body).headers


@pytest.mark.parametrize(
    ("field", "value"), [("chat_template", "{{ 1 }}"), ("best_of", 2), ("temperature", "hot"), ("functions", [1])]
)
def test_fields_that_change_an_answer_stay_errors(field: str, value: Any, serve_with: Callable[..., Server]) -> None:
    answer = serve_with(unknown_fields="warn").post("/v1/chat/completions", {**CHAT, field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/show"])
def test_other_protocols_drop_unknown_fields_too(path: str, server: Server, serve_with: Callable[..., Server]) -> None:
    body = {"model": "demo"} if path == "/api/show" else {"model": "demo", **CHAT}
    if path in ("/v1/messages/count_tokens", "/api/chat"):
        body = {name: value for name, value in body.items() if name != "max_tokens"}
    refused = server.post(path, {**body, "enable_magic": 1})
    assert refused.status_code == 400 and "enable_magic" in refused.text
    answer = serve_with(unknown_fields="warn").post(path, {**body, "enable_magic": 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == '299 - "dropped, as this endpoint has no such field: enable_magic"'


def test_a_dropped_name_is_shortened(serve_with: Callable[..., Server]) -> None:
    answer = serve_with(unknown_fields="warn").post("/tokenize", {"prompt": "a", "x" * 5000: 1})
    assert answer.status_code == 200 and len(answer.headers["warning"]) < 200
