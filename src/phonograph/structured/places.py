"""Positions of subschemas in a JSON schema, so that property names and constants are not mistaken for keywords."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
SINGLE = frozenset(
    {"items", "additionalProperties", "additionalItems", "propertyNames", "contains", "not", "if", "then", "else"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
NEUTRAL = frozenset(
    {
        *("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "id", "$anchor", "$defs", "definitions"),
    }
)
"""Keywords that do not constrain a schema's values, apart from `type`."""
MAX_DEPTH = 120
"""Nested schemas at most. Each takes a level or two of JSON, whose depth the library limits."""


def schemas(root: Schema) -> Iterator[tuple[Schema, Schema, int]]:
    """Yield the schema and all its subschemas, each with its resource and its depth.

    A resource is the root or a subschema with an `$id`; references resolve within it. Stops at the first schema that is
    deeper than MAX_DEPTH.
    """
    pending: list[tuple[Any, Schema, int]] = [(root, root, 0)]
    while pending:
        schema, resource, depth = pending.pop()
        if isinstance(schema, dict):
            resource = schema if "$id" in schema else resource
            yield schema, resource, depth
            if depth > MAX_DEPTH:
                return
            pending += [(one, resource, depth + 1) for _, one in inner(schema)]


def inner(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas, each with its keyword."""
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from ((key, one) for one in value.values())
        elif key in LISTS and isinstance(value, list):
            yield from ((key, one) for one in value)
        elif key in SINGLE:
            yield key, value


def at_pointer(resource: Schema, reference: str) -> Any:
    """Return the target of a reference such as `#/$defs/name`; None if it does not exist or is in another document."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    value: Any = resource
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value


def resolved(schema: Any, resource: Schema) -> Any:
    """Follow references within a resource. The result allows all that the schema allows; siblings may allow less."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = at_pointer(resource, schema["$ref"])
    return None
