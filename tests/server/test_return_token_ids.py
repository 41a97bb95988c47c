"""Token ids in answers: those that the engine made, of prompts and choices, whole and streamed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import QUESTION, Server

from phonograph.engine.process.calls import Delta
from phonograph.server.openai.answers import TokenIdAnswer

BODY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": QUESTION}]}


def posted(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**BODY, **fields, "stream": True}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=30) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_has_the_ids_of_each_prompt_and_choice(server: Server) -> None:
    prompts = ["Tom has", "1 2 3"]
    ids = [server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    answer = posted(server, "/v1/completions", prompt=prompts, n=2, temperature=1, seed=1, logprobs=0)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids[0], ids[0], ids[1], ids[1]]
    named = posted(
        server,
        "/v1/completions",
        **{"prompt": prompts, "n": 2, "temperature": 1, "seed": 1, "logprobs": 0, "return_tokens_as_token_ids": True},
    )
    for choice, other in zip(answer["choices"], named["choices"], strict=True):
        assert [f"token_id:{token_id}" for token_id in choice["token_ids"]] == other["logprobs"]["tokens"]
        assert len(choice["token_ids"]) == 12
    plain = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()
    assert plain["choices"][0]["token_ids"] is None


def test_the_chunks_of_a_completion_have_the_ids_once(server: Server) -> None:
    whole = posted(server, "/v1/completions", prompt=["Tom has", "1 2 3"])
    found: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[list[int]]] = {0: [], 1: []}
    for chunk in chunks(server, "/v1/completions", prompt=["Tom has", "1 2 3"]):
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice["token_ids"]
        prompts[choice["index"]] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    for choice in whole["choices"]:
        assert found[choice["index"]] == choice["token_ids"]
        assert prompts[choice["index"]] == [choice["prompt_token_ids"]], "in its first chunk alone"


def test_a_chat_has_the_ids_of_its_prompt_beside_the_choices(server: Server) -> None:
    ids = server.post("/tokenize", CHAT).json()["tokens"]
    whole = posted(server, "/v1/chat/completions", **CHAT)
    (choice,) = whole["choices"]
    assert whole["prompt_token_ids"] == ids and "prompt_token_ids" not in choice
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert len(choice["token_ids"]) == 12 and choice["message"]["content"] in text
    first, *rest = chunks(server, "/v1/chat/completions", **CHAT)
    assert first["prompt_token_ids"] == ids and not any("prompt_token_ids" in chunk for chunk in rest)
    streamed = [token_id for chunk in (first, *rest) for one in chunk["choices"] for token_id in one["token_ids"]]
    assert streamed == choice["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_scored_prompt_has_no_token_of_an_answer(server: Server, stream: bool) -> None:
    fields = {"prompt": "Tom has", "max_tokens": 0, "echo": True, "logprobs": 0}
    answers = chunks(server, "/v1/completions", **fields) if stream else [posted(server, "/v1/completions", **fields)]
    assert [choice["token_ids"] for answer in answers for choice in answer["choices"]] == [[]] * len(answers)
    assert answers[0]["choices"][0]["prompt_token_ids"]


def test_tokens_without_a_chunk_come_with_the_next(server: Server) -> None:
    """A stop string holds text back; the ids of its tokens are not lost."""
    whole = posted(server, "/v1/completions", prompt=QUESTION, max_tokens=40)
    stop = whole["choices"][0]["text"][10:16]
    ended = posted(server, "/v1/completions", prompt=QUESTION, max_tokens=40, stop=[stop])["choices"][0]
    streamed = chunks(server, "/v1/completions", prompt=QUESTION, max_tokens=40, stop=[stop])
    assert [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]] == ended["token_ids"]


def test_ids_of_a_delta_without_a_chunk_come_with_the_next_chunk() -> None:
    """The parser of a format may wait for more text."""
    rows: list[list[dict[str, Any]]] = [[], [{"index": 0}, {"index": 0}], [{"index": 0}]]
    inner: Any = SimpleNamespace(head={"object": "chat.completion.chunk"}, choices=lambda sample, delta: rows.pop(0))
    sample: Any = SimpleNamespace(index=0)
    call: Any = SimpleNamespace(prompts=[SimpleNamespace(token_ids=[5])], samples=[sample])
    answer = TokenIdAnswer(inner, call, prompt_only=False)
    deltas = [Delta("", [1, 2], []), Delta("a", [3], []), Delta("b", [4], [])]
    found = [[choice["token_ids"] for choice in answer.choices(sample, delta)] for delta in deltas]
    assert found == [[], [[], [1, 2, 3]], [[4]]]
