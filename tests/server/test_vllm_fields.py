"""Fields and flags of vLLM's server that change when an answer ends, or how it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servers import QUESTION, Server

PROMPT = f"<|begin|><|user|>{QUESTION}<|end|><|assistant|>"
GREEDY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


def chunks(server: Server, **fields: Any) -> list[Any]:
    """Return the chunks of a streamed completion."""
    return list(server.client().completions.create(stream=True, **{**GREEDY, **fields}))


def test_a_repeated_pattern_ends_the_answer(server: Server) -> None:
    pattern = {"max_pattern_size": 4, "min_count": 5}
    body = {**GREEDY, "allowed_token_ids": [65, 66], "repetition_detection": pattern}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    refused = server.post("/v1/completions", {**body, "repetition_detection": {"max_pattern_size": 4}})
    assert refused.status_code == 400 and "min_count=0: must be an integer >= 2" in refused.text


def test_chunks_of_several_tokens_by_request_and_by_flag(server: Server, serve_with: Callable[..., Server]) -> None:
    ids = {"return_token_ids": True, "ignore_eos": True}
    for found in (
        chunks(server, extra_body={"stream_interval": 8, **ids}),
        chunks(serve_with({"stream_interval": 8}), extra_body=ids),
    ):
        counts = [len(chunk.choices[0].token_ids) for chunk in found]
        assert counts[0] == 1 and all(count >= 8 for count in counts[1:-1]) and sum(counts) == 24
    text = "".join(chunk.choices[0].text for chunk in chunks(server))
    assert "".join(chunk.choices[0].text for chunk in chunks(server, extra_body={"stream_interval": 7})) == text


def test_flags_that_replace_fields_of_requests(serve_with: Callable[..., Server]) -> None:
    server = serve_with(return_tokens_as_token_ids=True, enable_force_include_usage=True)
    found = chunks(server, logprobs=1)
    assert all(chunk.usage.completion_tokens > 0 for chunk in found)
    assert found[0].choices[0].logprobs.tokens[0].startswith("token_id:")
    named = chunks(server, logprobs=1, extra_body={"return_tokens_as_token_ids": False})
    assert not named[0].choices[0].logprobs.tokens[0].startswith("token_id:")


def test_the_chat_template_of_a_request(server: Server, serve_with: Callable[..., Server]) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ sign }}{% endfor %}"
    body = {
        "messages": [{"role": "user", "content": "Tom"}],
        "chat_template": template,
        "chat_template_kwargs": {"sign": " has", "other": 1},
    }
    refused = server.post("/v1/chat/completions", {**body, "max_tokens": 1})
    assert refused.status_code == 400 and "--trust-request-chat-template" in refused.text
    trusting = serve_with(trust_request_chat_template=True)
    tokens = trusting.post("/tokenize", body)
    plain = trusting.post("/tokenize", {"prompt": "Tom has", "add_special_tokens": False}).json()["tokens"]
    assert tokens.json()["tokens"] == plain
    assert "chat_template_kwargs.other" in tokens.headers["warning"] and "sign" not in tokens.headers["warning"]
    chat = trusting.post("/v1/chat/completions", {**body, "max_tokens": 4, "return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == plain
    broken = trusting.post("/v1/chat/completions", {**body, "chat_template": "{% if %}"})
    assert broken.status_code == 400 and "chat template" in broken.text
