"""Parser of calls in the tags of Qwen3-Coder.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Arguments become JSON. Values of the type string are passed on as they grow; others when they are complete, as the JSON
that they are.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from phonograph.text.formats.answer_parts import Found, ToolDelta, partial_suffix
from phonograph.text.formats.python_calls import as_json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BEGIN = re.compile(f"{_OPEN}|{_FUNCTION}")
_PART = re.compile(f"{_PARAMETER}|{_FUNCTION_END}|{_CLOSE}")
_SPACES = re.compile(r"\s*")
_NAME = 256
"""Characters of a name and of the white space before it, at most."""
_encode = json.JSONEncoder(ensure_ascii=False).encode
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class XmlCalls:
    """Text with calls in tags. `functions` has the schema of each function's parameters."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self.num_calls = 0
        self._functions = functions
        self._read = self._in_text  # reads on from `_at`; returns False if that needs further text
        self._text = ""
        self._at = 0
        self._before = ""  # opening tags of the current call
        self._behind_call = False
        self._in_function = False
        self._properties: Mapping[str, Any] = {}
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._is_text = False
        self._content: list[str] = []
        self._name: str | None = None  # until it is reported
        self._arguments: list[str] = []
        self._calls: list[ToolDelta] = []

    def push(self, text: str) -> Found:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._read():
            pass
        self._report()
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return Found(content, calls)

    def finish(self) -> Found:
        rest = self._text[self._at :]
        if self._in_function:
            self.num_calls += 1  # with truncated arguments
            if self._read == self._in_value and self._is_text:
                return Found(calls=[ToolDelta(self.num_calls - 1, _escaped(rest))] if rest else [])
            return Found()
        is_end = self._read == self._in_closing and _CLOSE.startswith(rest)
        return Found("" if is_end else self._before + rest)

    def _in_text(self) -> bool:
        begin = _BEGIN.search(self._text, self._at)
        if begin is None:
            kept = partial_suffix(self._text, _OPEN) or partial_suffix(self._text, _FUNCTION)
            self._emit(self._take(max(self._at, len(self._text) - kept)))
            return False
        self._emit(self._take(begin.start()))
        self._before = begin[0]
        self._at = begin.end()
        self._read = self._in_open if begin[0] == _OPEN else self._in_name
        return True

    def _in_open(self) -> bool:
        """Read from an opening tag to that of a function."""
        spaces = _SPACES.match(self._text, self._at, self._at + _NAME)
        assert spaces is not None
        is_near = len(spaces[0]) < _NAME
        if is_near and self._text.startswith(_FUNCTION, spaces.end()):
            self._before += spaces[0] + _FUNCTION
            self._at, self._read = spaces.end() + len(_FUNCTION), self._in_name
            return True
        rest = self._text[spaces.end() : spaces.end() + len(_FUNCTION)]
        return False if is_near and _FUNCTION.startswith(rest) else self._refuse()

    def _in_name(self) -> bool:
        end = self._text.find(">", self._at, self._at + _NAME)
        if end < 0:
            return self._refuse() if len(self._text) - self._at >= _NAME else False
        name = self._text[self._at : end].strip()
        if name not in self._functions:
            return self._refuse()
        properties = self._functions[name].get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._at, self._before, self._read = end + 1, "", self._in_parameters
        self._in_function, self._num_parameters = True, 0
        self._name, self._arguments = name, ["{"]
        return True

    def _refuse(self) -> bool:
        """Take opening tags as content."""
        self._emit(self._before)
        self._before, self._read = "", self._in_text
        return True

    def _in_parameters(self) -> bool:
        """Read to the next parameter, or to the end of the function. Other text cannot be part of it."""
        part = _PART.search(self._text, self._at)
        if part is None:
            tags = (_PARAMETER, _FUNCTION_END, _CLOSE)
            self._at = max(self._at, len(self._text) - max(partial_suffix(self._text, tag) for tag in tags))
            return False
        self._at = part.end()
        if part[0] == _PARAMETER:
            self._read = self._in_key
            return True
        self._arguments.append("}")
        self._report()
        self.num_calls += 1
        self._in_function, self._behind_call = False, True
        self._read = self._in_closing if part[0] == _FUNCTION_END else self._in_text
        return True

    def _in_key(self) -> bool:
        end = self._text.find(">", self._at, self._at + _NAME)
        if end < 0:
            if len(self._text) - self._at < _NAME:
                return False
            self._read = self._in_parameters
            return True
        key = self._text[self._at : end].strip()
        self._types = value_types(self._properties.get(key))
        self._is_text = self._types == frozenset({"string"})
        separator = ", " if self._num_parameters else ""
        self._arguments.append(f'{separator}"{_escaped(key)}": ' + '"' * self._is_text)
        self._num_parameters += 1
        self._at, self._read = end + 1, self._at_value
        return True

    def _at_value(self) -> bool:
        """Skip the line break before a value."""
        rest = self._text[self._at : self._at + 2]
        if rest in ("", "\r"):
            return False
        self._at += 2 if rest == "\r\n" else int(rest[0] == "\n")
        self._value, self._read = [], self._in_value
        return True

    def _in_value(self) -> bool:
        end = self._text.find(_PARAMETER_END, self._at)
        if end < 0:
            # The line break before the tag is part of it.
            end = len(self._text) - partial_suffix(self._text, _PARAMETER_END)
            if self._text.endswith("\n", 0, end):
                end -= 2 if self._text.endswith("\r\n", 0, end) else 1
            elif self._text.endswith("\r"):
                end = len(self._text) - 1
            self._grow(self._take(max(self._at, end)))
            return False
        value = self._take(end)
        self._grow(value.removesuffix("\r\n") if value.endswith("\r\n") else value.removesuffix("\n"))
        self._arguments.append('"' if self._is_text else _converted("".join(self._value), self._types))
        self._at, self._read = end + len(_PARAMETER_END), self._in_parameters
        return True

    def _grow(self, value: str) -> None:
        if self._is_text:
            self._arguments.append(_escaped(value))
        else:
            self._value.append(value)

    def _in_closing(self) -> bool:
        spaces = _SPACES.match(self._text, self._at)
        assert spaces is not None
        self._at = spaces.end()
        if self._text.startswith(_CLOSE, self._at):
            self._at += len(_CLOSE)
        elif _CLOSE.startswith(self._text[self._at : self._at + len(_CLOSE)]):
            return False
        self._read = self._in_text
        return True

    def _take(self, end: int) -> str:
        """Return the text up to `end`, and read on from there."""
        text, self._at = self._text[self._at : end], end
        return text

    def _emit(self, text: str) -> None:
        # Line breaks around calls belong to the format.
        text = text.lstrip() if self._behind_call else text
        if text:
            self._content.append(text)
            self._behind_call = False

    def _report(self) -> None:
        arguments, self._arguments = "".join(self._arguments), []
        if arguments:
            self._calls.append(ToolDelta(self.num_calls, arguments, self._name))
            self._name = None


def _escaped(text: str) -> str:
    """Return a text as within a JSON string."""
    return _encode(text)[1:-1]


def value_types(schema: object) -> frozenset[str]:
    """Return the types that a parameter's schema names. Without a schema a value is a string, with others it is any."""
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    known = cast("Mapping[str, Any]", schema)
    named: object = known.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(one for one in cast("list[object]", named) if isinstance(one, str))
    choices: object = known.get("anyOf") or known.get("oneOf")
    if isinstance(choices, list):
        found = [value_types(choice) for choice in cast("list[object]", choices)]
        return frozenset().union(*found) if all(found) else frozenset()
    values: object = known.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in cast("list[object]", values)):
        return frozenset({"string"})
    return frozenset({"string"}) if not known else frozenset()


def _converted(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: of one of the types if its text is one, else a string."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            if not types or any(_has_type(value, name) for name in types):
                return as_json(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return as_json(text)


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return name in _TYPES and isinstance(value, _TYPES[name])
