"""Finds tool calls in the text of an answer as it grows. Whole answers are read in the same way, at one go.

Arguments are passed on as the model wrote them, character by character: that is what clients put together again.
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
"""What may stand between calls in JSON, and behind the last one."""
_OBJECT_BEGINS = re.compile(r'\{\s*["}]')


@dataclass(slots=True)
class ToolDelta:
    """More of call `index`: its name, where it begins, and text of its arguments."""

    index: int
    arguments: str = ""
    name: str | None = None


@dataclass(slots=True)
class Found:
    """What is new in a text: plain content, and calls."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list[ToolDelta])


class ToolParser(Protocol):
    """Reads one answer."""

    num_calls: int

    def push(self, text: str) -> Found:
        """Takes the next text; what may still turn out to be the beginning of a call is held back."""
        ...

    def finish(self) -> Found:
        """The text has ended: what was held back and is no call."""
        ...


class _Object:
    """One JSON object as it comes: {"name": ..., "arguments": {...}}, in either order.

    before:    what came before it that is content if it is no call
    text:      all of it so far
    arguments: the value of the first of `ARGUMENTS` so far
    begun:     that value is an object, as far as its beginning tells
    done:      its last brace has come
    is_call:   it has been reported as one
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
        self._start = 0  # of the string or value that is being read, in `text`
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
    """What all forms have in common: objects that become calls, and what of them has been reported.

    A call names one of `names`, and its arguments are an object; where `may_be_bare`, there need not be any. Another
    object is content. Once the arguments have begun, the rest is passed on, whatever it is: a stream cannot take a call
    back, and whole answers are read as streams are.
    """

    may_be_bare = False

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._object: _Object | None = None
        self._reported = 0  # characters of its arguments
        self._plain = False  # all that follows is content

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
        """Takes a character outside of objects."""

    @abstractmethod
    def _ended(self, read: _Object) -> None:
        """An object is complete; if it is no call, it has been given back as content."""

    def _begin(self, before: str, found: Found) -> None:
        self._object, self._reported = _Object(before), 0
        self._read(self._object, "{", found)

    def _read(self, current: _Object, character: str, found: Found) -> None:
        """Gives a character to the object being read."""
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
        """Text of an object that never became a call. One whose arguments were cut counts as a call."""
        current, self._object = self._object, None
        if current is None:
            return ""
        if not current.is_call:
            return current.before + current.text
        self.num_calls += 1
        return ""


class Hermes(_Calls):
    """Text with calls between <tool_call> and </tool_call>, as Hermes and Qwen write them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    may_be_bare = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._held = ""  # the beginning of a tag, or one that opens and the space behind it
        self._inside = False  # the tag of the last call has not been closed
        self._behind_call = False

    def finish(self) -> Found:
        is_cut = self._inside and self.CLOSE.startswith(self._held)
        return Found(("" if is_cut else self._held) + self._left())

    def _look(self, character: str, found: Found) -> None:
        opened = self._held.startswith(self.OPEN)
        if character == "{" and (opened or (self._inside and self._behind_call and not self._held)):
            before, self._held = self._held, ""
            self._begin(before, found)
            return
        if opened and not character.isspace():
            self._emit(self._held, found)
            self._held, self._inside = "", False
        self._held += character
        tags = (self.OPEN, self.CLOSE) if self._inside else (self.OPEN,)
        while not self._held.startswith(self.OPEN) and not any(tag.startswith(self._held) for tag in tags):
            self._emit(self._held[0], found)
            self._held = self._held[1:]
        if self._held == self.CLOSE:
            self._held, self._inside = "", False

    def _ended(self, read: _Object) -> None:
        self._inside = self._behind_call = read.is_call
        # Where it ends is known of JSON only.
        self._plain = not read.is_call and not _is_json(read.text)

    def _emit(self, text: str, found: Found) -> None:
        # Line breaks around calls are part of the form.
        if not (self._behind_call and text.isspace()):
            found.content += text
            self._behind_call = False


class JsonCalls(_Calls):
    """Objects and nothing else: Llama 3's form, or with `listed` the list that is written where calls are required.

    What is neither a call nor around one is content, and so is all behind it.
    """

    def __init__(self, names: Collection[str], *, listed: bool = False) -> None:
        super().__init__(names)
        self._listed = listed
        self._prefix = "[" if listed else "<|python_tag|>"
        self._held = ""

    def finish(self) -> Found:
        rest = self._left() or ("" if self.num_calls else self._held)
        # What is left of a list that was cut is the beginning of a call, never content.
        return Found() if self._listed else Found(rest)

    def _look(self, character: str, found: Found) -> None:
        if character == "{" and (self.num_calls or self._held.strip() in ("", self._prefix)):
            before, self._held = self._held, ""
            self._begin(before, found)
            return
        self._held += character
        is_form = character in SEPARATORS if self.num_calls else self._prefix.startswith(self._held.strip())
        if not is_form:
            found.content, self._held, self._plain = found.content + self._held, "", True

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
