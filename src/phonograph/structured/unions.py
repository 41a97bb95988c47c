"""Unions: `oneOf` becomes `anyOf` where no value can match two branches, as in pydantic's discriminated unions.

The library proves this too, but not of branches that are references.
"""

from __future__ import annotations

import itertools
from typing import Any

from phonograph.structured.places import Schema, resolved

MOST_BRANCHES = 100
"""Branches of a union, with those of unions within it, that are compared, each with each."""
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def require_tag(schema: Schema, resource: Schema) -> None:
    """Make the property that discriminates a union required: pydantic needs it in inputs, whatever its default."""
    discriminator = schema.pop("discriminator", None)  # from OpenAPI; with it the library rejects recursive references
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    for branch in _branches(schema, resource) if isinstance(tag, str) else ():
        required = branch.get("required", [])
        if tag in _properties(branch) and isinstance(required, list) and tag not in required:
            branch["required"] = [*required, tag]


def write_union(schema: Schema, resource: Schema) -> None:
    """Turn `oneOf` into `anyOf` if each two branches have no value in common."""
    union = schema.get("oneOf")
    if not isinstance(union, list) or "anyOf" in schema:
        return
    branches = [_branches(one, resource) for one in union[: MOST_BRANCHES + 1]]
    if sum(map(len, branches)) <= MOST_BRANCHES and all(
        _differ(one, other, resource)
        for several, others in itertools.combinations(branches, 2)
        for one, other in itertools.product(several, others)
    ):
        schema["anyOf"] = schema.pop("oneOf")


def _branches(schema: Any, resource: Schema) -> list[Schema]:
    """Return schemas that together allow all values of a schema, or more: itself, or the branches of its unions."""
    found: list[Schema] = []
    pending = [schema]
    for _ in range(MOST_BRANCHES):
        if not pending:
            return found
        one = resolved(pending.pop(), resource)
        one = one if isinstance(one, dict) else {}
        union = one.get("oneOf", one.get("anyOf"))
        if isinstance(union, list):
            pending += union
        else:
            found.append(one)
    return [{}]


def _differ(one: Schema, other: Schema, resource: Schema) -> bool:
    """Return True if no value matches both, by types, constants, or a required property with different constants."""
    if _have_no_common_value(one, other) or _types(one).isdisjoint(_types(other)):
        return True
    if {"object"} not in (_types(one), _types(other)):
        return False
    required = [name for side in (one, other) for name in side.get("required", ()) if isinstance(name, str)]
    tags = [[resolved(_properties(side).get(name), resource) for side in (one, other)] for name in required]
    return any(all(isinstance(tag, dict) for tag in pair) and _have_no_common_value(*pair) for pair in tags)


def _have_no_common_value(one: Schema, other: Schema) -> bool:
    values = [values_of(one), values_of(other)]
    return None not in values and not set.intersection(*({*map(identity, side)} for side in values if side is not None))


def _types(schema: Schema) -> set[str]:
    kinds = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    if "type" not in schema and (values := values_of(schema)) is not None:
        kinds = [TYPES.get(type(one), "array" if isinstance(one, list) else "object") for one in values]
    return {str(kind).replace("integer", "number") for kind in (kinds if isinstance(kinds, list) else [kinds])}


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def values_of(schema: Schema) -> list[Any] | None:
    """Return the distinct values of a `const` or `enum`. As in JSON Schema, 1 equals 1.0 and True differs from 1."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return list({identity(one): one for one in values}.values())


def identity(value: Any) -> Any:
    """Return a hashable value that equals another's if JSON Schema calls both equal."""
    if isinstance(value, list):
        return "list", *map(identity, value)
    if isinstance(value, dict):
        return "dict", frozenset((name, identity(one)) for name, one in value.items())
    return isinstance(value, bool), value
