"""Reasoning, content and tool calls of one sample in OpenAI's format: in a message, or in deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from phonograph.server.chat.tools import ToolChoice
from phonograph.text.formats.answer_parser import AnswerParser
from phonograph.text.formats.answer_parts import Found, ToolDelta, ToolParser
from phonograph.text.formats.find_formats import ToolFormat
from phonograph.text.formats.json_calls import JsonCalls, NamedCall
from phonograph.text.formats.reasoning import ReasoningReader

_SHORT_ID = 9
"""Characters of a call's id that Mistral's templates require."""


class AnswerReader:
    """Reads the text of one sample. `has_calls` is True if its finish reason is "tool_calls".

    Args:
        choice: tools of the request, or None.
        form: form of the model's own calls, if the choice leaves calls to the model.
        reasoning: reader of the reasoning, or None.
    """

    def __init__(self, choice: ToolChoice | None, form: ToolFormat | None, reasoning: ReasoningReader | None) -> None:
        self._choice = choice
        self._short_ids = form is not None and form.short_ids
        self._parser = AnswerParser(reasoning, None if choice is None else _parser(choice, form))

    @property
    def has_calls(self) -> bool:
        # With a named function the finish reason is "stop", as at OpenAI.
        return self._parser.num_calls > 0 and self._choice is not None and self._choice.form != "named"

    def delta(self, text: str, *, ended: bool) -> dict[str, Any]:
        """Return the delta of new text; empty if there is nothing to show."""
        found = self._read(text, ended)
        delta: dict[str, Any] = {"reasoning_content": found.reasoning} if found.reasoning else {}
        if found.content:
            delta["content"] = found.content
        calls = [written_call(call, short_id=self._short_ids) for call in found.calls]
        return {**delta, "tool_calls": calls} if calls else delta

    def message(self, text: str) -> dict[str, Any]:
        """Return reasoning, content and calls of the whole text."""
        found = self._read(text, ended=True)
        message: dict[str, Any] = {"content": found.content or (None if found.calls else "")}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        calls = joined_calls(found.calls, short_ids=self._short_ids)
        return {**message, "tool_calls": calls} if calls else message

    def _read(self, text: str, ended: bool) -> Found:
        found = self._parser.push(text)
        if ended:
            rest = self._parser.finish()
            found = Found(found.content + rest.content, found.calls + rest.calls, found.reasoning + rest.reasoning)
        if self._choice is not None and not self._choice.parallel:
            found.calls = [call for call in found.calls if call.index == 0]
        return found


def _parser(choice: ToolChoice, form: ToolFormat | None) -> ToolParser:
    if choice.form == "named":
        assert choice.function is not None
        return NamedCall(choice.function)
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in choice.tools}
    if choice.form == "required":
        return JsonCalls(functions, listed=True)
    assert form is not None, "a request is refused if calls of an unknown form are left to the model"
    return form.parser(functions)


def joined_calls(deltas: Iterable[ToolDelta], *, short_ids: bool = False) -> list[dict[str, Any]]:
    """Return whole calls from their deltas."""
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(written_call(delta, short_id=short_ids))
            del calls[-1]["index"]
            arguments.append([])
        arguments[-1].append(delta.arguments)
    for call, parts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(parts)
    return calls


def written_call(delta: ToolDelta, *, short_id: bool = False) -> dict[str, Any]:
    """Return a delta in OpenAI's format."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    name = uuid.uuid4().hex
    return {
        "index": delta.index,
        "id": name[:_SHORT_ID] if short_id else f"call_{name[:24]}",
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }
