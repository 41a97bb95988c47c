"""Parsers of tool calls in growing text. Whole answers are parsed the same way, in one push.

Arguments are passed on unchanged, character by character, because clients concatenate them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

ARGUMENTS = ("arguments", "parameters")
SEPARATORS = ";,[] \t\r\n"
"""Characters that may follow a call in JSON."""
_OBJECT_BEGINS = re.compile(r'\{\s*["}]')


@dataclass(slots=True)
class ToolDelta:
    """New part of call `index`: its name if it begins, and text of its arguments."""

    index: int
    arguments: str = ""
    name: str | None = None


@dataclass(slots=True)
class Found:
    """New content and calls of a text."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list[ToolDelta])


class ToolParser(Protocol):
    """Parser of one answer."""

    num_calls: int

    def push(self, text: str) -> Found:
        """Parse further text. Text that may be the start of a call is kept back."""
        ...

    def finish(self) -> Found:
        """End the text; return what was kept back and is not part of a call."""
        ...


class _Object:
    """One growing JSON object: {"name": ..., "arguments": {...}}, in either order.

    before:    text before it that becomes content if it is not a call
    text:      the object so far
    arguments: value of the first of `ARGUMENTS` so far
    begun:     the value begins like an object
    done:      the object is closed
    is_call:   it was reported as a call
    """

    def __init__(self, before: str) -> None:
        self.before = before
        self.text = ""
        self.name: str | None = None
        self.arguments = ""
        self.begun = False
        self.done = False
        self.is_call = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._start = 0  # of the current string or value, in `text`
        self._is_value = False
        self._has_arguments = False

    def push(self, character: str) -> None:
        self.text += character
        in_arguments = self._is_value and self._key in ARGUMENTS and not self._has_arguments
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1:
                    self._string_ended()
        elif character == '"':
            self._in_string = True
            if self._depth == 1:
                self._start = len(self.text) - 1
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.done, in_arguments = True, False
        elif self._depth == 1 and character == ":":
            self._is_value = True
            return
        elif self._depth == 1 and character == ",":
            self._has_arguments = self._has_arguments or in_arguments
            self._is_value, self._key, in_arguments = False, None, False
        if in_arguments and (self.arguments or not character.isspace()):
            self.arguments += character
            if not self.begun and character in '"}':
                self.begun = _OBJECT_BEGINS.match(self.arguments) is not None
            self._has_arguments = self.begun and self._depth == 1

    def _string_ended(self) -> None:
        try:
            value = json.loads(self.text[self._start :])
        except ValueError:
            return
        if not self._is_value:
            self._key = value
        elif self._key == "name":
            self.name = value


class _Calls(ABC):
    """Common part of parsers: objects that become calls, and their reported parts.

    A call has one of `names` and an object as arguments; with `may_be_bare` the arguments may be missing. Other objects
    are content. After the arguments have begun, all that follows is passed on, because a stream cannot withdraw a call.
    Whole answers are parsed by the same rule.
    """

    may_be_bare = False

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._object: _Object | None = None
        self._reported = 0  # reported characters of its arguments
        self._plain = False  # all further text is content

    def push(self, text: str) -> Found:
        found = Found()
        for character in text:
            if self._plain:
                found.content += character
            elif self._object is not None:
                self._read(self._object, character, found)
            else:
                self._look(character, found)
        return found

    @abstractmethod
    def _look(self, character: str, found: Found) -> None:
        """Handle a character outside of objects."""

    @abstractmethod
    def _ended(self, read: _Object) -> None:
        """Handle the end of an object. One that is not a call was returned as content."""

    def _begin(self, before: str, found: Found) -> None:
        self._object, self._reported = _Object(before), 0
        self._read(self._object, "{", found)

    def _read(self, current: _Object, character: str, found: Found) -> None:
        """Add a character to the current object."""
        current.push(character)
        is_known = current.name in self._names
        if is_known and current.begun:
            self._report(current, found)
        if not current.done:
            return
        if is_known and self.may_be_bare and not current.arguments and _is_json(current.text):
            current.arguments = "{}"
            self._report(current, found)
        if current.is_call:
            self.num_calls += 1
        else:
            found.content += current.before + current.text
        self._object = None
        self._ended(current)

    def _report(self, current: _Object, found: Found) -> None:
        if not current.is_call:
            found.calls.append(ToolDelta(self.num_calls, name=current.name))
            current.is_call = True
        new = current.arguments[self._reported :]
        self._reported = len(current.arguments)
        if new:
            if not found.calls or found.calls[-1].index != self.num_calls:
                found.calls.append(ToolDelta(self.num_calls))
            found.calls[-1].arguments += new

    def _left(self) -> str:
        """Return the text of an unfinished object that is not a call. One with truncated arguments counts as a call."""
        current, self._object = self._object, None
        if current is None:
            return ""
        if not current.is_call:
            return current.before + current.text
        self.num_calls += 1
        return ""


class Hermes(_Calls):
    """Text with calls between <tool_call> and </tool_call>, the format of Hermes and Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    may_be_bare = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._pending = ""  # a partial tag, or an opening tag with the space after it
        self._inside = False  # the tag of the last call is still open
        self._behind_call = False

    def finish(self) -> Found:
        is_cut = self._inside and self.CLOSE.startswith(self._pending)
        return Found(("" if is_cut else self._pending) + self._left())

    def _look(self, character: str, found: Found) -> None:
        opened = self._pending.startswith(self.OPEN)
        if character == "{" and (opened or (self._inside and self._behind_call and not self._pending)):
            before, self._pending = self._pending, ""
            self._begin(before, found)
            return
        if opened and not character.isspace():
            self._emit(self._pending, found)
            self._pending, self._inside = "", False
        self._pending += character
        tags = (self.OPEN, self.CLOSE) if self._inside else (self.OPEN,)
        while not self._pending.startswith(self.OPEN) and not any(tag.startswith(self._pending) for tag in tags):
            self._emit(self._pending[0], found)
            self._pending = self._pending[1:]
        if self._pending == self.CLOSE:
            self._pending, self._inside = "", False

    def _ended(self, read: _Object) -> None:
        self._inside = self._behind_call = read.is_call
        # The end of an object is only certain if it is JSON.
        self._plain = not read.is_call and not _is_json(read.text)

    def _emit(self, text: str, found: Found) -> None:
        # Line breaks around calls belong to the format.
        if not (self._behind_call and text.isspace()):
            found.content += text
            self._behind_call = False


class JsonCalls(_Calls):
    """JSON objects only: Llama 3's format, or with `listed` the list that a schema forces when calls are required.

    Text that is not part of this format is content, and so is all text after it.
    """

    def __init__(self, names: Collection[str], *, listed: bool = False) -> None:
        super().__init__(names)
        self._listed = listed
        self._prefix = "[" if listed else "<|python_tag|>"
        self._pending = ""

    def finish(self) -> Found:
        rest = self._left() or ("" if self.num_calls else self._pending)
        # The rest of a truncated list is the start of a call, never content.
        return Found() if self._listed else Found(rest)

    def _look(self, character: str, found: Found) -> None:
        if character == "{" and (self.num_calls or self._pending.strip() in ("", self._prefix)):
            before, self._pending = self._pending, ""
            self._begin(before, found)
            return
        self._pending += character
        is_form = character in SEPARATORS if self.num_calls else self._prefix.startswith(self._pending.strip())
        if not is_form:
            found.content, self._pending, self._plain = found.content + self._pending, "", True

    def _ended(self, read: _Object) -> None:
        self._plain = not read.is_call


class NamedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self.num_calls = 1
        self._name: str | None = name

    def push(self, text: str) -> Found:
        name, self._name = self._name, None
        return Found(calls=[ToolDelta(0, text, name)] if text or name else [])

    def finish(self) -> Found:
        return self.push("") if self._name else Found()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
