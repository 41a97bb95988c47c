"""Parsers of calls that begin with a marker and a header: the formats of Mistral and DeepSeek.

    Mistral:  [TOOL_CALLS] [{"name": NAME, "arguments": {...}}, ...]
              [TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME[ARGS]{...}
    DeepSeek: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
              ```json
              {...}
              ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
              <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The header is all text between the marker and the first brace. If it does not name a function of the request, the call
is content.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from phonograph.text.formats.answer_parts import Found, ToolDelta
from phonograph.text.formats.json_calls import JsonCalls

_HEADER = 128
"""Characters of a header beside the name of its function, at most."""
_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]]+')


class JsonSpan:
    """Growing JSON object, of which only the end is searched.

    begun: it begins like an object; None if that is not decided
    done:  it is closed
    """

    def __init__(self) -> None:
        self.done = False
        self._lead = ""
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def begun(self) -> bool | None:
        return None if len(self._lead) < 2 else self._lead in ('{"', "{}")

    def push(self, text: str, at: int) -> int:
        """Read text from `at` on, up to the end of the object; return the end of what was read."""
        while at < len(text) and not self.done and self.begun is not False:
            run = None
            if self.begun and not self._escaped:
                run = (_IN_STRING if self._in_string else _OUTSIDE).match(text, at)
            if run is None:
                self._push_character(text[at])
                at += 1
            else:
                at = run.end()
        return at

    def _push_character(self, character: str) -> None:
        if len(self._lead) < 2 and not character.isspace():
            self._lead += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = self._in_string
        elif character == '"':
            self._in_string = not self._in_string
        elif not self._in_string and character in "{[":
            self._depth += 1
        elif not self._in_string and character in "}]":
            self._depth -= 1
            self.done = self._depth == 0


class MarkedCalls(ABC):
    """Common part of both formats.

    OPEN:  markers that begin a call
    CLOSE: texts after the arguments that belong to the format
    """

    OPEN: tuple[str, ...]
    CLOSE: tuple[str, ...] = ()

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._longest = _HEADER + max(map(len, names), default=0)
        self._read = self._in_text
        self._again = ""  # text to read once more, before what follows
        self._held = ""  # a partial marker
        self._open = self._header = ""
        self._arguments: list[str] = []  # until they begin like an object
        self._span = JsonSpan()
        self._name: str | None = None  # until it is reported
        self._content: list[str] = []
        self._calls: list[ToolDelta] = []

    def push(self, text: str) -> Found:
        todo = [(text, 0)]
        while todo:
            text, at = todo.pop()
            while at < len(text):
                at = self._read(text, at)
                if self._again:
                    todo.append((text, at))
                    text, at, self._again = self._again, 0, ""
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return Found(content, calls)

    def finish(self) -> Found:
        if self._read == self._in_arguments and self._name is None:
            self.num_calls += 1  # with truncated arguments
            return Found()
        if self._read == self._in_closing and any(text.startswith(self._held) for text in self.CLOSE):
            return Found()
        return Found(self._open + self._header + "".join(self._arguments) + self._held)

    @abstractmethod
    def _name_of(self, header: str) -> str | None:
        """Return the name in a whole header, or None."""

    def _in_text(self, text: str, at: int) -> int:
        if not self._held:
            start = text.find(self.OPEN[0][0], at)
            if start != at:
                self._content.append(text[at:] if start < 0 else text[at:start])
                return len(text) if start < 0 else start
        self._held += text[at]
        if self._held in self.OPEN:
            self._open, self._held, self._read = self._held, "", self._in_header
        while self._held and not any(marker.startswith(self._held) for marker in self.OPEN):
            self._content.append(self._held[0])
            self._held = self._held[1:]
        return at + 1

    def _in_header(self, text: str, at: int) -> int:
        most = at + self._longest + 1 - len(self._header)
        end = text.find("{", at, most)
        stop = end if end >= 0 else min(len(text), most)
        self._header += text[at:stop]
        if end >= 0:
            self._header_ended()
        elif len(self._header) > self._longest:
            self._refuse(self._header)
        return stop

    def _header_ended(self) -> None:
        name = self._name_of(self._header)
        if name in self._names:
            self._name, self._span, self._read = name, JsonSpan(), self._in_arguments
        else:
            self._refuse(self._header)

    def _refuse(self, text: str) -> None:
        """Take a marker as content, and read the text after it again."""
        self._content.append(self._open)
        self._open = self._header = ""
        self._arguments, self._again, self._read = [], text, self._in_text

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._span.push(text, at)
        if self._name is None:
            self._calls.append(ToolDelta(self.num_calls, text[at:end]))
        else:
            self._arguments.append(text[at:end])
            if self._span.begun:
                self._calls.append(ToolDelta(self.num_calls, "".join(self._arguments), self._name))
                self._name, self._arguments = None, []
                self._open = self._header = ""
            elif self._span.begun is False:
                self._refuse(self._header + "".join(self._arguments))
                return end
        if self._span.done:
            self.num_calls += 1
            self._read = self._in_closing
        return end

    def _in_closing(self, text: str, at: int) -> int:
        if not self._held and text[at].isspace():
            return at + 1  # line breaks around calls belong to the format
        self._held += text[at]
        if self._held in self.CLOSE:
            self._held = ""
        elif not any(marker.startswith(self._held) for marker in (*self.CLOSE, *self.OPEN)) or self._held in self.OPEN:
            self._again, self._held, self._read = self._held, "", self._in_text
        return at + 1


class MistralCalls(MarkedCalls):
    """Both forms of Mistral."""

    OPEN = ("[TOOL_CALLS]",)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._listed: JsonCalls | None = None

    def finish(self) -> Found:
        if self._listed is None:
            return super().finish()
        found = self._listed.finish()
        self.num_calls = self._listed.num_calls
        return found

    def _header_ended(self) -> None:
        if self._header.strip() not in ("", "["):
            super()._header_ended()
            return
        self._listed = JsonCalls(self._names, before=self._open + self._header)
        self._listed.num_calls, self._read = self.num_calls, self._in_list
        self._open = self._header = ""

    def _in_list(self, text: str, at: int) -> int:
        assert self._listed is not None
        found = self._listed.push(text[at:])
        self._content.append(found.content)
        self._calls += found.calls
        self.num_calls = self._listed.num_calls
        return len(text)

    def _name_of(self, header: str) -> str | None:
        return re.split(r"\[ARGS\]|\[CALL_ID\]", header, maxsplit=1)[0].strip()


class DeepSeekCalls(MarkedCalls):
    """The forms of DeepSeek V3 and R1, and of V3.1."""

    OPEN = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    CLOSE = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    _FORM = re.compile(
        r"\s*(?:<｜tool▁call▁begin｜>)?(?:function<｜tool▁sep｜>([^\n]+)\n```json|(.+)<｜tool▁sep｜>)\s*", re.DOTALL
    )

    def _name_of(self, header: str) -> str | None:
        form = self._FORM.fullmatch(header)
        return None if form is None else (form[1] or form[2]).strip()
