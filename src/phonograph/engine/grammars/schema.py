"""What of a JSON schema a grammar cannot hold. Refused by name: else outputs would break the schema in silence."""

from __future__ import annotations

from typing import Any

from phonograph.engine.grammars.formats import narrow_format, refusal_of_format
from phonograph.engine.grammars.numbers import BOUNDS, narrow_numbers, refusal_of_numbers
from phonograph.engine.grammars.patterns import PatternError, rewritten
from phonograph.engine.grammars.places import schemas
from phonograph.engine.grammars.references import KEYWORDS, References, SchemaError
from phonograph.errors import shortened

REFUSED = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_NOTES = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "examples",
        "readOnly",
        "strict",
        "title",
        "writeOnly",
    }
)
WHOLE: dict[str, frozenset[str]] = {
    **dict.fromkeys((*KEYWORDS, "anyOf", "oneOf", "allOf"), _NOTES),
    **dict.fromkeys(("const", "enum"), _NOTES | {"type"}),
}
"""Keywords that the library takes for the whole schema, and what may stand beside them."""
_TYPE_OF = {
    keyword: kind
    for kind, keywords in (
        ("string", ("pattern", "format", "minLength", "maxLength")),
        ("number", (*BOUNDS, "multipleOf")),
        ("array", ("items", "prefixItems", "additionalItems", "minItems", "maxItems")),
        ("object", ("properties", "patternProperties", "additionalProperties", "propertyNames")),
        ("object", ("required", "minProperties", "maxProperties")),
    )
    for keyword in keywords
}
"""The type of values that a keyword says something of."""
_SAME = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}
"""Patterns that many programs send (this one is pydantic's of a Decimal), and what they mean without looking ahead."""


def refusal(value: Any) -> str | None:
    """Why a schema cannot be held by a grammar; None where it can, as far as can be seen before it is compiled.

    `oneOf` is let through, as vLLM does, though a grammar takes it for `anyOf`: in most schemas its branches exclude
    each other anyway.
    """
    try:
        found = References(value).schemas
    except SchemaError as error:
        return str(error)
    checks = (_refusal_of_keywords, _refusal_of_names, _refusal_of_values, refusal_of_numbers, _refusal_of_texts)
    return next((problem for schema in found for check in checks if (problem := check(schema)) is not None), None)


def _refusal_of_keywords(schema: dict[str, Any]) -> str | None:
    """Keywords that cannot be held at all, or not beside each other."""
    for key in schema:
        if key in REFUSED:
            return f"the keyword {key!r} cannot be held by a grammar"
    if schema.get("uniqueItems"):
        return "uniqueItems cannot be held by a grammar"
    together = schema.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return "allOf of several schemas cannot be held by a grammar; merge them into one"
    whole = next((key for key in WHOLE if key in schema), None)
    if whole is not None:
        beside = next((key for key in schema if key != whole and key not in WHOLE[whole]), None)
        if beside is not None:
            return f"{beside!r} beside {whole!r} cannot be held by a grammar; merge them into one schema"
    return None


def _refusal_of_names(schema: dict[str, Any]) -> str | None:
    """What is said of the names of properties."""
    names = next((key for key in ("patternProperties", "propertyNames") if key in schema), None)
    if names is not None and schema.get("properties"):
        return f"{names!r} beside 'properties' cannot be held by a grammar"
    if "propertyNames" in schema and schema.get("additionalProperties") is False:
        return "'propertyNames' beside 'additionalProperties': false cannot be held by a grammar"
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        unknown = [name for name in required if not isinstance(name, str) or name not in properties]
        if unknown:
            return f"the required {unknown[0]!r} must be among the properties"
    least, named = schema.get("minProperties"), len(required) if isinstance(required, list) else 0
    is_open = names is not None or schema.get("additionalProperties", False) is not False
    if isinstance(least, int) and least > named + 1 and is_open:
        return (
            f"'minProperties': {least} cannot be held by a grammar where names are open, as one could come again and "
            "again; require names, or leave additionalProperties out"
        )
    return None


def _refusal_of_values(schema: dict[str, Any]) -> str | None:
    """Choices of which nothing is left."""
    chosen = next((key for key in ("const", "enum") if key in schema and "type" in schema), None)
    if chosen is not None and not _left_of(schema, chosen):
        return f"{chosen!r} has no value of the type {schema['type']!r}"
    empty = next((key for key in ("type", "anyOf", "oneOf", "allOf") if schema.get(key) == []), None)
    return None if empty is None else f"{empty!r} is empty"


def _refusal_of_texts(schema: dict[str, Any]) -> str | None:
    """Patterns, formats and lengths."""
    for pattern in _patterns(schema):
        try:
            rewritten(pattern, in_json=True)
        except PatternError as error:
            return f"the pattern {shortened(pattern)} {error}"
    if (problem := refusal_of_format(schema)) is not None:
        return problem
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        return "pattern and a length exclude each other; write the length into the pattern, as {1,10}"
    return None


def narrow(value: Any) -> None:
    """Makes of a schema, in place, one that the library does not take too widely.

    References lead to `$defs`. Keywords without a type say nothing of values of other types, and the library drops most
    of them then: such a schema gets the type that they are of, or all of these. Of constants those stay that are of the
    type beside them. Formats become patterns (leading zeros, a 30th of February), and patterns others that mean the
    same.
    """
    References(value).write()
    for schema, _ in schemas(value):
        kinds = sorted({_TYPE_OF[key] for key in schema if key in _TYPE_OF})
        if kinds and "type" not in schema:
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        for key in ("const", "enum"):
            if key in schema and "type" in schema:
                left = _left_of(schema, key)
                del schema["type"]
                schema[key] = left[0] if key == "const" else left
        narrow_numbers(schema)
        narrow_format(schema)
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"] = rewritten(_SAME.get(pattern, pattern), in_json=True)
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            schema["patternProperties"] = {rewritten(name, in_json=True): inner for name, inner in named.items()}


def _patterns(schema: dict[str, Any]) -> list[str]:
    """Of names of properties, and of values as the library will have it."""
    names = schema.get("patternProperties")
    found = [*names] if isinstance(names, dict) else []
    return [*found, _SAME.get(pattern, pattern)] if isinstance(pattern := schema.get("pattern"), str) else found


def _left_of(schema: dict[str, Any], key: str) -> list[Any]:
    """The values of `const` or `enum` that are of the schema's type."""
    values = [schema[key]] if key == "const" else schema[key]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return [one for one in values if _kinds_of(one) & {*map(str, kinds)}] if isinstance(values, list) else []


def _kinds_of(value: Any) -> set[str]:
    """The types of JSON Schema that a value is of."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}
