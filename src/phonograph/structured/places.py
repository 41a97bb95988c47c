"""Places where JSON Schema has schemas, so that names of properties and constants are not taken for keywords."""

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
MAX_DEPTH = 120
"""The library takes no text of JSON that lies deeper, in which each schema takes a level or two."""


def schemas(root: Schema) -> Iterator[tuple[Schema, Schema, int]]:
    """Yields the schema and all those in it, each with the resource that its references are of and its depth.

    A resource is the root, or a schema in it that has an `$id`. Ends with the first schema that lies too deep.
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
    """Yields the schemas right below one, each with the keyword that it stands under."""
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from ((key, one) for one in value.values())
        elif key in LISTS and isinstance(value, list):
            yield from ((key, one) for one in value)
        elif key in SINGLE:
            yield key, value


def at_pointer(resource: Schema, reference: str) -> Any:
    """Returns what a reference such as `#/$defs/name` leads to, or None where it leads nowhere or elsewhere."""
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
