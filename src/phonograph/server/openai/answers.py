"""Common parts of answers: heads, usage, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic_core import to_json

from phonograph.engine.process.calls import Call, Delta, Sample
from phonograph.server.http.api_errors import ApiError
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.server.openai.protocol import GenerationBody

DONE = b"data: [DONE]\n\n"
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer at once, or with `stream` as events, each a chunk of it.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
"""Responses of completions and chats, for the OpenAPI document."""


class Answer(Protocol):
    """Writer of one endpoint's answer.

    head: fields with which the answer and all chunks of its stream begin
    """

    head: dict[str, Any]

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without streaming."""
        ...

    def usage(self) -> dict[str, Any]:
        """Return the tokens of the call so far."""
        ...

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the next chunks of a stream; empty if there is nothing to show yet."""
        ...


def answer_head(prefix: str, kind: str, model: str, request_id: str | None) -> dict[str, Any]:
    """Return the head of an answer. Its id contains the request's."""
    name = f"{prefix}-{request_id or REQUEST_ID.get() or uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage_of(call: Call, *, num_completion_tokens: int | None = None) -> dict[str, Any]:
    """Return the tokens of a call so far."""
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


def timings_of(call: Call) -> dict[str, float]:
    """Return the times of a call that has ended, with vLLM's names; times that are unknown are left out.

    They go from the call's first sample that was admitted to its last token, in milliseconds.
    """
    samples = call.samples
    admitted = min((one.admitted for one in samples if one.admitted is not None), default=None)
    first = min((one.first_token for one in samples if one.first_token is not None), default=None)
    last = max((one.last_token for one in samples if one.last_token is not None), default=None)
    if admitted is None or first is None or last is None:
        return {}
    count = sum(len(one.token_ids) for one in samples)
    found = {
        "time_to_first_token_ms": (first - admitted) * 1e3,
        "generation_time_ms": (last - first) * 1e3,
        "queue_time_ms": (admitted - call.prompts[0].opened) * 1e3,
    }
    if count > len(samples):
        found["mean_itl_ms"] = (last - first) * 1e3 * len(samples) / (count - len(samples))
    if last > admitted:
        found["tokens_per_second"] = count / (last - admitted)
    return found


def _usage_before(usage: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """Return the usage without the tokens of a sample of which no text was sent."""
    num_unsent = len(sample.token_ids)
    fewer = {name: usage[name] - num_unsent for name in ("completion_tokens", "total_tokens")}
    return {**usage, **fewer}


class TokenIdAnswer:
    """An answer with the token ids of its prompts and choices, where vLLM has them; see `Answer`.

    A chat has the ids of its prompt beside the choices, and a stream in its first chunk. A completion has them in each
    choice. A chunk has the ids of the tokens since the chunk before.

    first_fields: fields of the first chunk beside the head
    """

    def __init__(self, answer: Answer, call: Call, *, prompt_only: bool) -> None:
        self.head = answer.head
        self._answer = answer
        self._call = call
        self._prompt_only = prompt_only
        self._is_chat = answer.head["object"].startswith("chat.")
        self.first_fields = {"prompt_token_ids": call.prompts[0].token_ids} if self._is_chat else {}
        self._begun: set[int] = set()
        self._unsent: dict[int, list[int]] = {}

    def whole(self) -> dict[str, Any]:
        answer = self._answer.whole()
        for choice, sample in zip(answer["choices"], self._call.samples, strict=True):
            self._add(choice, sample, sample.token_ids)
        return {**answer, **self.first_fields}

    def usage(self) -> dict[str, Any]:
        return self._answer.usage()

    def choices(self, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        choices = self._answer.choices(sample, delta)
        # A delta may have no chunk, while the parser of a format waits for more, or several.
        token_ids = self._unsent.pop(sample.index, []) + delta.token_ids
        if not choices:
            self._unsent[sample.index] = token_ids
            return choices
        for choice in choices:
            self._add(choice, sample, token_ids if choice is choices[-1] else [])
        return choices

    def _add(self, choice: dict[str, Any], sample: Sample, token_ids: list[int]) -> None:
        choice["token_ids"] = [] if self._prompt_only else token_ids
        if not self._is_chat and sample.index not in self._begun:
            place = sample.index * len(self._call.prompts) // len(self._call.samples)
            choice["prompt_token_ids"] = self._call.prompts[place].token_ids
        self._begun.add(sample.index)


class ChunkWriter:
    """Writes chunks with a common head, which is encoded once. The first chunk has `first_fields` too."""

    def __init__(self, head: Mapping[str, Any], first_fields: Mapping[str, Any]) -> None:
        self._begin = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._first = b"data: " + to_json({**head, **first_fields})[:-1] + b',"choices":['

    def chunk(
        self,
        choice: Mapping[str, Any] | None,
        usage: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return one event. Without a choice it is the last chunk, with the usage and perhaps metrics."""
        middle = b"" if choice is None else to_json(choice, inf_nan_mode="null")
        end = b"]}\n\n" if usage is None else b'],"usage":' + to_json(usage) + b"}\n\n"
        if metrics is not None:
            end = end[:-3] + b',"metrics":' + to_json(metrics) + b"}\n\n"
        begin, self._first = self._first, self._begin
        return begin + middle + end


class ChunkStream:
    """Writes an answer of chats or completions, whose events are chunks of it; an `AnswerWriter`.

    Args:
        answer: the answer.
        call: the call of the engine.
        body: fields of the request.
        timed: the answer, or the last chunk with the usage, has the times of the request.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, call: Call, body: GenerationBody, *, timed: bool = False) -> None:
        first_fields: Mapping[str, Any] = {}
        if body.return_token_ids:
            answer = TokenIdAnswer(answer, call, prompt_only=body.requested_tokens() == 0)
            first_fields = answer.first_fields
        self.name: str = answer.head["id"]
        self._answer = answer
        self._timed = call if timed else None
        self._chunk = ChunkWriter(answer.head, first_fields).chunk
        self._continuous_usage = body.continuous_usage
        self._include_usage = body.include_usage

    def whole(self) -> dict[str, Any]:
        """Return the answer. Fields of vLLM that it lacks are null, so that clients can read them."""
        answer = self._answer.whole()
        choices = answer["choices"]
        for part in [answer] if answer["object"].startswith("chat.") else choices:
            part |= {name: part.get(name) for name in ("prompt_logprobs", "prompt_token_ids")}
        for choice in choices:
            choice.setdefault("token_ids", None)
        return answer if self._timed is None else {**answer, "metrics": timings_of(self._timed)}

    def write(self, changed: list[Sample]) -> bytes:
        usage = self._answer.usage() if self._continuous_usage else None
        write, choices = self._chunk, self._answer.choices
        if usage is None:
            return b"".join([write(choice) for sample in changed for choice in choices(sample, sample.take())])
        return b"".join(
            [
                write(choice, _usage_before(usage, sample) if "role" in choice.get("delta", ()) else usage)
                for sample in changed
                for choice in choices(sample, sample.take())
            ]
        )

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self._chunk(None, self._answer.usage(), None if self._timed is None else timings_of(self._timed)) + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + to_json(error.body()) + b"\n\n" + DONE
