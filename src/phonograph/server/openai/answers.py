"""What answers have in common: ids, usage, and chunks of a stream, which are written many thousand times a second."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic_core import to_json

from phonograph.engine.process.calls import Call, Delta, Sample
from phonograph.server.http.api_errors import ApiError

DONE = b"data: [DONE]\n\n"
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer at once, or with `stream` as events, each a chunk of it.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
"""What the OpenAPI document says of completions and chats."""


class Answer(Protocol):
    """How one endpoint writes its answer.

    head: the fields that the answer and all chunks of its stream begin with
    """

    head: dict[str, Any]

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        ...

    def usage(self) -> dict[str, Any]:
        """Tokens of the call so far."""
        ...

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the next chunks of a stream; none where there is nothing to show yet."""
        ...


def answer_head(prefix: str, kind: str, model: str, request_id: str | None) -> dict[str, Any]:
    """Return the head of an answer. Its id has the client's own id where it gave one."""
    name = f"{prefix}-{request_id or uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage_of(call: Call, *, num_completion_tokens: int | None = None) -> dict[str, Any]:
    """Tokens of a call so far."""
    prompt = sum(len(prompt.token_ids) for prompt in call.prompts)
    cached = sum(prompt.num_cached_tokens for prompt in call.prompts)
    if num_completion_tokens is None:
        num_completion_tokens = sum(len(sample.token_ids) for sample in call.samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_completion_tokens,
        "total_tokens": prompt + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChunkWriter:
    """Writes chunks that differ in their choices, and at times in their usage, from one head that is encoded once."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._begin = b"data: " + to_json(head)[:-1] + b',"choices":['

    def chunk(self, choice: Mapping[str, Any] | None, usage: Mapping[str, Any] | None = None) -> bytes:
        """One event. Without a choice it is the last one, of the usage alone."""
        middle = b"" if choice is None else to_json(choice, inf_nan_mode="null")
        end = b"]}\n\n" if usage is None else b'],"usage":' + to_json(usage) + b"}\n\n"
        return self._begin + middle + end


def error_chunk(error: ApiError) -> bytes:
    """The event of an answer that ends before it is complete."""
    return b"data: " + to_json(error.body()) + b"\n\n" + DONE
