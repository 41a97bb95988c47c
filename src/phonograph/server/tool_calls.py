"""Finds tool calls in the text of an answer as it grows. Whole answers are read in the same way, at one go.

Arguments are passed on as the model wrote them, character by character: that is what clients put together again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

from phonograph.config_server import ToolCallParser

ARGUMENTS = ("arguments", "parameters")


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

    `text` is all of it so far, `arguments` what came of them, `done` whether its last brace has come.
    """

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.arguments = ""
        self.begun = False  # its arguments have
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._start = 0  # of the string or value that is being read, in `text`
        self._is_value = False

    def push(self, character: str) -> None:
        self.text += character
        in_arguments = self._is_value and self._key in ARGUMENTS
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
            self._is_value, self._key, in_arguments = False, None, False
        if in_arguments and (self.begun or not character.isspace()):
            self.begun = True
            self.arguments += character

    def _string_ended(self) -> None:
        try:
            value = json.loads(self.text[self._start :])
        except ValueError:
            return
        if not self._is_value:
            self._key = value
        elif self._key == "name":
            self.name = value


class _Calls:
    """What all forms have in common: objects that become calls, and what of them has been reported."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._object: _Object | None = None
        self._reported = -1  # characters of its arguments; -1: not even its name

    def _read(self, character: str, found: Found) -> bool:
        """Gives a character to the object being read; returns whether it is complete."""
        current = self._object
        assert current is not None
        current.push(character)
        if current.name is not None and current.begun:
            self._report(current, found)
        if not current.done:
            return False
        if current.name is not None and not current.begun:  # a function without arguments
            current.begun, current.arguments = True, "{}"
            self._report(current, found)
        if self._reported < 0:
            found.content += current.text
        else:
            self.num_calls += 1
        self._object, self._reported = None, -1
        return True

    def _begin(self) -> None:
        self._object, self._reported = _Object(), -1

    def _report(self, current: _Object, found: Found) -> None:
        if self._reported < 0:
            found.calls.append(ToolDelta(self.num_calls, name=current.name))
            self._reported = 0
        new = current.arguments[self._reported :]
        self._reported = len(current.arguments)
        if new:
            found.calls[-1:] = _joined(found.calls[-1:], ToolDelta(self.num_calls, new))

    def _left(self) -> str:
        """Text of an object that never became a call. One whose arguments were cut counts as a call."""
        current, self._object = self._object, None
        if current is None:
            return ""
        if self._reported < 0:
            return current.text
        self.num_calls += 1
        return ""


class Hermes(_Calls):
    """Text with calls between <tool_call> and </tool_call>, as Hermes and Qwen write them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._inside = False
        self._behind_call = False

    def push(self, text: str) -> Found:
        found = Found()
        for character in text:
            if self._object is not None:
                self._read(character, found)
            elif self._inside and character == "{" and not self._held:
                self._begin()
                self._read(character, found)
            else:
                self._look(character, found)
        return found

    def finish(self) -> Found:
        return Found(("" if self._inside else self._held) + self._left())

    def _look(self, character: str, found: Found) -> None:
        """Outside of an object: for a tag, of which the beginning is held back."""
        tag = self.CLOSE if self._inside else self.OPEN
        self._held += character
        while self._held and not tag.startswith(self._held):
            self._emit(self._held[0], found)
            self._held = self._held[1:]
        if self._held == tag:
            self._held, self._inside = "", not self._inside
            self._behind_call = not self._inside

    def _emit(self, character: str, found: Found) -> None:
        # Line breaks around calls are part of the form.
        if not self._inside and not (self._behind_call and character.isspace()):
            found.content += character
            self._behind_call = False


class JsonCalls(_Calls):
    """Objects and nothing else: Llama 3's form, or with `listed` the list that is written where calls are required.

    Text that does not begin like that is content to its end.
    """

    def __init__(self, *, listed: bool = False) -> None:
        super().__init__()
        self._listed = listed
        self._prefix = "" if listed else "<|python_tag|>"
        self._held = ""
        self._plain: bool | None = None

    def push(self, text: str) -> Found:
        found = Found()
        for character in text:
            if self._object is not None:
                if self._read(character, found) and not self.num_calls:
                    self._plain = True  # JSON, and no call
            elif self._plain:
                found.content += character
            elif character == "{" and self._held.strip() in ("", self._prefix):
                self._plain, self._held = False, ""
                self._begin()
                self._read(character, found)
            elif self._plain is None:
                self._held += character
                start = self._held.lstrip()
                if start == "[" and self._listed:
                    self._held, self._plain = "", False
                elif not self._prefix.startswith(start.rstrip()):
                    found.content, self._held, self._plain = found.content + self._held, "", True
            # Between calls there are separators only: semicolons, commas, brackets, spaces.
        return found

    def finish(self) -> Found:
        rest, self._held = self._held + self._left(), ""
        # What is left of a list that was cut is the beginning of a call, never content.
        return Found() if self._listed else Found(rest)


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


def make_parser(name: ToolCallParser) -> ToolParser:
    """The parser of a model's form, by vLLM's name for it."""
    return Hermes() if name == "hermes" else JsonCalls()


def _joined(last: list[ToolDelta], more: ToolDelta) -> list[ToolDelta]:
    """Text for the call that was last reported goes into the same delta."""
    if last and last[0].index == more.index:
        last[0].arguments += more.arguments
        return last
    return [*last, more]
