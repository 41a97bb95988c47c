"""Chat messages for templates: checked, with their text parts joined.

The form of messages is that of OpenAI's chats. The other protocols translate their turns to it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from phonograph.errors import RequestError, shortened
from phonograph.server.chat.custom_tools import INPUT
from phonograph.server.http.api_errors import invalid
from phonograph.server.http.json_meter import JsonMeter

Message = dict[str, Any]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
KEYS = frozenset(
    {
        *("role", "content", "name", "refusal", "audio", "annotations", "function_call", "tool_calls", "tool_call_id"),
        *("reasoning", "reasoning_content"),
    }
)


_PARTS = {"text": "text"}
"""Types of text parts, with the key of the text."""


def read_messages(messages: list[Message], meter: JsonMeter) -> list[Message]:
    """Return the messages with plain text as content, without null fields.

    The meter limits the arguments of tool calls, which are JSON text within the JSON of the body.

    Other keys than `KEYS` are left out; `further_keys` names them.

    Raises:
        ApiError: a message has an unknown role, or content that is not text; or arguments hold too many items.
    """
    return [_read(message, f"messages[{index}]", meter) for index, message in enumerate(messages)]


def further_keys(messages: list[Message]) -> list[str]:
    """Return the names of keys without effect: clients send back what their libraries add to answers."""
    found = {key for message in messages for key, value in message.items() if value is not None and key not in KEYS}
    return [f"messages.{shortened(key)}" for key in sorted(found)]


def rendered(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Return a conversation as text, in the first form that the template takes.

    Some templates, such as DeepSeek's, join the arguments of calls to other text, and need them as text. Others, such
    as Mistral's, need turns of user and assistant that alternate, with calls and results between them, and short ids.

    Raises:
        RequestError: the template rejects the messages in each form.
    """
    problem = None
    for form in (messages, _strict(messages)):
        for tried in (form, _with_text_arguments(form)):
            try:
                if tried is not None:
                    return render(tried)
            except RequestError as error:
                problem = problem or error
    assert problem is not None
    raise problem


def _strict(messages: list[Message]) -> list[Message]:
    """Return messages for templates that allow less: no two of the user are adjacent, and ids have nine characters.

    Text of the user after a result is part of it.
    """
    found: list[Message] = []
    for message in joined_turns(messages):
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1]["content"] = f"{found[-1]['content']}\n\n{message['content']}"
            continue
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        found.append(message)
    return found


def _short_id(call_id: object) -> object:
    """Return the id of a call in the form of Mistral's."""
    if not isinstance(call_id, str) or re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _with_text_arguments(messages: list[Message]) -> list[Message] | None:
    """Return the messages with the arguments of calls as JSON text; None if there are no calls."""
    found = [
        {
            **message,
            "tool_calls": [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]
    return None if found == messages else found


def _read(message: Message, where: str, meter: JsonMeter) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"role must be one of {', '.join(sorted(ROLES))}")
    if message.get("prefix"):
        raise invalid(f"{where}.prefix", "prefix is not supported; continue_final_message of the request does it")
    read = {key: value for key, value in message.items() if value is not None and key in KEYS}
    if "content" in read:
        read["content"] = read_text(read["content"], f"{where}.content", _PARTS)
    elif role != "assistant" or not (read.get("tool_calls") or read.get("function_call")):
        raise invalid(f"{where}.content", "content is missing; send a string or a list of text parts")
    else:
        read["content"] = None
    reasoning = read.get("reasoning_content") or read.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise invalid(f"{where}.reasoning", "reasoning must be a string")
        # Clients send one of the names, and templates read one of them.
        read |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if "tool_calls" in read:
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{where}.tool_calls", meter)
    return read


def _tool_calls(calls: Any, where: str, meter: JsonMeter) -> list[dict[str, Any]]:
    """Return calls with their arguments as objects, which templates expect; clients send them as text."""
    if not isinstance(calls, list):
        raise invalid(where, "tool_calls must be a list")
    read: list[dict[str, Any]] = []
    for index, one in enumerate(calls):
        is_custom = isinstance(one, dict) and one.get("type") == "custom"
        call = _as_function(one, f"{where}[{index}]") if is_custom else one
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}[{index}]", "a tool call must have a function with a name")
        arguments = read_arguments(function.get("arguments") or "{}", f"{where}[{index}].function.arguments", meter)
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _as_function(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the call of a custom tool as that of a function."""
    custom = call.get("custom")
    text = custom.get("input") if isinstance(custom, dict) else None
    if not isinstance(custom, dict) or not isinstance(text, str):
        raise invalid(where, "a custom tool call must have a custom object with a name and an input")
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": {"name": custom.get("name"), "arguments": {INPUT: text}}}


def read_arguments(arguments: Any, where: str, meter: JsonMeter) -> dict[str, Any]:
    """Return the arguments of a call, an object or its JSON text, as an object.

    Raises:
        ApiError: they are neither, or hold too many items.
    """
    try:
        if isinstance(arguments, str):
            meter.check_text(arguments)
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(where, "arguments must be the JSON text of an object")
    return arguments


def read_text(content: Any, where: str, parts: Mapping[str, str]) -> str:
    """Return the text of a string or of a list of text parts, which are lines of it.

    Args:
        content: the value.
        where: its place in the request.
        parts: types of parts, each with the key of its text.

    Raises:
        ApiError: it is neither, or a part is of another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "content must be a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{index}]", parts) for index, part in enumerate(content))


def _part(part: Any, where: str, parts: Mapping[str, str]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(where, "a part must be an object with a type")
    key = parts.get(part["type"])
    if key is None:
        problem = f"parts of type {part['type'][:50]!r} are not supported: the model reads text"
        raise invalid(where, problem, code="unsupported_part")
    if not isinstance(part.get(key), str):
        raise invalid(f"{where}.{key}", f"the {key} of a part must be a string")
    return part[key]


def joined_turns(messages: list[Message]) -> list[Message]:
    """Return messages for templates of which roles take turns.

    Many templates have one place for a system message, at the beginning, and no developer. Agents send several, and
    several messages of one role in a row. A later message of the system becomes one of the user: some templates, such
    as DeepSeek's, would put it in the place of the first.
    """
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        if role in ("system", "developer"):
            role = "system" if not found or found[-1]["role"] == "system" else "user"
        last = found[-1] if found else None
        parts = message.keys() if last is None else message.keys() | last.keys()
        if last is not None and last["role"] == role and role != "tool" and not parts & {"reasoning", "tool_calls"}:
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            found.append({**message, "role": role})
    return found
