"""Parts of an answer as a message of OpenAI's chats, or as a delta of one."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from phonograph.text.formats.answer_parts import Found, ToolDelta

_SHORT_ID = 9
"""Characters of a call's id that Mistral's templates require."""


def call_id(prefix: str, *, short: bool) -> str:
    """Return an id for a call. A short one has no prefix."""
    name = uuid.uuid4().hex
    return name[:_SHORT_ID] if short else f"{prefix}_{name[:24]}"


def delta_of(found: Found, *, short_ids: bool = False) -> dict[str, Any]:
    """Return the delta of new parts; empty if there is nothing to show."""
    delta: dict[str, Any] = {"reasoning_content": found.reasoning} if found.reasoning else {}
    if found.content:
        delta["content"] = found.content
    if found.calls:
        delta["tool_calls"] = [_written_call(call, short_ids) for call in found.calls]
    return delta


def message_of(found: Found, *, short_ids: bool = False) -> dict[str, Any]:
    """Return the message of a whole answer, without its role."""
    message: dict[str, Any] = {"content": found.content or (None if found.calls else "")}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message["tool_calls"] = _joined_calls(found.calls, short_ids)
    return message


def _joined_calls(deltas: Iterable[ToolDelta], short_ids: bool) -> list[dict[str, Any]]:
    """Return whole calls from their deltas."""
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(_written_call(delta, short_ids))
            del calls[-1]["index"]
            arguments.append([])
        arguments[-1].append(delta.arguments)
    for call, parts in zip(calls, arguments, strict=True):
        key = "input" if call["type"] == "custom" else "arguments"
        call[call["type"]][key] = "".join(parts)
    return calls


def _written_call(delta: ToolDelta, short_ids: bool) -> dict[str, Any]:
    kind, key = ("custom", "input") if delta.custom else ("function", "arguments")
    if delta.name is None:
        return {"index": delta.index, kind: {key: delta.arguments}}
    return {
        "index": delta.index,
        "id": call_id("call", short=short_ids),
        "type": kind,
        kind: {"name": delta.name, key: delta.arguments},
    }
