"""What of a JSON schema a grammar cannot hold. Refused by name: else outputs would break the schema in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phonograph.engine.grammars.patterns import PatternError, rewritten
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
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "propertyNames")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NOTES = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
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
_WHOLE = {"$ref": _NOTES, "anyOf": _NOTES, "oneOf": _NOTES, "allOf": _NOTES} | dict.fromkeys(
    ("const", "enum"), _NOTES | {"type"}
)
"""Keywords that the library takes for the whole schema, and what may stand beside them."""
_TYPE_OF = {
    keyword: kind
    for kind, keywords in (
        ("string", ("pattern", "format", "minLength", "maxLength")),
        ("number", (*_BOUNDS, "multipleOf")),
        ("array", ("items", "prefixItems", "additionalItems", "minItems", "maxItems")),
        ("object", ("properties", "patternProperties", "additionalProperties", "propertyNames")),
        ("object", ("required", "minProperties", "maxProperties")),
    )
    for keyword in keywords
}
"""The type of values that a keyword says something of."""
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_DAYS = (
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])",
    "(0[469]|11)-(0[1-9]|[12][0-9]|30)",
    "02-(0[1-9]|1[0-9]|2[0-8])",  # a 29th would need the year
)
_PATTERNS = {
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "date": f"^[1-9][0-9]{{3}}-({'|'.join(_DAYS)})$",
}
_SAME = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}
"""Patterns that many programs send (this one is pydantic's of a Decimal), and what they mean without looking ahead."""
MAX_DEPTH = 200


def refusal(value: Any) -> str | None:
    """Why a schema cannot be held by a grammar; None where it can, as far as can be seen before it is compiled.

    `oneOf` is let through, as vLLM does, though a grammar takes it for `anyOf`: in most schemas its branches exclude
    each other anyway.
    """
    for schema, depth in _schemas(value, 0):
        if depth > MAX_DEPTH:
            return f"schemas lie more than {MAX_DEPTH} deep in each other"
        for key in schema:
            if key in REFUSED:
                return f"the keyword {key!r} cannot be held by a grammar"
        if schema.get("uniqueItems"):
            return "uniqueItems cannot be held by a grammar"
        together = schema.get("allOf")
        if isinstance(together, list) and len(together) > 1:
            return "allOf of several schemas cannot be held by a grammar; merge them into one"
        whole = next((key for key in _WHOLE if key in schema), None)
        if whole is not None:
            beside = next((key for key in schema if key != whole and key not in _WHOLE[whole]), None)
            if beside is not None:
                return f"{beside!r} beside {whole!r} cannot be held by a grammar; merge them into one schema"
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            return f"the reference {reference!r} leads elsewhere; put what it means into $defs"
        names = next((key for key in ("patternProperties", "propertyNames") if key in schema), None)
        if names is not None and schema.get("properties"):
            return f"{names!r} beside 'properties' cannot be held by a grammar"
        if "propertyNames" in schema and schema.get("additionalProperties") is False:
            return "'propertyNames' beside 'additionalProperties': false cannot be held by a grammar"
        chosen = next((key for key in ("const", "enum") if key in schema and "type" in schema), None)
        if chosen is not None and not _left_of(schema, chosen):
            return f"{chosen!r} has no value of the type {schema['type']!r}"
        empty = next((key for key in ("type", "anyOf", "oneOf", "allOf") if schema.get(key) == []), None)
        if empty is not None:
            return f"{empty!r} is empty"
        required, properties = schema.get("required"), schema.get("properties", {})
        if isinstance(required, list) and isinstance(properties, dict):
            unknown = [name for name in required if not isinstance(name, str) or name not in properties]
            if unknown:
                return f"the required {unknown[0]!r} must be among the properties"
        if "multipleOf" in schema and (schema.get("type") != "integer" or any(key in schema for key in _BOUNDS)):
            return "multipleOf can be held by a grammar for integers without bounds only"
        for pattern in _patterns(schema):
            try:
                rewritten(pattern, in_json=True)
            except PatternError as error:
                return f"the pattern {shortened(pattern)} {error}"
        texts = [key for key in ("pattern", "format") if key in schema]
        if texts and ("minLength" in schema or "maxLength" in schema):
            return f"{texts[0]} and a length exclude each other; write the length into the pattern, as {{1,10}}"
    return None


def narrow(value: Any) -> None:
    """Makes of a schema, in place, one that the library does not take too widely.

    Keywords without a type say nothing of values of other types, and the library drops most of them then: such a schema
    gets the type that they are of, or all of these. Of constants those stay that are of the type beside them. Some
    formats become patterns (leading zeros, a 30th of February), and patterns others that mean the same.
    """
    for schema, _ in _schemas(value, 0):
        kinds = sorted({_TYPE_OF[key] for key in schema if key in _TYPE_OF})
        if kinds and "type" not in schema:
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        for key in ("const", "enum"):
            if key in schema and "type" in schema:
                left = _left_of(schema, key)
                del schema["type"]
                schema[key] = left[0] if key == "const" else left
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"] = rewritten(_SAME.get(pattern, pattern), in_json=True)
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            schema["patternProperties"] = {rewritten(name, in_json=True): inner for name, inner in named.items()}
        form = schema.get("format")
        if schema.get("type") == "string" and isinstance(form, str) and form in _PATTERNS and "pattern" not in schema:
            del schema["format"]
            schema["pattern"] = _PATTERNS[form]


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


def _schemas(value: Any, depth: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The schema and all those in it, where JSON Schema has schemas: names of properties are no keywords."""
    pending = [(value, depth)]
    while pending:
        schema, depth = pending.pop()
        if not isinstance(schema, dict):
            continue
        yield schema, depth
        if depth > MAX_DEPTH:
            return
        inner = [one for key in _SCHEMA_MAPS if isinstance(schema.get(key), dict) for one in schema[key].values()]
        inner += [one for key in _SCHEMA_LISTS if isinstance(schema.get(key), list) for one in schema[key]]
        inner += [schema[key] for key in _SCHEMAS if isinstance(schema.get(key), dict)]
        pending += [(one, depth + 1) for one in inner]
