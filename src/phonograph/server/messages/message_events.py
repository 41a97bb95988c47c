"""Parts of an answer as a message of Anthropic, at once or as the events of its stream."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from phonograph.core.request import FinishReason
from phonograph.server.chat.answer_items import AnswerItem, AnswerItems, ItemEvent
from phonograph.server.chat.chat_parts import TokenUsage
from phonograph.server.chat.parts_stream import Logprobs
from phonograph.server.http.api_errors import ApiError, messages_error
from phonograph.server.openai.chat_message import call_id
from phonograph.text.formats.answer_parts import Found

SIGNATURE = "unsigned"
"""Signature of thinking. It is not checked when it comes back."""


class MessageWriter:
    """Writes one message, a `PartsWriter`.

    Args:
        name: id of the message.
        model: name of the model.
        shows_thinking: thinking is part of the answer.
        is_cut: the maximum of tokens was reduced to fit the context.
        short_ids: ids of calls have the length that Mistral's templates require.
    """

    media_type = "text/event-stream"

    def __init__(
        self, name: str, model: str, *, shows_thinking: bool = True, is_cut: bool = False, short_ids: bool = False
    ) -> None:
        self.name = name
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._is_cut = is_cut
        self._short_ids = short_ids
        self._items = AnswerItems()

    def begin(self, usage: TokenUsage) -> bytes:
        """Return the events before all parts."""
        none_sent = _usage(usage._replace(completion=0))
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": none_sent}
        return _event("message_start", message=message) + _event("ping")

    def write(self, found: Found, logprobs: Logprobs) -> bytes:
        """Return the events of new parts. The protocol has no log-probabilities."""
        if not self._shows_thinking:
            found.reasoning = ""
        return b"".join([self._item_event(event) for event in self._items.read(found)])

    def end(self, reason: FinishReason, stop: int | str | None, usage: TokenUsage) -> bytes:
        """Return the events after all parts."""
        ended = b"".join([self._item_event(event) for event in self._items.end()])
        delta = self._stop(reason, stop)
        return ended + _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        """Return the event of an answer that ends with an error."""
        return b"event: error\ndata: " + to_json(messages_error(error)) + b"\n\n"

    def whole(
        self, found: Found, logprobs: Logprobs, reason: FinishReason, stop: int | str | None, usage: TokenUsage
    ) -> dict[str, Any]:
        """Return the message at once."""
        self.write(found, logprobs)
        content = [self._block(item, whole=True) for item in self._items.items]
        return {**self._head, "content": content, **self._stop(reason, stop), "usage": _usage(usage)}

    def _stop(self, reason: FinishReason, stop: int | str | None) -> dict[str, Any]:
        sequence = stop if reason == "stop" and isinstance(stop, str) else None
        if reason == "length":
            name = "model_context_window_exceeded" if self._is_cut else "max_tokens"
        elif sequence is not None:
            name = "stop_sequence"
        else:
            name = "tool_use" if self._items.has_calls else "end_turn"
        return {"stop_reason": name, "stop_sequence": sequence}

    def _item_event(self, event: ItemEvent) -> bytes:
        item = event.item
        if event.change == "begin":
            return _event("content_block_start", index=item.index, content_block=self._block(item, whole=False))
        if event.change == "grow":
            return _event("content_block_delta", index=item.index, delta=_delta(item, event.text))
        stop = _event("content_block_stop", index=item.index)
        if item.kind != "reasoning":
            return stop
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        return _event("content_block_delta", index=item.index, delta=delta) + stop

    def _block(self, item: AnswerItem, *, whole: bool) -> dict[str, Any]:
        text = item.text if whole else ""
        if item.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE if whole else ""}
        if item.kind == "text":
            return {"type": "text", "text": text}
        return {
            "type": "tool_use",
            "id": call_id("toolu", short=self._short_ids),
            "name": item.name,
            "input": item.arguments if whole else {},
        }


def _delta(item: AnswerItem, text: str) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if item.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


def _usage(usage: TokenUsage) -> dict[str, Any]:
    """Return the tokens in Anthropic's form, whose `input_tokens` are those that were not in the cache."""
    found: dict[str, Any] = {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
    if usage.reasoning is not None:
        found["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return found
