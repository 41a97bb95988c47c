"""Invalid requests get an error in OpenAI's form that names the fault, and affect no other request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from servers import QUESTION, Server

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
DEEP: dict[str, Any] = {}
for _ in range(220):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
LONG = {"description": "x" * 200_000}
FORMAT_NOT, FORMAT_DEEP = (
    {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in ({"not": {}}, DEEP)
)
COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    # body beside the prompt, the field that is at fault, part of what is said
    ({"prompt": None}, "prompt", "must be a string"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": [[]]}, "prompt", "is empty"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string"),
    ({"prompt": [True]}, "prompt", "must be a string"),
    ({"prompt": [[1.5]]}, "prompt", "must be a string"),
    ({"prompt": [5, -1]}, "prompt", "0 to 2047"),
    ({"prompt": [5, 2048]}, "prompt", "0 to 2047"),
    ({"prompt": [10**30]}, "prompt", "0 to 2047"),
    ({"prompt": "half \ud83d of a pair"}, "prompt", "not valid Unicode"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"max_tokens": -1}, "max_tokens", ">= 1"),
    ({"max_tokens": 1024}, "max_tokens", "context holds 1024 tokens"),
    ({"max_tokens": 10**30}, "max_tokens", "context holds 1024 tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "contradict"),
    ({"n": 0}, "n", "n=0"),
    ({"n": 10**6}, "n", "takes 4100 at most"),
    ({"n": True}, "n", "valid integer"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"best_of": 1, "n": 2}, "best_of", "other than n"),
    ({"best_of": "1"}, "best_of", "other than n"),
    ({"temperature": -1}, "temperature", "temperature=-1"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "top_p=0"),
    ({"top_k": -2}, "top_k", "top_k=-2"),
    ({"min_p": 2}, "min_p", "min_p=2"),
    ({"frequency_penalty": 3}, "frequency_penalty", "<= 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty=0"),
    ({"logit_bias": {"a": 1, "5": 1, "b": 1}}, "logit_bias", "no token ids: 'a', 'b'"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "must be a number"),
    ({"logit_bias": {"2048": 1}}, "logit_bias", "0 to 2047"),
    ({"logit_bias": [1]}, "logit_bias", "must map"),
    ({"seed": 2**64}, "seed", "seed="),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": [1]}, "stop", "list of strings"),
    ({"stop": ["x"] * 65}, "stop", "has 65 items; this server takes 64 at most (max_request_stops)"),
    ({"stop": "x" * 1025}, "stop", "1024 characters"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "0 to 2047"),
    ({"stop_token_ids": "5"}, "stop_token_ids", "list of token ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
    ({"allowed_token_ids": [2048]}, "allowed_token_ids", "0 to 2047"),
    ({"bad_words": [5]}, "bad_words", "list of strings"),
    ({"bad_words": [" "]}, "bad_words", "not white space"),
    ({"bad_words": ["x"] * 1025}, "bad_words", "takes 1024 at most (max_request_stop_token_ids)"),
    ({"bad_words": ["1", " 1"], "allowed_token_ids": [23]}, "allowed_token_ids", "no token is left"),
    ({"min_tokens": 17}, "min_tokens", "at most max_tokens"),
    ({"logprobs": 21}, "logprobs", "20 at most"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"logprobs": -1}, "logprobs", "logprobs=-1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "20 at most"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs"),
    ({"logprob_token_ids": [2048], "logprobs": 0}, "logprob_token_ids", "0 to 2047"),
    ({"logprob_token_ids": [*range(129)], "logprobs": 0}, "logprob_token_ids", "1 to 128 token ids"),
    ({"logprob_token_ids": [5], "logprobs": 0, "echo": True, "max_tokens": 0}, "logprob_token_ids", "max_tokens is 0"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more", "not permitted"),
    ({"priority": 1}, "priority", "--scheduling-policy"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"cache_salt": "x" * 2**20}, "cache_salt", "at most 128 characters"),
    ({"cache_salt": 5}, "cache_salt", "valid string"),
    ({"request_id": "x" * 201}, "request_id", "200"),
    ({"request_id": "\udc00"}, "request_id", ""),
    ({"suffix": "."}, "suffix", "suffix needs tokens"),
    ({"guided_regex": ""}, "guided_regex", "non-empty"),
    ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "contradicts guided_regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "set exactly one of"),
    ({"structured_outputs": {"rgex": "a"}}, "structured_outputs", "is not a field"),
    ({"guided_json": {"not": {}}}, "guided_json", "not cannot be enforced"),
    ({"guided_json": {"type": "string", "format": []}}, "guided_json", "cannot be compiled"),
    ({"guided_json": {"allOf": 5}}, "guided_json", "cannot be compiled"),
    ({"guided_grammar": "nonsense"}, "guided_grammar", "cannot be compiled"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "structured_outputs='{\"not"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is not valid JSON"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "must be a non-empty string"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one text"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": 1}}, "structured_outputs", "True or False"),
    ({"response_format": {"type": "text"}, "guided_json": {"not": {}}}, "guided_json", "guided_json='{"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0 needs echo"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens=-1"),
    ({"max_completion_tokens": 1024}, "max_completion_tokens", "context holds 1024 tokens"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "contradicts"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"x" * 5000: 1}, "x" * 100 + "...", "unknown field"),
    ({"\ud800": 1}, None, "valid string"),
]
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "list of one message"),
    ({"messages": []}, "messages", "list of one message"),
    ({"messages": ["Hi"]}, "messages", "each an object"),
    ({"messages": [{}]}, "messages[0].role", "role must be one of"),
    ({"messages": [{"role": "boss", "content": ""}]}, "messages[0].role", "role must be one of"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role", "role must be one of"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "content is missing"),
    ({"messages": [{**USER, "content": 5}]}, "messages[0].content", "string or a list"),
    ({"messages": [{**USER, "content": [5]}]}, "messages[0].content[0]", "an object with a type"),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "must be a string"),
    ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "reads text"),
    (
        {"messages": [USER, {**USER, "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
        "messages[1].content[1]",
        "'input_audio' are not supported",
    ),
    ({"messages": [{**USER, "prefix": True}]}, "messages[0].prefix", "continue_final_message"),
    ({"messages": [{**USER, "content": "\ud800"}]}, "messages", ""),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs=-1"),
    ({"max_tokens": 1024}, "max_tokens", "context holds 1024 tokens"),
    (
        {"response_format": FORMAT_NOT},
        "response_format",
        "response_format='{\"not\": {}}': cannot be compiled: not cannot be enforced",
    ),
    ({"response_format": FORMAT_DEEP}, "response_format", "120 deep"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
        "not cannot be enforced",
    ),
    ({"max_completion_tokens": 1024}, "max_completion_tokens", "context holds 1024 tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "contradicts"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "not a variable"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "not a variable"),
    *(
        ({"chat_template_kwargs": {name: 3}}, "chat_template_kwargs", "not a variable")
        for name in ("messages", "conversation", "conversations", "self", "tools", "add_generation_prompt")
    ),
    ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
    ({"response_format": {"type": "yaml"}}, "response_format", "must be text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "a name and a schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "contradicts"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "with a function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "a name"),
    ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools[0].function.name", "not valid Unicode"),
    (
        {
            "tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": DEEP}}],
            "tool_choice": "required",
        },
        "tools",
        "120 deep",
    ),
    *(
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": LONG}}], "tool_choice": choice},
            "tools",
            "200000",
        )
        for choice in ("required", {"type": "function", "function": {"name": "f"}})
    ),
    ({"tools": [TOOL, TOOL]}, "tools", "the same name"),
    ({"tools": [TOOL]}, "tool_choice", "start the server with --tool-call-parser"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": "all"}, "tool_choice", "none, auto, required"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "among"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "contradicts"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON text of an object",
    ),
    ({"echo": "yes"}, "echo", "valid boolean"),
]


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert len(error["message"]) < 1100
    return error


def test_every_wrong_field_is_named(server: Server) -> None:
    """In one test, on one connection: the table is long."""
    # json.dumps writes halves of surrogate pairs as escapes, which is how they come over the wire.
    tables = [("/v1/completions", {"prompt": "Hi"}, COMPLETIONS), ("/v1/chat/completions", {"messages": [USER]}, CHATS)]
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}, timeout=60) as http:
        for path, rest, table in tables:
            for body, param, says in table:
                error = error_of(http.post(path, content=json.dumps({**rest, **body})))
                assert error["type"] == "invalid_request_error"
                assert error["param"] == param and says in error["message"], (body, error)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "oops": True}, "oops"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": "12"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_so_do_tokenize_and_detokenize(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post(path, body))["param"] == param


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "JSON object"),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'"prompt"', "JSON object"),
        (b"\xff\xfe{}", ""),
        (b"[" * 200_000, ""),
        (b'{"prompt":' * 50_000, ""),
        (b'{"prompt": "Hi", "max_tokens": ' + b"9" * 10_000 + b"}", ""),
        (b'{"prompt": "Hi", "temperature": NaN}', "temperature=nan"),
        (b'{"prompt": "Hi", "temperature": Infinity}', "temperature=inf"),
        (b"prompt=Hi", "not JSON"),
    ],
)
def test_bodies_that_are_no_request(server: Server, content: bytes, says: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert says in error_of(answer)["message"]


def test_unknown_models_and_paths(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="Hi")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert error_of(server.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"
    assert "Not Found" in error_of(server.get("/v2"), 404)["message"]
    assert "Method Not Allowed" in error_of(server.get("/v1/completions"), 405)["message"]
    plain = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "Hi"}', headers={"content-type": "a/b"})
    assert "application/json" in error_of(plain)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit(server: Server, client: OpenAI, stream: bool) -> None:
    for prompt in ([5] * 1024, "word " * 9000):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="demo", prompt=prompt, max_tokens=1, stream=stream)  # pyright: ignore[reportCallIssue, reportArgumentType]
        assert caught.value.code == "context_length_exceeded" and "1024" in caught.value.message
    fits = client.completions.create(model="demo", prompt=[5] * 1023, max_tokens=1)
    assert fits.usage is not None and fits.usage.total_tokens == 1024


def test_one_bad_prompt_refuses_its_batch_and_nothing_is_left(server: Server) -> None:
    for stream in (False, True):
        body = {"prompt": [[5, 6], [5, 2048], [7]], "max_tokens": 900, "ignore_eos": True, "stream": stream}
        assert error_of(server.post("/v1/completions", body))["param"] == "prompt"
        server.wait_until_idle()


@pytest.mark.parametrize(
    "text",
    [
        "\x00\x01\x7f\u200b\u202e\u2066",
        "a" + "\u0301" * 200,
        "👨‍👩‍👧‍👦" * 20,
        "\ufffd\ufffe\uffff\U0010ffff",
        "<|end|><|user|><|begin|>" * 20,
        "ﷺ" * 100 + "𒐫" * 20,
    ],
)
def test_hostile_unicode_comes_through_whole(server: Server, text: str) -> None:
    found = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": found}).json()["prompt"] == text
    answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 2, "echo": True, "logprobs": 1})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].startswith(text)


def test_others_are_answered_beside_all_this(server: Server, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
    )
    pieces: list[str] = []
    for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        error_of(server.post("/v1/completions", {"prompt": [5, 2048]}))
    assert "".join(pieces).endswith("#### 19")
