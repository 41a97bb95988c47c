"""Parts of an answer as Ollama's messages or responses, at once or as the lines of a stream."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from pydantic_core import to_json

from phonograph.core.request import FinishReason
from phonograph.server.chat.answer_items import AnswerItem, AnswerItems, ItemEvent
from phonograph.server.chat.chat_parts import TokenUsage
from phonograph.server.chat.parts_stream import Logprobs
from phonograph.server.http.api_errors import ApiError, ollama_error
from phonograph.server.openai.chat_message import call_id
from phonograph.text.formats.answer_parts import Found


class Durations(NamedTuple):
    """Seconds of a request: all of it, up to the first token, and from there to the last."""

    total: float
    prompt: float
    answer: float


class OllamaWriter:
    """Writes one answer, a `PartsWriter`.

    Args:
        name: id of the request.
        model: the request's name of the model.
        form: "message" for chats, "response" for generations.
        durations: returns the times of the request.
        short_ids: ids of calls have the length that Mistral's templates require.
    """

    media_type = "application/x-ndjson"

    def __init__(
        self,
        name: str,
        model: str,
        form: Literal["message", "response"],
        durations: Callable[[], Durations],
        *,
        short_ids: bool = False,
    ) -> None:
        self.name = name
        self._model = model
        self._form = form
        self._durations = durations
        self._short_ids = short_ids
        self._items = AnswerItems()
        self._num_calls = 0

    def begin(self, usage: TokenUsage) -> bytes:
        """Return nothing: a stream begins with its first part."""
        return b""

    def write(self, found: Found, logprobs: Logprobs) -> bytes:
        """Return the line of new parts, if there are any."""
        return self._line([*self._items.read(found)], logprobs)

    def end(self, reason: FinishReason, stop: int | str | None, usage: TokenUsage) -> bytes:
        """Return the last call, and the line with the reason of the end and the counts."""
        line = self._line([*self._items.end()], [])
        return line + _encoded({**self._head(), **self._parts("", "", []), **self._done(reason, usage)})

    def error(self, error: ApiError) -> bytes:
        """Return the line of an answer that ends with an error."""
        return _encoded(ollama_error(error))

    def whole(
        self, found: Found, logprobs: Logprobs, reason: FinishReason, stop: int | str | None, usage: TokenUsage
    ) -> dict[str, Any]:
        """Return the answer at once."""
        events = [*self._items.read(found), *self._items.end()]
        parts = self._parts(*_grown(events), self._calls(events))
        more = {"logprobs": logprobs} if logprobs else {}
        return {**self._head(), **parts, **more, **self._done(reason, usage)}

    def _line(self, events: list[ItemEvent], logprobs: Logprobs) -> bytes:
        (text, thinking), calls = _grown(events), self._calls(events)
        if not (text or thinking or calls or logprobs):
            return b""
        more = {"logprobs": logprobs} if logprobs else {}
        return _encoded({**self._head(), **self._parts(text, thinking, calls), "done": False, **more})

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}

    def _parts(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thoughts = {"thinking": thinking} if thinking else {}
        if self._form == "response":
            return {"response": text, **thoughts}
        found = {"role": "assistant", "content": text, **thoughts}
        return {"message": {**found, "tool_calls": calls} if calls else found}

    def _calls(self, events: list[ItemEvent]) -> list[dict[str, Any]]:
        """Return the calls that have ended; the protocol has no parts of calls."""
        return [self._call(event.item) for event in events if event.change == "end" and event.item.kind == "call"]

    def _call(self, item: AnswerItem) -> dict[str, Any]:
        self._num_calls += 1
        function = {"index": self._num_calls - 1, "name": item.name, "arguments": item.arguments}
        return {"id": call_id("call", short=self._short_ids), "function": function}

    def _done(self, reason: FinishReason, usage: TokenUsage) -> dict[str, Any]:
        total, prompt, answer = (round(seconds * 1e9) for seconds in self._durations())
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": prompt,
            "eval_count": usage.completion,
            "eval_duration": answer,
        }


def _grown(events: list[ItemEvent]) -> tuple[str, str]:
    """Return the new text and the new reasoning."""
    grown = [event for event in events if event.change == "grow"]
    text = "".join([event.text for event in grown if event.item.kind == "text"])
    return text, "".join([event.text for event in grown if event.item.kind == "reasoning"])


def _encoded(line: dict[str, Any]) -> bytes:
    return to_json(line) + b"\n"
