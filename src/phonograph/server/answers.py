"""What answers have in common: ids, usage, and chunks of a stream, which are written many thousand times a second."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phonograph.server.calls import Call
from phonograph.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer at once, or with `stream` as events, each a chunk of it.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
"""What the OpenAPI document says of completions and chats."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that an answer and all chunks of its stream begin with."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


def answer_id(prefix: str, request_id: str | None) -> str:
    """The client's own id where it gave one."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"


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

    def __init__(self, head: AnswerHead) -> None:
        self._begin = "data: " + to_json(head.fields())[:-1] + ',"choices":['

    def chunk(self, choice: Mapping[str, Any] | None, usage: Mapping[str, Any] | None = None) -> bytes:
        """One event. Without a choice it is the last one, of the usage alone."""
        middle = "" if choice is None else to_json(choice)
        end = "]}\n\n" if usage is None else f'],"usage":{to_json(usage)}}}\n\n'
        return (self._begin + middle + end).encode()


def error_chunk(error: ApiError) -> bytes:
    """The event of an answer that ends before it is complete."""
    return f"data: {to_json(error.body())}\n\n".encode() + DONE


to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""As JSONResponse has it; made once, which for a chunk is a good part of its cost."""


class EventStream(Response):
    """Sends events as they come, and closes the call that they are of, however it ends."""

    def __init__(self, events: AsyncIterator[bytes], call: Call, headers: Mapping[str, str]) -> None:
        # Proxies must neither keep the events nor wait for more of them (the second is nginx's word for it).
        streamed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, {**headers, **streamed}, "text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._call.close()
