"""Ollama's own client with this server: its calls, streams, tools, schemas and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from servers import QUESTION, Server

from phonograph.core.structured_outputs import StructuredOutputs

ollama = pytest.importorskip("ollama", reason="needs ollama of the extra dev")

TURNS = "{# <tool_call> #}{% for message in messages %}<|user|>{{ message.content or '' }}{% endfor %}<|assistant|>"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}]}
GREEDY = {"temperature": 0, "num_predict": 60}


def add(a: int) -> int:
    """Add one.

    Args:
        a (int): number.
    """
    return a + 1


def client(server: Server, **settings: Any) -> Any:
    return ollama.Client(host=server.url, timeout=30, **settings)


def test_chats_prompts_and_streams(server: Server) -> None:
    found = client(server).chat(**ASK, options=GREEDY)
    parts = list(client(server).chat(**ASK, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == found.message.content
    assert parts[-1].done and found.eval_count == parts[-1].eval_count and found.total_duration > 0
    said = client(server).generate("demo", QUESTION, options=GREEDY)
    parts = list(client(server).generate("demo", QUESTION, options=ollama.Options(**GREEDY), stream=True))
    assert "".join(part.response for part in parts) == said.response == found.message.content
    likely = client(server).chat(**ASK, options=GREEDY, logprobs=True, top_logprobs=2)
    assert len(likely.logprobs) == likely.eval_count and len(likely.logprobs[0].top_logprobs) == 2


def test_schemas(server: Server) -> None:
    class Answer(BaseModel):
        a: Literal["x", "y"]

    found = client(server).chat(**ASK, format=Answer.model_json_schema(), options=GREEDY)
    assert Answer.model_validate_json(found.message.content)


def test_calls_with_results(serve_with: Callable[..., Server]) -> None:
    text = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    server = serve_with({"structured_outputs": StructuredOutputs(choice=[text])}, chat_template=TURNS)
    asked = {**ASK, "tools": [add], "options": {"num_predict": 200}}
    found = client(server).chat(**asked)
    (call,) = found.message.tool_calls
    assert found.message.content == "I add. " and (call.function.name, call.function.arguments) == ("add", {"a": 1})
    streamed = [part.message.tool_calls for part in client(server).chat(**asked, stream=True)]
    assert [calls[0].function for calls in streamed if calls] == [call.function]
    result = {"role": "tool", "tool_name": "add", "content": str(add(**call.function.arguments))}
    assert client(server).chat(**{**asked, "messages": [*ASK["messages"], found.message, result]}).message.content


def test_models(server: Server) -> None:
    (listed,) = client(server).list().models
    (running,) = client(server).ps().models
    shown = client(server).show(listed.model)
    assert listed.model == running.model == "demo:latest" and listed.size == running.size > 1000
    assert running.context_length == 1024 and "completion" in shown.capabilities
    assert shown.modelinfo["general.parameter_count"] > 1000 and shown.details == listed.details


def test_errors(server: Server, serve_with: Callable[..., Server]) -> None:
    for call, status, problem in (
        (lambda: client(server).chat("llama", ASK["messages"]), 404, "the model 'llama' does not exist"),
        (lambda: client(server).embed("demo", "a"), 404, "makes embeddings"),
        (lambda: client(server).pull("llama"), 404, "phonograph serve"),
        (lambda: list(client(server).chat(**ASK, options={"top_p": 7}, stream=True)), 400, "options.top_p"),
    ):
        with pytest.raises(ollama.ResponseError, match=problem) as error:
            call()
        assert error.value.status_code == status
    closed = serve_with(api_key=("KEY",))
    with pytest.raises(ollama.ResponseError, match="API key"):
        client(closed).list()
    assert client(closed, headers={"authorization": "Bearer KEY"}).list().models
