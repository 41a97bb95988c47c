"""Turns of Anthropic's messages as the messages of a chat."""

from __future__ import annotations

from typing import Any

from phonograph.errors import quoted
from phonograph.server.chat.conversation import Message, joined_turns, read_text
from phonograph.server.http.api_errors import invalid

_TEXT = {"text": "text"}
"""Types of text blocks, with the key of the text."""
FAILED = "Error: "
"""Beginning of the result of a tool that failed: templates have no other place for `is_error`."""


def read_turns(turns: list[dict[str, Any]], system: str | list[Any] | None) -> list[Message]:
    """Return the messages of a request.

    Args:
        turns: messages of the user and of the assistant.
        system: text for the system, or text blocks.

    Raises:
        ApiError: a message is wrong, or has a block that is not supported or out of order.
    """
    reader = _TurnReader()
    if system:
        reader.messages.append({"role": "system", "content": read_text(system, "system", _TEXT)})
    for index, turn in enumerate(turns):
        reader.read(turn, f"messages[{index}]")
    return joined_turns(reader.messages)


class _TurnReader:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._names: dict[str, str] = {}

    def read(self, turn: dict[str, Any], where: str) -> None:
        role, content = turn.get("role"), turn.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role", "role must be user, assistant or system")
        for key in turn:
            if key not in ("role", "content"):
                raise invalid(f"{where}.{key[:50]}", f"unknown key {key[:50]!r} in a message")
        if not isinstance(content, str | list):
            raise invalid(f"{where}.content", "content must be a string or a list of blocks")
        where = f"{where}.content"
        if role == "assistant":
            self._assistant(content, where)
        elif role == "system" or isinstance(content, str):
            self.messages.append({"role": role, "content": read_text(content, where, _TEXT)})
        else:
            self._user(content, where)

    def _user(self, blocks: list[Any], where: str) -> None:
        texts: list[str] = []
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            if isinstance(block, dict) and block.get("type") == "tool_result":
                self._end_text(texts)
                self._result(block, place)
            else:
                texts.append(read_text([block], where, _TEXT) if _is_text(block) else _refused(block, place))
        self._end_text(texts)
        if not blocks:
            self.messages.append({"role": "user", "content": ""})

    def _end_text(self, texts: list[str]) -> None:
        if texts:
            self.messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    def _result(self, block: dict[str, Any], where: str) -> None:
        call_id = block.get("tool_use_id")
        name = self._names.get(call_id) if isinstance(call_id, str) else None
        if name is None:
            problem = f"tool_use_id={quoted(call_id)} is not that of an earlier tool_use block"
            raise invalid(f"{where}.tool_use_id", problem)
        text = read_text(block.get("content") or "", f"{where}.content", _TEXT)
        if block.get("is_error"):
            text = FAILED + text
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def _assistant(self, content: str | list[Any], where: str) -> None:
        if isinstance(content, str):
            self.messages.append({"role": "assistant", "content": content})
            return
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(content):
            place, kind = f"{where}[{index}]", block.get("type") if isinstance(block, dict) else None
            if kind == "tool_use":
                calls.append(self._call(block, place))
            elif kind == "thinking":
                thoughts.append(read_text([{**block, "type": "thinking"}], where, {"thinking": "thinking"}))
            else:
                texts.append(read_text([block], where, _TEXT) if _is_text(block) else _refused(block, place))
        message: Message = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
        if thoughts:
            # Templates read one of the names.
            reasoning = "\n".join(thoughts)
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _call(self, block: dict[str, Any], where: str) -> dict[str, Any]:
        call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
        for key, value in (("id", call_id), ("name", name)):
            if not isinstance(value, str) or not value:
                raise invalid(f"{where}.{key}", f"a tool_use block needs a {key}")
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.input", "the input of a tool_use block must be an object")
        assert isinstance(call_id, str) and isinstance(name, str)
        self._names[call_id] = name
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _refused(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, "a block must be an object with a type")
    if kind == "text":
        raise invalid(f"{where}.text", "the text of a block must be a string")
    problem = f"blocks of type {kind[:50]!r} are not supported here: the model reads text"
    raise invalid(where, problem, code="unsupported_part")
