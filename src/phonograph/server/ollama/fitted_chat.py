"""Conversations that are longer than the context: the oldest messages are left out, as Ollama's clients expect."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from phonograph.server.chat.chat_request import ChatRequest
from phonograph.server.chat.conversation import Message
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import ApiError

TOO_LONG = "context_length_exceeded"
"""Code of the error of a prompt that does not fit."""


def fitted_chat(serving: Serving, request: ChatRequest, context: int) -> ChatRequest:
    """Shorten a request whose prompt does not fit a context, and leave room for an answer.

    Messages of the system stay. The others stay from a message of the user on, because templates require one first and
    the result of a tool needs its call. If the last turn does not fit alone, the last tokens of it stay.

    Args:
        serving: the server.
        request: a request that is too long.
        context: tokens of prompt and answer together.
    """
    most = max(context - kept_room(request.max_tokens, context), 1)
    starts = [index for index, message in enumerate(request.messages) if message["role"] == "user"]
    tails = [replace(request, messages=_from(request.messages, start)) for start in starts]
    # The prompt is the shorter, the later the messages begin.
    found = bisect_left(tails, True, key=lambda tail: _fits(serving, tail, most))
    if found < len(tails):
        return tails[found]
    return replace(tails[-1] if tails else request, truncate=most)


def kept_room(max_tokens: int | None, context: int) -> int:
    """Return the tokens that are left to an answer: as requested, up to half of the context, else a quarter."""
    return max(min(max_tokens or context // 4, context // 2), 1)


def _from(messages: list[Message], start: int) -> list[Message]:
    return [message for message in messages[:start] if message["role"] == "system"] + messages[start:]


def _fits(serving: Serving, request: ChatRequest, most: int) -> bool:
    try:
        return len(serving.encode_chat(request)) <= most
    except ApiError as error:
        if error.code != TOO_LONG:
            raise
        return False
