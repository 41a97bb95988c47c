"""/v1/chat/completions through OpenAI's client: templates, content parts, streams, log-probabilities; /tokenize."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI
from servers import QUESTION, Server

from phonograph.config.server_config import ServerConfig
from phonograph.server.openai.chat_translation import chat_request
from phonograph.server.openai.protocol import ChatBody
from phonograph.text.tokenizer import Tokenizer

ASK: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


def test_an_answer_through_the_template(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=ASK, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and (choice.message.content or "").endswith("#### 19")
    assert choice.finish_reason == "stop" and answer.object == "chat.completion"
    assert answer.usage is not None and answer.usage.completion_tokens > 5


def test_content_parts_are_joined_and_null_fields_ignored(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASK, **GREEDY)
    first, second = QUESTION.split(". ")
    parts = [{"type": "text", "text": f"{first}."}, {"type": "text", "text": second}]
    lined: Any = [{"role": "user", "content": f"{first}.\n{second}"}]
    parted: Any = [{"role": "user", "content": parts, "name": None}]
    joined = [client.chat.completions.create(messages=messages, **GREEDY) for messages in (lined, parted)]
    assert joined[0].choices[0].message.content == joined[1].choices[0].message.content
    assert joined[1].usage.prompt_tokens == joined[0].usage.prompt_tokens  # pyright: ignore[reportOptionalMemberAccess]
    # What the client's own library gives back as a message can be sent again.
    turn = [*ASK, whole.choices[0].message.model_dump(), {"role": "user", "content": "Why?"}]
    assert client.chat.completions.create(messages=turn, max_tokens=4, **GREEDY).choices[0].message.content


def test_lengths_by_both_names_and_up_to_the_context(client: OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(messages=ASK, **{name: 3}, **GREEDY)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_a_stream_begins_with_the_role(client: OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "messages": ASK, "n": 2, "temperature": 0.8, "seed": 7, "max_tokens": 20}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body))
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[0].object == "chat.completion.chunk"
    for choice in whole.choices:
        deltas = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert deltas[0].delta.role == "assistant" and deltas[0].delta.content == ""
        assert "".join(one.delta.content or "" for one in deltas) == choice.message.content
        assert [one.finish_reason for one in deltas if one.finish_reason] == [choice.finish_reason]
        assert deltas[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_each_token(client: OpenAI, stream: bool) -> None:
    body: dict[str, Any] = {**GREEDY, "messages": ASK, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **body))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        found = [
            one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
        ]
    else:
        (choice,) = client.chat.completions.create(**body).choices
        assert choice.logprobs is not None and choice.logprobs.content is not None
        text, found = choice.message.content or "", choice.logprobs.content
    assert found[-1].token == "<|end|>"
    assert b"".join(bytes(one.bytes or []) for one in found[:-1]).decode() == text
    for one in found:
        assert len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob
        assert one.top_logprobs[0].token == one.token


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_listed_tokens(client: OpenAI, stream: bool) -> None:
    listed = {"logprob_token_ids": [9, 4, 9], "return_tokens_as_token_ids": True}
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream": stream}
    answer: Any = client.chat.completions.create(model="demo", temperature=0, extra_body=listed, **body)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    content = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert len(content) == 3
    for one in content:
        tokens = [top.token for top in one.top_logprobs]
        assert tokens[0] == one.token and {*tokens} == {one.token, "token_id:9", "token_id:4"}
        assert len(tokens) == len({*tokens}) and one.top_logprobs[0].logprob == one.logprob


@pytest.mark.parametrize("stream", [False, True])
def test_the_echo_of_a_message_that_goes_on(client: OpenAI, stream: bool) -> None:
    begun: Any = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "12 + 7 ="}]}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    texts: dict[bool, str] = {}
    for echo in (False, True):
        extra = {**options, "echo": echo}
        answer: Any = client.chat.completions.create(messages=begun, extra_body=extra, stream=stream, **GREEDY)
        if stream:
            texts[echo] = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
        else:
            texts[echo] = answer.choices[0].message.content
    assert texts[False] and texts[True] == "12 + 7 =" + texts[False]
    plain: Any = client.chat.completions.create(messages=ASK, extra_body={"echo": True}, **GREEDY)  # type: ignore
    assert not plain.choices[0].message.content.startswith(QUESTION)


def test_special_tokens_and_documents_of_a_chat(server: Server, serve_with: Callable[..., Server]) -> None:
    body = {"messages": ASK, "max_tokens": 1, "return_token_ids": True}
    plain, neutral = (
        server.post("/v1/chat/completions", {**body, **extra}).json()["prompt_token_ids"]
        for extra in ({}, {"add_special_tokens": False, "echo": False})
    )
    assert plain == neutral
    # The demo's tokenizer adds none.
    assert chat_request(ChatBody.model_validate({**body, "add_special_tokens": True}), ServerConfig()).adds_special
    documents = [{"title": "a", "text": "b"}]
    answer = server.post("/v1/chat/completions", {**body, "documents": documents})
    assert "documents" in answer.headers["warning"] and "chat_template_kwargs" not in answer.headers["warning"]
    reads = serve_with(chat_template="{{ bos_token }}{% for one in documents %}{{ one.text }}{% endfor %}")
    found = reads.post("/v1/chat/completions", {**body, "documents": documents})
    text = reads.post("/detokenize", {"tokens": found.json()["prompt_token_ids"]}).json()["prompt"]
    assert text.endswith("b") and "warning" not in found.headers
    refused = server.post("/v1/chat/completions", {**body, "documents": ["a"]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"


def test_going_on_with_the_last_message(client: OpenAI) -> None:
    begun: Any = [*ASK, {"role": "assistant", "content": "12 + 7 ="}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    # The demo's template trims messages and closes each; what it adds behind the last one is cut off.
    answer = client.chat.completions.create(messages=begun, extra_body=options, **GREEDY)
    assert (answer.choices[0].message.content or "").strip().startswith("19")


def test_tokenize_and_detokenize(server: Server) -> None:
    text = "Tom has 12 apples é😀"
    found = server.post("/tokenize", {"model": "demo", "prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 1024
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": ASK}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == (
        f"<|begin|><|user|>{QUESTION}<|end|><|assistant|>"
    )


def test_further_keys_of_messages_are_named(server: Server) -> None:
    """Litellm sends back what it adds to answers."""
    said = {"role": "assistant", "content": "Hello.", "provider_specific_fields": {"a": 1}, "images": None}
    turns = [{**ASK[0], "colour": "red"}, said, *ASK]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": turns, **({"max_tokens": 1} if path.startswith("/v1") else {})})
        assert answer.status_code == 200, answer.text
        assert answer.headers["warning"].endswith('no effect: messages.colour, messages.provider_specific_fields"')


def test_tokens_of_chats_with_tools(serve_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ tools | tojson if tools else '' }}{% for message in messages %}{{ message.content }}{% endfor %}"
    server = serve_with(chat_template=template)
    tool = {"type": "function", "function": {"name": "add"}}

    def text_of(**more: Any) -> str:
        tokens = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], **more}).json()["tokens"]
        return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]

    assert text_of() == text_of(add_special_tokens=False) == "Hi"
    assert text_of(tools=[tool]) == json.dumps([tool]) + "Hi"
    encode, added = Tokenizer.encode, list[bool]()

    def spy(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        added.append(add_special_tokens)
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    assert text_of(add_special_tokens=True) == text_of(add_special_tokens=False) == "Hi" and added == [True, False]
    assert server.post("/tokenize", {"prompt": "Hi", "tools": [tool]}).json()["error"]["param"] == "tools"


def test_models_health_and_version(server: Server, client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo" and model.max_model_len == 1024  # pyright: ignore[reportAttributeAccessIssue]
    assert client.models.retrieve("demo") == model
    assert server.get("/health").status_code == 200
    assert server.get("/version").json()["version"]
    assert {"/v1/completions", "/v1/chat/completions"} <= set(server.get("/openapi.json").json()["paths"])


def test_other_names_templates_and_defaults(serve_with: Any) -> None:
    server = serve_with(served_model_name=["small", "best"])
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["small", "best"]
    for name in ("small", "best", None):
        answer = server.post("/v1/completions", {"model": name, "prompt": "The", "max_tokens": 2})
        assert answer.json()["model"] == "small"
    assert server.post("/v1/completions", {"model": "demo", "prompt": "The"}).status_code == 404
    plain = serve_with(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}{{ more }}")
    body = {"messages": ASK, "chat_template_kwargs": {"more": "!"}}
    assert plain.post("/tokenize", body).json() == plain.post("/tokenize", {"prompt": f"{QUESTION}!"}).json()
    cold = serve_with(defaults={"temperature": 0.0})
    answers = {cold.post("/v1/completions", {"prompt": "Tom has"}).json()["choices"][0]["text"] for _ in range(3)}
    assert len(answers) == 1


def test_the_chunk_of_the_role_has_no_tokens_yet(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {**GREEDY, "messages": ASK, "max_tokens": 3}
    first, second, *_ = client.chat.completions.create(stream=True, stream_options=options, **body)
    assert first.choices[0].delta.role == "assistant"
    assert first.usage is not None and second.usage is not None
    assert first.usage.completion_tokens == 0 < second.usage.completion_tokens
    assert first.usage.total_tokens == first.usage.prompt_tokens == second.usage.prompt_tokens


def test_no_usage_wins_over_continuous_usage(client: OpenAI) -> None:
    options: Any = {"include_usage": False, "continuous_usage_stats": True}
    for made in (
        client.chat.completions.create(stream=True, stream_options=options, messages=ASK, max_tokens=2, **GREEDY),
        client.completions.create(stream=True, stream_options=options, prompt=QUESTION, max_tokens=2, **GREEDY),
    ):
        assert [chunk.usage for chunk in made if chunk.usage is not None] == []


def test_fields_of_vllm_are_null(client: OpenAI) -> None:
    ask: Any = [{"role": "user", "content": QUESTION}]
    chat: Any = client.chat.completions.create(model="demo", messages=ask, max_tokens=1)
    assert (chat.prompt_logprobs, chat.prompt_token_ids, chat.choices[0].token_ids) == (None, None, None)
    choice: Any = client.completions.create(model="demo", prompt=QUESTION, max_tokens=1).choices[0]
    assert (choice.prompt_logprobs, choice.prompt_token_ids, choice.token_ids) == (None, None, None)
