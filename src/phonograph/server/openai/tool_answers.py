"""Tool calls of one sample in OpenAI's format: in a message, or in deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from phonograph.config.server_config import ToolCallParser
from phonograph.server.openai.tool_calls import Found, Hermes, JsonCalls, NamedCall, ToolDelta, ToolParser
from phonograph.server.openai.tools import ToolChoice


class CallReader:
    """Finds the tool calls of one sample. `has_calls` is True if its finish reason is "tool_calls"."""

    def __init__(self, choice: ToolChoice, parser: ToolCallParser | None) -> None:
        self._choice = choice
        self._parser = _parser(choice, parser)

    @property
    def has_calls(self) -> bool:
        # With a named function the finish reason is "stop", as at OpenAI.
        return self._parser.num_calls > 0 and self._choice.form != "named"

    def delta(self, text: str, *, ended: bool) -> dict[str, Any]:
        """Return the delta of new text; empty if there is nothing to show."""
        found = self._read(text, ended)
        delta: dict[str, Any] = {"content": found.content} if found.content else {}
        calls = [written_call(call) for call in found.calls]
        return {**delta, "tool_calls": calls} if calls else delta

    def message(self, text: str) -> dict[str, Any]:
        """Return content and calls of the whole text."""
        found = self._read(text, ended=True)
        calls = joined_calls(found.calls)
        return {"content": found.content or None, "tool_calls": calls} if calls else {"content": found.content}

    def _read(self, text: str, ended: bool) -> Found:
        found = self._parser.push(text)
        if ended:
            rest = self._parser.finish()
            found = Found(found.content + rest.content, found.calls + rest.calls)
        if not self._choice.parallel:
            found.calls = [call for call in found.calls if call.index == 0]
        return found


def _parser(choice: ToolChoice, name: ToolCallParser | None) -> ToolParser:
    if choice.form == "named":
        assert choice.function is not None
        return NamedCall(choice.function)
    names = {tool["function"]["name"] for tool in choice.tools}
    if choice.form == "required":
        return JsonCalls(names, listed=True)
    assert name is not None, "the configuration has a parser where calls are to be found"
    return Hermes(names) if name == "hermes" else JsonCalls(names)


def joined_calls(deltas: Iterable[ToolDelta]) -> list[dict[str, Any]]:
    """Return whole calls from their deltas."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(written_call(delta))
            del calls[-1]["index"]
        else:
            calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def written_call(delta: ToolDelta) -> dict[str, Any]:
    """Return a delta in OpenAI's format."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }
