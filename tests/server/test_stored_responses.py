"""Responses that the server stores: conversations that continue them, background responses, and the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from servers import QUESTION, Server

from phonograph.server.http.api_errors import ApiError
from phonograph.server.responses.response_store import ResponseStore, StoredResponse

ASKED: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 200}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
LONG = {**ASKED, "max_output_tokens": 900, "ignore_eos": True, "background": True}


def test_a_response_is_returned_again_until_it_is_deleted(server: Server) -> None:
    client = server.client()
    made = client.responses.create(**ASKED)
    assert made.model_dump()["store"] is True and client.responses.retrieve(made.id) == made
    with client.responses.stream(**ASKED) as stream:
        list(stream)
        streamed = stream.get_final_response()
    found = client.responses.retrieve(streamed.id)
    assert found.output_text == streamed.output_text == made.output_text and found.usage == streamed.usage
    assert server.get(f"/v1/responses/{made.id}?stream=true").status_code == 400
    client.responses.delete(made.id)
    private = client.responses.create(**ASKED, store=False)
    for name in (made.id, private.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match="Response with id .* not found."):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(name)


def summary(response: Response) -> tuple[int, str]:
    """Return the tokens of the prompt and the text of the answer."""
    assert response.usage is not None
    return response.usage.input_tokens, response.output_text


def test_a_conversation_continues(server: Server) -> None:
    """The same tokens go in, and the same come out, as for the whole conversation."""
    client = server.client()
    first = client.responses.create(**ASKED, instructions="Be short.")
    output = [item.model_dump(exclude_none=True) for item in first.output]
    turns: list[Any] = [{"role": "user", "content": QUESTION}, *output]
    for text in ("And with 5 more?", "And without apples?"):  # two that continue the same response
        second = client.responses.create(**{**ASKED, "input": text}, previous_response_id=first.id)
        whole = client.responses.create(**{**ASKED, "input": [*turns, {"role": "user", "content": text}]})
        assert second.previous_response_id == first.id and whole.previous_response_id is None
        assert summary(second) == summary(whole)
    third = client.responses.create(**{**ASKED, "input": "Why?"}, previous_response_id=second.id)
    more: list[Any] = [
        {"role": "user", "content": text},
        *[item.model_dump(exclude_none=True) for item in whole.output],
    ]
    whole = client.responses.create(**{**ASKED, "input": [*turns, *more, {"role": "user", "content": "Why?"}]})
    assert summary(third) == summary(whole)


def test_calls_are_in_the_conversation(server: Server) -> None:
    client = server.client()
    called = client.responses.create(**ASKED, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    answer = client.responses.create(**{**ASKED, "input": [result]}, previous_response_id=called.id)
    whole: list[Any] = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    assert summary(answer) == summary(client.responses.create(**{**ASKED, "input": whole}))
    with pytest.raises(openai.BadRequestError, match="is not that of an earlier function_call"):
        client.responses.create(**{**ASKED, "input": [{**result, "call_id": "x"}]}, previous_response_id=called.id)


def wait_for(server: Server, name: str, status: str) -> Response:
    until = time.monotonic() + 30
    while (found := server.client().responses.retrieve(name)).status != status:
        assert time.monotonic() < until and found.status in ("queued", "in_progress"), found
        time.sleep(0.01)
    return found


def test_responses_in_the_background(server: Server) -> None:
    client = server.client()
    made = client.responses.create(**ASKED, background=True)
    assert (made.status, made.output, made.background) == ("queued", [], True)
    found = wait_for(server, made.id, "completed")
    assert found.output_text == client.responses.create(**ASKED).output_text
    assert client.responses.cancel(made.id).status == "completed"
    running = server.post("/v1/responses", LONG).json()["id"]
    wait_for(server, running, "in_progress")
    refused = server.post("/v1/responses", {**ASKED, "previous_response_id": running})
    assert refused.status_code == 400 and "has not ended" in refused.text
    assert client.responses.cancel(running).status == "cancelled"
    server.wait_until_idle()
    assert client.responses.retrieve(running).status == "cancelled"
    dropped = server.post("/v1/responses", LONG).json()["id"]
    client.responses.delete(dropped)
    server.wait_until_idle()
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(client.responses.create(**ASKED).id)


def test_a_response_that_fails_in_the_background(serve_with: Callable[..., Server]) -> None:
    server = serve_with(request_timeout=0.2)
    found = wait_for(server, server.post("/v1/responses", LONG).json()["id"], "failed")
    assert found.error is not None and "request_timeout" in found.error.message


def test_a_server_that_stores_nothing(serve_with: Callable[..., Server]) -> None:
    server = serve_with(max_stored_responses=0)
    answer = server.post("/v1/responses", {**ASKED, "store": True})
    assert answer.json()["store"] is False and "store" in answer.headers["warning"]
    assert server.get(f"/v1/responses/{answer.json()['id']}").status_code == 404
    for field in ({"previous_response_id": answer.json()["id"]}, {"background": True}):
        refused = server.post("/v1/responses", {**ASKED, **field})
        assert refused.status_code == 400 and "max_stored_responses=0" in refused.text


def test_a_stored_response_keeps_its_id(server: Server) -> None:
    first, second = [server.post("/v1/responses", {**ASKED, "request_id": "mine"}).json() for _ in range(2)]
    assert first["id"] == "resp_mine" != second["id"]
    assert server.get("/v1/responses/resp_mine").json() == first


def ids(store: ResponseStore, names: str) -> str:
    found = ""
    for name in names:
        try:
            store.get(name)
        except ApiError:
            continue
        found += name
    return found


def test_limits_of_the_store() -> None:
    store = ResponseStore(3, max_bytes=100)
    for name in "abcd":
        store.put(StoredResponse({"id": name}, num_bytes=10))
    assert ids(store, "abcd") == "bcd"
    store.get("b")
    store.put(StoredResponse({"id": "e"}, num_bytes=10))
    assert ids(store, "abcde") == "bde"
    store.put(StoredResponse({"id": "f"}, num_bytes=85))
    assert ids(store, "abcdef") == "ef"
    store.put(StoredResponse({"id": "g"}, num_bytes=101))
    assert ids(store, "efg") == ""

    async def running() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        store.put(StoredResponse({"id": "h"}, num_bytes=90, task=task))
        store.put(StoredResponse({"id": "i"}, num_bytes=20))
        assert ids(store, "hi") == "h"
        store.delete("h")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ids(store, "h") == ""

    asyncio.run(running())
