"""What of a JSON schema a grammar cannot hold. Refused by name: else outputs would break the schema in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        texts = [key for key in ("pattern", "format") if key in schema]
        if texts and ("minLength" in schema or "maxLength" in schema):
            return f"{texts[0]} and a length exclude each other; write the length into the pattern, as {{1,10}}"
    return None


def narrow(value: Any) -> None:
    """Puts patterns for formats that the library takes too widely into a schema: leading zeros, a 30th of February."""
    for schema, _ in _schemas(value, 0):
        form = schema.get("format")
        if schema.get("type") == "string" and isinstance(form, str) and form in _PATTERNS and "pattern" not in schema:
            del schema["format"]
            schema["pattern"] = _PATTERNS[form]


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
