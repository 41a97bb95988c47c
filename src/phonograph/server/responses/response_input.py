"""Input items of POST /v1/responses as the messages of a chat."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from phonograph.errors import quoted
from phonograph.server.chat.conversation import Message, joined_turns, read_arguments, read_text
from phonograph.server.chat.custom_tools import INPUT
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_meter import JsonMeter

ROLES = ("user", "assistant", "system", "developer")
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of text parts, with the key of the text."""
_MARK = b"phonograph:"
"""Beginning of `encrypted_content`."""


def sealed(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`. It is encoded, not encrypted: the client may read it anyway."""
    return base64.b64encode(_MARK + reasoning.encode("utf-8", "surrogatepass")).decode()


def unsealed(content: str) -> str | None:
    """Return the reasoning of `encrypted_content`; None if another server made it."""
    try:
        found = base64.b64decode(content, validate=True)
        return found.removeprefix(_MARK).decode("utf-8", "surrogatepass") if found.startswith(_MARK) else None
    except (binascii.Error, ValueError):
        return None


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model, which knows no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def input_items(value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an input."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def read_input(
    value: str | list[dict[str, Any]],
    instructions: str | None,
    meter: JsonMeter,
    before: Sequence[dict[str, Any]] = (),
) -> list[Message]:
    """Return the messages of a request.

    Args:
        value: text of the user, or items.
        instructions: text for the system.
        meter: limits the arguments of calls, which are JSON text within the JSON of the body.
        before: items of the conversation before.

    Raises:
        ApiError: an item is wrong, out of order, or of a type that is not supported.
    """
    reader = _InputReader(meter)
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    for item in before:
        reader.read(item, "previous_response_id")
    for index, item in enumerate(input_items(value)):
        reader.read(item, "input" if isinstance(value, str) else f"input[{index}]")
    reader.close()
    return joined_turns(reader.messages)


class _InputReader:
    """Collects messages. Reasoning, text and calls of the assistant are one message until an item of another role."""

    def __init__(self, meter: JsonMeter) -> None:
        self.messages: list[Message] = []
        self._meter = meter
        self._assistant: Message = {}
        self._names: dict[str, str] = {}

    def read(self, item: dict[str, Any], where: str) -> None:
        """Read one item."""
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "custom_tool_call":
            if not isinstance(item.get("input"), str):
                raise invalid(f"{where}.input", "a custom_tool_call needs an input, which is a string")
            self._call({**item, "arguments": {INPUT: item["input"]}}, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
        elif kind == "item_reference":
            problem = "items of type 'item_reference' are not supported; send the item itself, or previous_response_id"
            raise invalid(where, problem, code="unsupported_item")
        else:
            known = "message, reasoning, function_call, custom_tool_call and their outputs"
            raise invalid(
                where, f"items of type {str(kind)[:50]!r} are not supported; {known} are", code="unsupported_item"
            )

    def close(self) -> None:
        """End the message of the assistant, if there is one."""
        message = self._assistant
        if message.get("content") is not None or "tool_calls" in message:
            self.messages.append({"role": "assistant", "content": None, **message})
        # Reasoning without an answer has no place in a conversation.
        self._assistant = {}

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"{where}.role", f"role must be one of {', '.join(ROLES)}")
        if item.get("content") is None:
            raise invalid(f"{where}.content", "content is missing; send a string or a list of text parts")
        text = read_text(item["content"], f"{where}.content", _PARTS)
        if role != "assistant":
            self.close()
            self.messages.append({"role": role, "content": text})
            return
        if "tool_calls" in self._assistant:
            self.close()
        before = self._assistant.get("content")
        self._assistant["content"] = text if before is None else f"{before}\n{text}"

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        content, encrypted = item.get("content"), item.get("encrypted_content")
        if content:
            text = read_text(content, f"{where}.content", {"reasoning_text": "text", "text": "text"})
        elif encrypted is None:
            return  # a summary is not the reasoning
        else:
            found = unsealed(encrypted) if isinstance(encrypted, str) else None
            if found is None:
                problem = "encrypted_content was made by another server; leave the item out"
                raise invalid(f"{where}.encrypted_content", problem)
            text = found
        if self._assistant.keys() & {"content", "tool_calls"}:
            self.close()
        before = self._assistant.get("reasoning")
        text = text if before is None else f"{before}\n{text}"
        # Templates read one of the names.
        self._assistant |= {"reasoning": text, "reasoning_content": text}

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id, name = item.get("call_id"), item.get("name")
        for key, value in (("call_id", call_id), ("name", name)):
            if not isinstance(value, str) or not value:
                raise invalid(f"{where}.{key}", f"a function_call needs a {key}")
        assert isinstance(call_id, str) and isinstance(name, str)
        if not isinstance(item.get("namespace"), str | None):
            raise invalid(f"{where}.namespace", "the namespace of a function_call must be a string")
        name = joined_name(item.get("namespace"), name)
        arguments = read_arguments(item.get("arguments") or "{}", f"{where}.arguments", self._meter)
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant.setdefault("tool_calls", []).append(call)

    def _output(self, item: dict[str, Any], where: str) -> None:
        self.close()
        call_id = item.get("call_id")
        name = self._names.get(call_id) if isinstance(call_id, str) else None
        if name is None:
            problem = (
                f"call_id={quoted(call_id)} is not that of an earlier function_call; send the call before its output"
            )
            raise invalid(f"{where}.call_id", problem)
        if item.get("output") is None:
            raise invalid(f"{where}.output", "output is missing; send a string or a list of text parts")
        text = read_text(item["output"], f"{where}.output", _PARTS)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})
