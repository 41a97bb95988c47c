"""Custom tools, whose input is text: for the model they are functions with one argument."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from phonograph.server.http.api_errors import invalid
from phonograph.text.formats.answer_parts import ToolDelta

INPUT = "input"
"""Name of the argument."""
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)
"""Characters of a JSON string, without an escape that is not complete."""


def custom_tool(tool: Any, where: str) -> dict[str, Any]:
    """Return a custom tool as a function.

    A grammar of the input becomes part of the description, and a regular expression the pattern of the argument.

    Args:
        tool: name, description and format.
        where: its place in the request.

    Raises:
        ApiError: it is no such tool.
    """
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or not name:
        raise invalid(where, f"{where} must be a custom tool with a name")
    for key in tool:
        if key not in ("name", "description", "format"):
            raise invalid(where, f"{where}: unknown key {key[:50]!r} in a custom tool")
    description = tool.get("description")
    if not isinstance(description, str | None):
        raise invalid(f"{where}.description", f"{where}: description of a custom tool must be a str")
    syntax, definition = _grammar(tool.get("format"), f"{where}.format")
    shown = f"The input has the form of this {syntax} grammar:\n{definition}" if syntax else None
    described = "\n\n".join(filter(None, (description, shown)))
    value = {"type": "string"} | ({"pattern": _anchored(definition)} if syntax == "regex" else {})
    schema = {"type": "object", "properties": {INPUT: value}, "required": [INPUT]}
    about = {"description": described} if described else {}
    grammar = definition if syntax == "lark" else None
    function = {"name": name, **about, "parameters": schema}
    return {"type": "custom", "has_form": bool(syntax), "grammar": grammar, "function": function}


def _grammar(form: Any, where: str) -> tuple[str, str]:
    """Return syntax and definition of a format, or no text for the format of any text."""
    fields: dict[str, Any] = form if isinstance(form, dict) else {}
    if form is None or fields.get("type") == "text":
        return "", ""
    about = fields.get("grammar", fields) if fields.get("type") == "grammar" else None
    syntax, definition = (about.get("syntax"), about.get("definition")) if isinstance(about, dict) else (None, None)
    if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
        problem = f"{where} must have the type text, or the type grammar with a syntax (lark, regex) and a definition"
        raise invalid(where, problem)
    if any("\ud800" <= character <= "\udfff" for character in definition):
        raise invalid(where, f"{where}: the definition is not valid Unicode (lone surrogate)")
    return syntax, definition


def _anchored(regex: str) -> str:
    """Return an expression that whole texts match."""
    ends = re.search(r"(?<!\\)(?:\\\\)*\$\Z", regex) is not None
    return f"^(?:{regex.removeprefix('^')[: -1 if ends else None]})$"


class CustomInputs:
    """Replaces the arguments of custom tools by their input, as they grow.

    Args:
        names: custom tools of the request.
        is_raw: the arguments are the input itself, not an object with it.
    """

    def __init__(self, names: Collection[str], *, is_raw: bool = False) -> None:
        self._names = names
        self._is_raw = is_raw
        self._open: int | None = None
        self._begun = self._ended = False
        self._rest = ""

    def read(self, calls: list[ToolDelta], *, ended: bool) -> list[ToolDelta]:
        """Return new parts of calls. At the end, arguments of another form are the input as they are."""
        found: list[ToolDelta] = []
        for call in calls:
            if call.name is not None:
                found += self._close()
                if call.name in self._names:
                    self._open, self._begun, self._ended = call.index, False, False
            if self._open != call.index:
                found.append(call)
                continue
            text = self._push(call.arguments)
            if text or call.name is not None:
                found.append(ToolDelta(call.index, text, call.name, custom=True))
        return found + self._close() if ended else found

    def _push(self, text: str) -> str:
        if self._is_raw:
            return text
        self._rest += text
        if not self._begun:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._begun, self._rest = True, self._rest[begin.end() :]
        if self._ended:
            return ""
        characters = _CHARACTERS.match(self._rest)
        assert characters is not None, "the expression matches no text too"
        self._rest = self._rest[characters.end() :]
        self._ended = self._rest.startswith('"')
        try:
            return json.loads(f'"{characters[0]}"', strict=False)
        except ValueError:
            return characters[0]

    def _close(self) -> list[ToolDelta]:
        index, rest = self._open, self._rest
        self._open, self._rest = None, ""
        return [ToolDelta(index, rest, custom=True)] if index is not None and rest and not self._begun else []
