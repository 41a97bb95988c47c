"""Rules of a call's arguments: a JSON object, keyword arguments of Python, or Qwen3-Coder's tags of parameters.

Values of keyword arguments are JSON, which the parser of such calls reads too. The value of a tag is text where its
schema only allows strings, and JSON elsewhere.
"""

from __future__ import annotations

import copy
import json
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unicodedata import normalize

from phonograph.core.grammar import GrammarError
from phonograph.structured.formats import PATTERNS
from phonograph.structured.places import NEUTRAL
from phonograph.text.formats.xml_calls import value_types

_LISTED = NEUTRAL | {"properties", "required", "additionalProperties", "strict"}
"""Keywords of an object whose properties become parameters."""
_DEFINITIONS = ("$defs", "definitions")
_OF_TEXT = NEUTRAL | {"enum", "const", "minLength", "maxLength", "pattern", "format"}
_END = "\n</parameter>\n"
_LONG = 1_000_000
"""A maximum of characters that no output reaches."""
_NO_TEXT = r"~/(.|\n)*<\/parameter>(.|\n)*/ & ~/(.|\n)*\r/"
"""Values that the parser would read as something else."""


class _Parameter(NamedTuple):
    name: str
    schema: Any
    is_required: bool


class ArgumentRules:
    """Writer of rules. `lines` has the rules that the returned parts refer to.

    Args:
        json_rule: returns a schema as a part of a rule.
        lark_regex: returns a regular expression in the library's dialect.
    """

    def __init__(self, json_rule: Callable[[Mapping[str, Any] | bool], str], lark_regex: Callable[[str], str]) -> None:
        self.lines: list[str] = []
        self._json_rule = json_rule
        self._lark_regex = lark_regex
        self._known: dict[str, str] = {}

    def rule(self, structure: Mapping[str, Any]) -> str:
        """Return the arguments of a structure as a part of a rule.

        Raises:
            GrammarError: its form cannot hold the schema.
        """
        form, schema, grammar = structure.get("form", "json"), structure["schema"], structure.get("grammar")
        key = json.dumps([form, schema, grammar])
        if key not in self._known:
            if form == "json":
                body = self._json_rule(schema)
            elif form == "keywords":
                body = self._keywords(schema)
            else:
                body = self._tags(schema, grammar)
            self._known[key] = self._add(body)
        return self._known[key]

    def _add(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"PART_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _keywords(self, schema: Mapping[str, Any]) -> str:
        parameters = _parameters(schema)
        if parameters is None:
            key, value = self._terminal("/[A-Za-z_][A-Za-z0-9_]{0,63}=/"), self._add(self._json_rule({}))
            return f'({key} {value} (", " {key} {value})*)?'
        # From the last parameter on: the rules of what may follow before the first argument, and after another one.
        first = further = self._add('""')
        for parameter in reversed(parameters):
            name = parameter.name
            is_name = name.isidentifier() and not keyword.iskeyword(name) and normalize("NFKC", name) == name
            if not is_name:
                raise GrammarError(f"the parameter {name[:50]!r} is no name of a keyword argument of Python")
            value = self._add(self._json_rule(parameter.schema))
            begun, continued = f'"{name}=" {value} {further}', f'", {name}=" {value} {further}'
            if not parameter.is_required:
                begun, continued = f"{begun} | {first}", f"{continued} | {further}"
            first, further = self._add(begun), self._add(continued)
        return first

    def _tags(self, schema: Mapping[str, Any], grammar: str | None) -> str:
        parameters = _parameters(schema)
        if parameters is None:
            key, value = self._terminal(r"/<parameter=[^>\n]{1,100}>\n/"), self._text({})
            return f"({key} {value})*"
        parts: list[str] = []
        for parameter in parameters:
            name = parameter.name
            if ">" in name or name != name.strip() or not name:
                raise GrammarError(f"the parameter {name[:50]!r} is no name of a tag")
            begin = json.dumps(f"<parameter={name}>\n", ensure_ascii=False)
            if grammar is not None:
                value = self._add(f"%lark {{\n{grammar}\n}}") + f" {json.dumps(_END)}"
            elif {*value_types(parameter.schema)} == {"string"}:
                value = self._text(parameter.schema)
            else:
                value = f"{self._add(self._json_rule(parameter.schema))} {json.dumps(_END)}"
            parts.append(f"({begin} {value}){'' if parameter.is_required else '?'}")
        return " ".join(parts) or '""'

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of a value that is text, with the end of its tag."""
        for key in schema:
            if key not in _OF_TEXT:
                raise GrammarError(f"{key[:50]} of a text cannot be enforced in this form of calls")
        kinds: list[str] = []
        if "enum" in schema or "const" in schema:
            choices = [one for one in schema.get("enum", [schema.get("const")]) if isinstance(one, str)]
            kinds.append(f"({' | '.join([json.dumps(one, ensure_ascii=False) for one in choices])})")
        least, most = (_count(schema.get(key, default)) for key, default in (("minLength", 0), ("maxLength", _LONG)))
        if least or most < _LONG:
            kinds.append(f"/(.|\\n){{{least},{'' if most >= _LONG else most}}}/")
        if "pattern" in schema:
            kinds.append(f"/{self._lark_regex(_whole(schema['pattern']))}/")
        if schema.get("format") in PATTERNS:
            kinds.append(f"/{self._lark_regex(PATTERNS[schema['format']])}/")
        value = self._terminal(" & ".join([*(kinds or [r"/(.|\n)*/"]), _NO_TEXT]))
        return self._add(f"{value} {json.dumps(_END)}", lazy=True)


def _parameters(schema: Mapping[str, Any]) -> list[_Parameter] | None:
    """Return the properties of an object as parameters; None if any may occur.

    Raises:
        GrammarError: the schema says more than that.
    """
    for key in schema:
        if key not in _LISTED:
            raise GrammarError(f"{key[:50]} of the parameters cannot be enforced in this form of calls")
    required: list[str] = schema.get("required", [])
    if "properties" not in schema and not required:
        return None
    properties: dict[str, Any] = {**schema.get("properties", {})}
    for name in required:
        properties.setdefault(name, True)
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    found: list[_Parameter] = []
    for name, declared in properties.items():
        value: Any = {} if declared is True else declared
        if value is False:
            if name in required:
                raise GrammarError(f"the required parameter {name[:50]!r} allows nothing")
            continue
        if '"$ref"' in json.dumps(value):
            value = {**shared, **value}
        # The rewriting of a schema changes it.
        found.append(_Parameter(name, copy.deepcopy(value), name in required))
    return found


def _count(value: Any) -> int:
    """Return a number of characters.

    Raises:
        GrammarError: it is none.
    """
    if isinstance(value, bool) or value != int(value) or value < 0:
        raise GrammarError(f"a text cannot have {str(value)[:50]} characters")
    return int(value)


def _whole(pattern: str) -> str:
    """Return an expression of whole texts that contain a match of a pattern.

    Raises:
        GrammarError: the pattern has an anchor in another place.
    """
    inner = pattern.removeprefix("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$\Z", inner) is not None
    inner = inner[:-1] if ends else inner
    if re.search(r"(?<!\[)[\^$]", re.sub(r"\\.", "", inner)):
        raise GrammarError(f"the pattern {pattern[:50]!r} has anchors within it, which this form of calls cannot hold")
    before, after = ("" if pattern.startswith("^") else r"(.|\n)*"), ("" if ends else r"(.|\n)*")
    return f"{before}({inner}){after}"
