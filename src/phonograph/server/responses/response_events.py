"""Parts of an answer as a response of OpenAI, at once or as the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import to_json

from phonograph.core.request import FinishReason
from phonograph.server.chat.answer_items import AnswerItem, AnswerItems, ItemEvent
from phonograph.server.chat.chat_parts import TokenUsage
from phonograph.server.chat.parts_stream import Logprobs
from phonograph.server.http.api_errors import ApiError
from phonograph.server.openai.chat_message import call_id
from phonograph.server.responses.response_input import sealed
from phonograph.text.formats.answer_parts import Found

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
"""Beginnings of the ids of items."""


class ResponseWriter:
    """Writes one response, a `PartsWriter`.

    Args:
        head: fields of the response that are known before its answer, with its id.
        seals: reasoning has `encrypted_content` too.
        short_ids: ids of calls have the length that Mistral's templates require.
        namespaces: namespace and name of functions, by their names in the prompt.
        keep: called with the response when it has ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        head: dict[str, Any],
        *,
        seals: bool = False,
        short_ids: bool = False,
        namespaces: Mapping[str, tuple[str, str]] = {},
        keep: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.name: str = head["id"]
        self._head = head
        self._seals = seals
        self._short_ids = short_ids
        self._namespaces = namespaces
        self._keep = keep
        self._ended: dict[str, Any] = {}
        self._items = AnswerItems()
        self._names: list[tuple[str, str]] = []  # of each item: its id, and the id of its call
        self._output: list[dict[str, Any]] = []
        self._logprobs: Logprobs = []  # of the text that is written
        self._waiting: Logprobs = []  # of tokens whose text has not come yet
        self._number = 0

    def begin(self, usage: TokenUsage) -> bytes:
        """Return the events before all parts. The usage is known at the end."""
        response = self.unfinished("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def unfinished(self, status: str) -> dict[str, Any]:
        """Return the response before its end, with a status."""
        return {**self._response(status), "output": []}

    def write(self, found: Found, logprobs: Logprobs) -> bytes:
        """Return the events of new parts. Log-probabilities are those of the text; others are dropped."""
        self._waiting += logprobs
        events = b"".join([self._item_event(event) for event in self._items.read(found)])
        if found.reasoning or found.calls:
            self._waiting = []
        return events

    def end(self, reason: FinishReason, stop: int | str | None, usage: TokenUsage) -> bytes:
        """Return the events after all parts."""
        status = "incomplete" if reason == "length" else "completed"
        events = b"".join([self._item_event(event, status) for event in self._items.end()])
        self._ended = self._response(status, usage)
        self._keep(self._ended)
        return events + self._event(f"response.{status}", response=self._ended)

    def error(self, error: ApiError) -> bytes:
        """Return the event of an answer that ends with an error."""
        return self._event("response.failed", response=self.failed(error))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return a response that ends with an error."""
        return {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}

    def whole(
        self, found: Found, logprobs: Logprobs, reason: FinishReason, stop: int | str | None, usage: TokenUsage
    ) -> dict[str, Any]:
        """Return the response at once."""
        self.write(found, logprobs)
        self.end(reason, stop, usage)
        return self._ended

    def _response(self, status: str, usage: TokenUsage | None = None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output,
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _item_event(self, event: ItemEvent, status: str = "completed") -> bytes:
        item = event.item
        if event.change == "begin":
            prefix = "ctc" if item.custom else _PREFIXES[item.kind]
            self._names.append((f"{prefix}_{uuid.uuid4().hex}", call_id("call", short=self._short_ids)))
            self._logprobs = []
            added = self._event(
                "response.output_item.added", output_index=item.index, item=self._item(item, "in_progress")
            )
            return added if item.kind == "call" else added + self._part_event("added", item)
        place = {"item_id": self._names[item.index][0], "output_index": item.index}
        if event.change == "grow":
            return self._delta(item, event.text, place)
        if item.custom:
            data = self._event("response.custom_tool_call_input.done", **place, input=item.text)
        elif item.kind == "call":
            about = {"name": self._function(item)["name"], "arguments": item.text}
            data = self._event("response.function_call_arguments.done", **place, **about)
        else:
            data = self._text_done(item, place) + self._part_event("done", item)
        done = self._item(item, status)
        self._output.append(done)
        return data + self._event("response.output_item.done", output_index=item.index, item=done)

    def _delta(self, item: AnswerItem, text: str, place: dict[str, Any]) -> bytes:
        if item.custom:
            return self._event("response.custom_tool_call_input.delta", **place, delta=text)
        if item.kind == "call":
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        logprobs, self._waiting = self._waiting, []
        self._logprobs += logprobs
        return self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs)

    def _text_done(self, item: AnswerItem, place: dict[str, Any]) -> bytes:
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.done", **place, content_index=0, text=item.text)
        logprobs = self._logprobs
        return self._event("response.output_text.done", **place, content_index=0, text=item.text, logprobs=logprobs)

    def _part_event(self, change: str, item: AnswerItem) -> bytes:
        name, _ = self._names[item.index]
        kind = f"response.content_part.{change}"
        return self._event(kind, item_id=name, output_index=item.index, content_index=0, part=self._part(item))

    def _part(self, item: AnswerItem) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": self._logprobs}

    def _function(self, item: AnswerItem) -> dict[str, Any]:
        if item.name not in self._namespaces:
            return {"name": item.name}
        namespace, name = self._namespaces[item.name]
        return {"namespace": namespace, "name": name}

    def _item(self, item: AnswerItem, status: str) -> dict[str, Any]:
        name, call = self._names[item.index]
        head = {"id": name, "status": status}
        if item.custom:
            return {**head, "type": "custom_tool_call", "call_id": call, **self._function(item), "input": item.text}
        if item.kind == "call":
            return {**head, "type": "function_call", "call_id": call, **self._function(item), "arguments": item.text}
        content = [] if status == "in_progress" else [self._part(item)]
        if item.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        seal = sealed(item.text) if self._seals and content else None
        return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": seal}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }
