"""truncate_prompt_tokens: the last or the first tokens of a prompt, of completions and chats."""

from __future__ import annotations

from typing import Any

import pytest
from servers import QUESTION, Server

LONG = "Tom has 12 apples. " * 400 + QUESTION
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def token_ids(server: Server, **body: Any) -> list[int]:
    return server.post("/tokenize", body).json()["tokens"]


def test_completions_keep_the_last_tokens(server: Server) -> None:
    whole = token_ids(server, prompt=LONG)
    assert len(whole) > 1024
    kept = {"prompt": whole[-20:], **GREEDY}
    expected = server.post("/v1/completions", kept).json()["choices"][0]["text"]
    for prompt in (LONG, whole):
        body = {**GREEDY, "prompt": prompt, "truncate_prompt_tokens": 20, "echo": True, "logprobs": 1}
        found = server.post("/v1/completions", body).json()
        (choice,) = found["choices"]
        assert found["usage"]["prompt_tokens"] == 20 and len(choice["logprobs"]["tokens"]) == 28
        assert choice["text"].endswith(expected) and choice["text"].startswith(choice["logprobs"]["tokens"][0])
        assert choice["text"].removesuffix(expected) in LONG
    short = {**GREEDY, "prompt": [QUESTION, LONG], "truncate_prompt_tokens": 100}
    num_short = len(token_ids(server, prompt=QUESTION))
    assert server.post("/v1/completions", short).json()["usage"]["prompt_tokens"] == num_short + 100


def test_minus_one_keeps_what_fits(server: Server) -> None:
    for body in ({"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        assert server.post(path, {**body, **GREEDY}).status_code == 400
        found = server.post(path, {**body, **GREEDY, "truncate_prompt_tokens": -1}).json()
        assert found["usage"]["prompt_tokens"] == 1024 - 8


def test_the_first_tokens_stay_with_truncation_side_right(server: Server) -> None:
    messages = [{"role": "user", "content": LONG}]
    body = {**GREEDY, "truncation_side": "right", "return_token_ids": True}
    for path, prompt in (("/v1/completions", {"prompt": LONG}), ("/v1/chat/completions", {"messages": messages})):
        for truncate, num_kept in ((20, 20), (-1, 1024 - 8)):
            found = server.post(path, {**body, **prompt, "truncate_prompt_tokens": truncate}).json()
            kept = (found if "messages" in prompt else found["choices"][0])["prompt_token_ids"]
            assert kept == token_ids(server, **prompt)[:num_kept]
    assert server.post("/v1/completions", {"prompt": "a", "truncation_side": "top"}).status_code == 400


def test_chats_keep_the_last_tokens(server: Server) -> None:
    messages = [{"role": "user", "content": LONG}]
    body = {**GREEDY, "messages": messages, "truncate_prompt_tokens": 20, "return_token_ids": True}
    found = server.post("/v1/chat/completions", body).json()
    assert found["prompt_token_ids"] == token_ids(server, messages=messages)[-20:]
    plain = {**body, "messages": [{"role": "user", "content": "Hi"}], "truncate_prompt_tokens": 1000}
    found = server.post("/v1/chat/completions", plain).json()
    assert found["prompt_token_ids"] == token_ids(server, messages=plain["messages"])


@pytest.mark.parametrize("value", [0, -2, 1025, "5", 1.5, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_wrong_numbers(server: Server, path: str, body: dict[str, Any], value: Any) -> None:
    answer = server.post(path, {**body, "truncate_prompt_tokens": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_limits_of_a_request_hold(server: Server) -> None:
    for prompt in ([5] * 2_000_000, "a " * 600_000):
        answer = server.post("/v1/completions", {"prompt": prompt, "truncate_prompt_tokens": 5})
        assert answer.status_code in (400, 413) and "max_request" in answer.json()["error"]["message"]
