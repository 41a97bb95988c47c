"""Constraints on an output: JSON, a JSON schema, a choice of texts, a regular expression or a grammar."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from phonograph.core.checked_arguments import checks_arguments
from phonograph.errors import RequestError, shortened

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
Strictness = Literal["strict", "relaxed"]
MAX_CHARACTERS = 200_000
"""Maximum length of a schema, an expression or a grammar."""

_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")


@checks_arguments(
    "structured output",
    # Backends of vLLM differ in speed only.
    neutral={
        "backend": _BACKENDS,
        "backend_was_auto": (True, False),
        "disable_fallback": (True, False),
        "whitespace_pattern": (),
    },
    hints={"whitespace_pattern": "is not here; disable_any_whitespace chooses the white space of JSON"},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on an output, by exactly one of the first six fields. Names and meanings are vLLM's.

    Two constraints with the same `kind` and `source` are equal.

    Attributes:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that the whole output matches.
        choice: texts, one of which is the output.
        grammar: a context-free grammar in GBNF, whose start rule is `root`, or in llguidance's dialect of Lark.
        json_object: any JSON object.
        structural_tag: text with JSON in it, as an object or as text: "triggers" are texts after which the output
            continues as one of "structures", each with "begin", which starts with a trigger, "schema" and "end".
        disable_any_whitespace: JSON on one line, with at most a space after each comma and colon. Else the model
            chooses line breaks and indentation, which small models generate until their tokens are spent.
        disable_additional_properties: close objects that list properties and do not mention others. JSON Schema allows
            any others, and weak models then never end the object.
        strictness: "strict" rejects keywords of a JSON schema that cannot be enforced; "relaxed" ignores them and
            reports them in the output's warnings. None takes the engine's setting.

    Raises:
        RequestError: none or several are set, or a value is invalid.

    Example:
        ```python
        constraint = StructuredOutputs(choice=["yes", "no"])
        params = SamplingParams(structured_outputs=constraint)
        assert constraint.kind == "choice"
        ```
    """

    json: Mapping[str, object] | str | bool | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Mapping[str, object] | str | None = None
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = True
    strictness: Strictness | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be True or False")
        if self.strictness not in (None, *get_args(Strictness)):
            raise RequestError("strictness", self.strictness, "must be strict or relaxed")
        names = ("json", "regex", "choice", "grammar", "structural_tag")
        fields = [name for name in names if getattr(self, name) is not None] + ["json_object"] * self.json_object
        if len(fields) != 1:
            shown = ", ".join(fields) or "nothing"
            known = f"{', '.join(names)} and json_object"
            raise RequestError("structured_outputs", shown, f"set exactly one of {known}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema("json", self.json))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _tags(self.structural_tag))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(name, text, "must be a non-empty string")
        _check_length(self.kind, self.source)

    @property
    def kind(self) -> Kind:
        """Name of the field that is set."""
        if self.json is not None:
            return "json"
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        if self.structural_tag is not None:
            return "structural_tag"
        return "grammar" if self.grammar is not None else "json_object"

    @property
    def source(self) -> str:
        """The constraint as text; choices as a JSON list."""
        if self.choice is not None:
            return json_text.dumps(self.choice)
        text = self.json or self.regex or self.grammar or self.structural_tag
        return text if isinstance(text, str) else ""


def _check_length(kind: str, source: str) -> None:
    if len(source) > MAX_CHARACTERS:
        problem = f"has {len(source)} characters; the maximum is {MAX_CHARACTERS}"
        raise RequestError(kind, f"{source[:50]}...", problem)


def _schema(name: str, schema: object) -> str:
    """Return a schema as canonical text. The order of properties is kept, because the output follows it."""
    value = schema
    if isinstance(schema, str):
        _check_length(name, schema)
        try:
            value = json_text.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(name, shortened(schema), f"is not valid JSON: {error}") from None
    if not isinstance(value, Mapping | bool):
        raise RequestError(name, shortened(str(schema)), "must be a JSON schema: an object, or its text")
    try:
        return json_text.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(name, shortened(str(type(schema))), f"is not valid JSON: {error}") from None


def _tags(tags: object) -> str:
    """Return structural tags as canonical text, with their triggers and structures checked."""
    text = _schema("structural_tag", tags)
    value: Any = json_text.loads(text)
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    triggers, structures, layout = (fields.get(key) for key in ("triggers", "structures", "layout"))
    texts: list[Any] = cast("list[Any]", triggers) if isinstance(triggers, list) else [None]
    are_texts = all(isinstance(one, str) and one for one in texts)
    if not are_texts or not (texts or layout) or not isinstance(structures, list) or not structures:
        raise RequestError("structural_tag", shortened(text), "must have lists of triggers and of structures")
    for structure in cast("list[Any]", structures):
        begin = structure.get("begin") if isinstance(structure, dict) else None
        is_item = isinstance(layout, dict) and "separator" in layout
        if not isinstance(begin, str) or not (is_item or begin.startswith(tuple(texts))):
            raise RequestError("structural_tag", shortened(text), "each structure must have a begin with a trigger")
        if not isinstance(structure.get("end", ""), str) or not isinstance(structure.get("schema"), dict | bool):
            raise RequestError("structural_tag", shortened(text), "each structure must have a schema and an end")
    return text


def _choices(choices: object) -> tuple[str, ...]:
    found = tuple(choices) if isinstance(choices, Iterable) and not isinstance(choices, str) else ()
    if not found or not all(isinstance(one, str) and one for one in found):
        raise RequestError("choice", shortened(str(choices)), "must be a list of at least one text, none of them empty")
    return found
