"""Where JSON Schema has schemas, so that names of properties are not taken for keywords, nor constants for schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems", "propertyNames"})
DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas, whatever they look like."""
MAX_DEPTH = 200


def schemas(value: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """The schema and all those in it, each with its depth; ends with the first that lies deeper than `MAX_DEPTH`."""
    pending = [(value, 0)]
    while pending:
        schema, depth = pending.pop()
        if not isinstance(schema, dict):
            continue
        yield schema, depth
        if depth > MAX_DEPTH:
            return
        pending += [(one, depth + 1) for one in _inner(schema)]


def _inner(schema: dict[str, Any]) -> list[Any]:
    inner: list[Any] = []
    for key, value in schema.items():
        if key in SCHEMA_MAPS and isinstance(value, dict):
            inner += value.values()
        elif key in SCHEMA_LISTS and isinstance(value, list):
            inner += value
        elif key in SCHEMAS:
            inner.append(value)
    return inner
