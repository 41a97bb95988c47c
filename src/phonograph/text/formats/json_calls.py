"""Parsers of tool calls in JSON, in growing text. Whole answers are parsed the same way, in one push.

Arguments are passed on unchanged, because clients concatenate them. The time is proportional to the length of the text:
runs of characters without meaning are skipped by regular expressions, and nothing is read twice.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from phonograph.text.formats.answer_parts import Found, ToolDelta

ARGUMENTS = ("arguments", "parameters")
SEPARATORS = ";,[] \t\r\n"
"""Characters that may follow a call in JSON."""
_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]:,]+')


class JsonObject:
    """One growing JSON object: {"name": ..., "arguments": {...}}, in either order.

    It becomes a call once it has one of `names` and a value of `ARGUMENTS` that begins like an object.

    before:    text before it that becomes content if it is not a call
    name:      name of the call, or the last one of an object that is none
    done:      the object is closed
    is_call:   it is a call
    """

    def __init__(self, before: str, names: Collection[str]) -> None:
        self.before = before
        self.name: str | None = None
        self.done = False
        self.is_call = False
        self.has_arguments = False
        self._names = names
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._lead = ""  # the first two characters of the arguments other than white space
        self._depth = 0
        self._in_string = self._escaped = False
        self._string: list[str] = []  # the current string, if it is at depth 1
        self._key: str | None = None
        self._is_value = False
        self._is_complete = False  # the arguments are

    @property
    def text(self) -> str:
        return "".join(self._text)

    def take_arguments(self) -> str:
        """Return the new text of the arguments."""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def push(self, text: str, start: int) -> int:
        """Read text from `start` on, up to the end of the object; return the end of what was read."""
        while start < len(text) and not self.done:
            run = None if self._escaped else (_IN_STRING if self._in_string else _OUTSIDE).match(text, start)
            if run is not None:
                self._add(run[0], in_arguments=self._in_arguments)
                start = run.end()
            else:
                self._push_character(text[start])
                start += 1
        return start

    @property
    def _in_arguments(self) -> bool:
        return self._is_value and self._key in ARGUMENTS and not self._is_complete

    def _push_character(self, character: str) -> None:
        """Read a character that has a meaning where it is."""
        in_arguments = self._in_arguments
        is_text = self._in_string or character == '"'
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string, self._string = True, []
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.done, in_arguments = True, False
        elif self._depth == 1 and character == ":":
            self._text.append(character)
            self._is_value = True
            return
        elif self._depth == 1 and character == ",":
            self._is_complete = self._is_complete or in_arguments
            self._is_value, self._key, in_arguments = False, None, False
        self._add(character, in_arguments=in_arguments)
        if is_text and not self._in_string and self._depth == 1:
            self._string_ended()
        self._latch()

    def _add(self, text: str, *, in_arguments: bool) -> None:
        self._text.append(text)
        if self._depth == 1 and (self._in_string or text == '"'):
            self._string.append(text)
        if not in_arguments:
            return
        if not self.has_arguments:
            text = text.lstrip()
        if text:
            self.has_arguments = True
            self._arguments.append(text)
            if len(self._lead) < 2:
                self._lead = (self._lead + "".join(text.split()))[:2]
            self._is_complete = self._begun and self._depth == 1

    @property
    def _begun(self) -> bool:
        return self._lead in ('{"', "{}")

    def _string_ended(self) -> None:
        try:
            value = json.loads("".join(self._string))
        except ValueError:
            return
        if not self._is_value:
            self._key = value
        elif self._key == "name" and not self.is_call:
            self.name = value

    def _latch(self) -> None:
        if not self.is_call and self._begun and self.name in self._names:
            self.is_call = True


class ObjectCalls(ABC):
    """Common part of parsers: objects that become calls, and their reported parts.

    A call has one of `names` and an object as arguments; with `may_be_bare` the arguments may be missing. Other objects
    are content. After the arguments have begun, all that follows is passed on, because a stream cannot withdraw a call.
    Whole answers are parsed by the same rule.
    """

    may_be_bare = False

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._object: JsonObject | None = None
        self._is_reported = False  # the name of the object is
        self._plain = False  # all further text is content
        self._content: list[str] = []

    def push(self, text: str) -> Found:
        calls: list[ToolDelta] = []
        at = 0
        while at < len(text):
            if self._plain:
                self._content.append(text[at:])
                break
            at = self._look(text, at) if self._object is None else self._read(self._object, text, at, calls)
        content, self._content = "".join(self._content), []
        return Found(content, calls)

    @abstractmethod
    def _look(self, text: str, at: int) -> int:
        """Handle text outside of objects from `at` on; return the end of what was read."""

    @abstractmethod
    def _ended(self, read: JsonObject) -> None:
        """Handle the end of an object. One that is not a call was returned as content."""

    def _begin(self, before: str) -> None:
        self._object, self._is_reported = JsonObject(before, self._names), False

    def _read(self, current: JsonObject, text: str, at: int, calls: list[ToolDelta]) -> int:
        at = current.push(text, at)
        if current.is_call:
            self._report(current, calls, current.take_arguments())
        if not current.done:
            return at
        is_bare = self.may_be_bare and not current.has_arguments and current.name in self._names
        if is_bare and is_json(current.text):
            current.is_call = True
            self._report(current, calls, "{}")
        if current.is_call:
            self.num_calls += 1
        else:
            self._content += (current.before, current.text)
        self._object = None
        self._ended(current)
        return at

    def _report(self, current: JsonObject, calls: list[ToolDelta], arguments: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            calls.append(ToolDelta(self.num_calls, arguments, current.name))
        elif arguments:
            calls.append(ToolDelta(self.num_calls, arguments))

    def _left(self) -> str:
        """Return the text of an unfinished object that is not a call. One with truncated arguments counts as a call."""
        current, self._object = self._object, None
        if current is None:
            return ""
        if not current.is_call:
            return current.before + current.text
        self.num_calls += 1
        return ""


class Hermes(ObjectCalls):
    """Text with calls between <tool_call> and </tool_call>, the format of Hermes and Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    may_be_bare = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._pending = ""  # a partial tag, or an opening tag with some of the space after it
        self._space: list[str] = []  # further space after an opening tag
        self._inside = False  # the tag of the last call is still open
        self._behind_call = False

    def finish(self) -> Found:
        is_cut = self._inside and self.CLOSE.startswith(self._pending)
        return Found(("" if is_cut else self._pending + "".join(self._space)) + self._left())

    def _look(self, text: str, at: int) -> int:
        if not (self._pending or self._inside or self._behind_call):
            # Nothing before the next tag has a meaning.
            start = text.find(self.OPEN[0], at)
            if start != at:
                self._content.append(text[at:] if start < 0 else text[at:start])
                return len(text) if start < 0 else start
        self._look_at(text[at])
        return at + (self._object is None)

    def _look_at(self, character: str) -> None:
        """Handle one character, or begin an object with it."""
        opened = self._pending == self.OPEN
        if character == "{" and (opened or (self._inside and self._behind_call and not self._pending)):
            before, self._pending = self._pending + "".join(self._space), ""
            self._space = []
            self._begin(before)
            return
        if opened:
            if character.isspace():
                self._space.append(character)
                return
            self._emit(self._pending + "".join(self._space))
            self._pending, self._space, self._inside = "", [], False
        self._pending += character
        tags = (self.OPEN, self.CLOSE) if self._inside else (self.OPEN,)
        while self._pending and not any(tag.startswith(self._pending) for tag in tags):
            self._emit(self._pending[0])
            self._pending = self._pending[1:]
        if self._pending == self.CLOSE:
            self._pending, self._inside = "", False

    def _ended(self, read: JsonObject) -> None:
        self._inside = self._behind_call = read.is_call
        # The end of an object is only certain if it is JSON.
        self._plain = not read.is_call and not is_json(read.text)

    def _emit(self, text: str) -> None:
        # Line breaks around calls belong to the format.
        if not (self._behind_call and text.isspace()):
            self._content.append(text)
            self._behind_call = False


class JsonCalls(ObjectCalls):
    """JSON objects only: Llama 3's format, or with `listed` the list that a schema forces when calls are required.

    Text that is not part of this format is content, and so is all text after it. `before` is text that precedes the
    objects and becomes content if there is no call.
    """

    def __init__(self, names: Collection[str], *, listed: bool = False, before: str = "") -> None:
        super().__init__(names)
        self._listed = listed
        self._prefix = "[" if listed else "<|python_tag|>"
        self._head = ""  # what precedes the first object, without white space
        self._pending = [before]

    def finish(self) -> Found:
        rest = self._left() or ("" if self.num_calls else "".join(self._pending))
        # The rest of a truncated list is the start of a call, never content.
        return Found() if self._listed else Found(rest)

    def _look(self, text: str, at: int) -> int:
        character = text[at]
        if character == "{" and (self.num_calls or self._head in ("", self._prefix)):
            before, self._pending, self._head = "".join(self._pending), [], ""
            self._begin(before)
            return at
        self._pending.append(character)
        if self.num_calls:
            is_form = character in SEPARATORS
        else:
            # White space may surround the prefix, not split it.
            is_form = character.isspace() and self._head in ("", self._prefix)
            if not character.isspace():
                self._head += character
                is_form = self._prefix.startswith(self._head)
        if not is_form:
            self._content += self._pending
            self._pending, self._plain = [], True
        return at + 1

    def _ended(self, read: JsonObject) -> None:
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


def is_json(text: str) -> bool:
    """Return True if a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
