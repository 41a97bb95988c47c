"""Parser of calls as a list in Python, the format of Llama 4 and of small models of Llama 3.2: [add(a=1), now()].

Each call is passed on when it is complete, because its arguments become JSON. The list must begin the answer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection

from phonograph.text.formats.answer_parts import Found, ToolDelta

_PREFIXES = ("<|python_start|>", "<|python_tag|>", "[")
_SUFFIXES = ("<|python_end|>",)
_LITERALS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"[\w.-]+\s*")
_RUN = re.compile(r"[^()\[\]{}\"'\\]+")


class PythonicCalls:
    """Calls of Python functions with arguments by name. Text in another form is content, and so is all after it."""

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._plain = False
        self._listed = False  # the list has begun
        self._closed = False  # and ended
        self._kept: list[str] = []  # text that is content unless a call follows
        self._head = ""  # of the current call, or a partial prefix
        self._call: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def push(self, text: str) -> Found:
        content: list[str] = []
        calls: list[ToolDelta] = []
        at = 0
        while at < len(text):
            if self._plain:
                content += (*self._take(), text[at:])
                break
            if self._depth:
                at = self._in_call(text, at, calls)
            else:
                self._outside(text[at])
                at += 1
        if self._plain:
            content += self._take()
        return Found("".join(content), calls)

    def finish(self) -> Found:
        if self.num_calls and not self._head and not self._call:
            return Found()
        return Found("".join(self._take()))

    def _take(self) -> list[str]:
        taken = [*self._kept, self._head, *self._call]
        self._kept, self._head, self._call = [], "", []
        return taken

    def _outside(self, character: str) -> None:
        """Read a character before the list, between calls, or in a name."""
        if character.isspace() and not self._head:
            self._kept.append(character)
            return
        self._head += character
        if self._closed:
            self._plain = not any(suffix.startswith(self._head) for suffix in _SUFFIXES)
            if self._head in _SUFFIXES:
                self._head = ""
        elif not self._listed:
            if self._head in _PREFIXES:
                self._listed = self._head == "["
                self._kept.append(self._head)
                self._head = ""
            else:
                self._plain = not any(prefix.startswith(self._head) for prefix in _PREFIXES)
        elif character == "(":
            self._plain = self._head[:-1].rstrip() not in self._names
            self._depth = int(not self._plain)
        elif self._head in (",", "]") and self.num_calls:
            self._closed = character == "]"
            self._kept = [] if self._closed else [*self._kept, character]
            self._head = ""
        else:
            most = max(map(len, self._names), default=0) + 1
            self._plain = len(self._head) > most or _NAME.fullmatch(self._head) is None

    def _in_call(self, text: str, at: int, calls: list[ToolDelta]) -> int:
        """Read the arguments of a call up to its closing parenthesis."""
        start = at
        while at < len(text) and self._depth:
            run = None if self._escaped else _RUN.match(text, at)
            if run is None:
                self._push_character(text[at])
                at += 1
            else:
                at = run.end()
        self._call.append(text[start:at])
        if not self._depth:
            self._end_call(calls)
        return at

    def _push_character(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = bool(self._quote)
        elif self._quote:
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1

    def _end_call(self, calls: list[ToolDelta]) -> None:
        name = self._head[:-1].rstrip()
        arguments = _arguments("".join(self._call))
        if arguments is None:
            self._plain = True
            return
        calls.append(ToolDelta(self.num_calls, arguments, name))
        self.num_calls += 1
        self._kept, self._head, self._call = [], "", []


class _JsonNames(ast.NodeTransformer):
    """Replaces the names of JSON's literals, which models write too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node


def _arguments(text: str) -> str | None:
    """Return the JSON of a call's arguments, which begins after its parenthesis; None if they have another form."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            call = _JsonNames().visit(ast.parse(f"f({text}", mode="eval").body)
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        return as_json(values) if len(values) == len(call.keywords) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def as_json(value: object) -> str:
    """Return a value as JSON that can be encoded as UTF-8.

    Raises:
        ValueError: it is or contains what JSON does not have, such as NaN.
        TypeError: the same, for types.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if any("\ud800" <= character <= "\udfff" for character in text) else text
