"""What an output has to be: JSON, JSON of a schema, one of some texts, or what an expression or a grammar allows."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from phonograph.errors import RequestError, shortened

Kind = Literal["json", "regex", "choice", "grammar", "json_object"]
Strictness = Literal["strict", "relaxed"]
MAX_CHARACTERS = 200_000
"""Of a schema, an expression or a grammar: beyond that a mistake is likelier than a use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of these; the names and their meaning are vLLM's.

    json:        a JSON schema, as an object or as text
    regex:       a regular expression that the whole output matches
    choice:      texts, one of which the output is
    grammar:     a context-free grammar: in GBNF, whose first rule is `root`, or in llguidance's dialect of Lark
    json_object: any JSON object
    disable_any_whitespace: JSON on one line, instead of however the model breaks and indents it
    disable_additional_properties: objects whose schema lists properties, and does not say whether there may be others,
        have no others. JSON Schema would allow any, and weak models then write names for ever
    strictness: "strict" refuses what of a JSON schema cannot be held; "relaxed" leaves it out and says so in the
        output's warnings. None: as the engine is set

    `kind` and `source` say the same in a form that can be compared and sent: two outputs with the same are the same.

    Raises:
        RequestError: none or several are given, or what is given is no such thing.
    """

    json: Mapping[str, object] | str | bool | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    strictness: Strictness | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be True or False")
        if self.strictness not in (None, *get_args(Strictness)):
            raise RequestError("strictness", self.strictness, "must be strict or relaxed")
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            shown = ", ".join(given) or "nothing"
            raise RequestError("structured_outputs", shown, "give one of json, regex, choice, grammar and json_object")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(name, text, "must be a string that is not empty")
        _check_length(self.kind, self.source)

    @property
    def kind(self) -> Kind:
        if self.json is not None:
            return "json"
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        return "grammar" if self.grammar is not None else "json_object"

    @property
    def source(self) -> str:
        """What is given, as text; choices as a JSON list."""
        if self.choice is not None:
            return json_text.dumps(self.choice)
        given = self.json or self.regex or self.grammar
        return given if isinstance(given, str) else ""


def _check_length(kind: str, source: str) -> None:
    if len(source) > MAX_CHARACTERS:
        problem = f"has {len(source)} characters; at most {MAX_CHARACTERS} are taken"
        raise RequestError(kind, f"{source[:50]}...", problem)


def _schema(schema: object) -> str:
    """A schema as text, always written in the same way. The order of properties is kept: it is that of the output."""
    value = schema
    if isinstance(schema, str):
        _check_length("json", schema)
        try:
            value = json_text.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError("json", shortened(schema), f"is no JSON: {error}") from None
    if not isinstance(value, Mapping | bool):
        raise RequestError("json", shortened(str(schema)), "must be a JSON schema: an object, or its text")
    try:
        return json_text.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("json", shortened(str(type(schema))), f"is no JSON: {error}") from None


def _choices(choices: object) -> tuple[str, ...]:
    found = tuple(choices) if isinstance(choices, Iterable) and not isinstance(choices, str) else ()
    if not found or not all(isinstance(one, str) and one for one in found):
        raise RequestError("choice", shortened(str(choices)), "must be a list of one text or more, none of them empty")
    return found
