"""Turns of Ollama's chats as the messages of a chat."""

from __future__ import annotations

from typing import Any

from phonograph.config.server_config import ServerConfig
from phonograph.errors import quoted
from phonograph.server.chat.conversation import Message, read_messages
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_meter import JsonMeter

_KEYS = ("role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id")


def read_turns(turns: list[Any], config: ServerConfig) -> list[Message]:
    """Return the messages of a request, with ids for calls and their results, which Ollama's may lack.

    Raises:
        ApiError: a message is wrong, has images, or is the result of no call.
    """
    reader = _OllamaTurns()
    messages = [reader.read(turn, f"messages[{index}]") for index, turn in enumerate(turns)]
    return read_messages(messages, JsonMeter(config))


class _OllamaTurns:
    """Reads messages in their order. `_pending` has the functions of calls without a result, by the calls' ids."""

    def __init__(self) -> None:
        self._pending: dict[str, str] = {}
        self._num_calls = 0

    def read(self, turn: Any, where: str) -> Message:
        if not isinstance(turn, dict):
            raise invalid(where, f"{where} must be an object")
        role, content = turn.get("role"), turn.get("content")
        if role not in ("system", "user", "assistant", "tool"):
            raise invalid(f"{where}.role", f"role={quoted(role)} must be system, user, assistant or tool")
        for key in turn:
            if key not in _KEYS:
                raise invalid(f"{where}.{key[:100]}", f"unknown key {key[:100]!r} in a message")
        if turn.get("images"):
            raise invalid(f"{where}.images", "images are not supported: the model reads text", code="unsupported_part")
        if not isinstance(content, str | None):
            raise invalid(f"{where}.content", "content must be a string")
        message: Message = {"role": role, "content": content or ""}
        if turn.get("thinking"):
            message["reasoning_content"] = turn["thinking"]
        if turn.get("tool_calls"):
            if role != "assistant":
                raise invalid(f"{where}.tool_calls", "only messages of the assistant have tool_calls")
            message["tool_calls"] = self._calls(turn["tool_calls"], f"{where}.tool_calls")
        if role == "tool":
            message |= self._origin(turn, where)
        return message

    def _calls(self, calls: Any, where: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise invalid(where, "tool_calls must be a list")
        found: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            place, function = f"{where}[{index}]", call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise invalid(place, "a tool call must have a function with a name")
            call_id = call.get("id") or f"call{self._num_calls:05}"  # Mistral's templates require 9 characters
            if not isinstance(call_id, str):
                raise invalid(f"{place}.id", "the id of a tool call must be a string")
            self._num_calls += 1
            self._pending[call_id] = function["name"]
            about = {"name": function["name"], "arguments": function.get("arguments") or {}}
            found.append({"id": call_id, "type": "function", "function": about})
        return found

    def _origin(self, turn: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the id and the function of the call that a result belongs to: by its id, its name, or the order."""
        call_id, name = turn.get("tool_call_id") or None, turn.get("tool_name") or None
        for key, value in (("tool_call_id", call_id), ("tool_name", name)):
            if not isinstance(value, str | None):
                raise invalid(f"{where}.{key}", f"{key} must be a string")
        for pending, function in self._pending.items():
            if call_id in (None, pending) and name in (None, function):
                del self._pending[pending]
                return {"tool_call_id": pending, "name": function}
        named = f"tool_name={quoted(name)}" if call_id is None else f"tool_call_id={quoted(call_id)}"
        raise invalid(where, f"a message of role tool ({named}) has no earlier tool call without a result")
