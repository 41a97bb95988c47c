"""Unions: `oneOf` becomes `anyOf` where no value can match two branches, as in pydantic's discriminated unions.

The library proves this too, but not of branches that are references.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from phonograph.structured.places import Schema, resolved

MOST_BRANCHES = 100
"""Branches of a union, with those of unions within it, that are compared, each with each."""


class _Facts(NamedTuple):
    """Facts about the values of a schema; empty values and tags are unknown."""

    types: set[str]
    values: set[Any]
    tags: dict[str, set[Any]]
    required: set[str]


def require_tag(schema: Schema, resource: Schema) -> None:
    """Make the property that discriminates a union required: pydantic needs it in inputs, whatever its default."""
    discriminator = schema.pop("discriminator", None)  # from OpenAPI; with it the library rejects recursive references
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    for branch in _branches(schema, resource) if isinstance(tag, str) else ():
        required = branch.get("required", [])
        if tag in _properties(branch) and isinstance(required, list) and tag not in required:
            branch["required"] = [*required, tag]


def write_unions(found: list[tuple[Schema, Schema, int]]) -> None:
    """Turn each `oneOf` into `anyOf` if each two branches have no value in common, in schemas with their resources."""
    known: dict[int, _Facts] = {}
    if any("/oneOf/" in str(schema.get("$ref")) for schema, _, _ in found):
        return  # the reference would lead nowhere
    for schema, resource, _ in found:
        union = schema.get("oneOf")
        if not isinstance(union, list) or "anyOf" in schema:
            continue
        branches = [_branches(one, resource) for one in union[: MOST_BRANCHES + 1]]
        if sum(map(len, branches)) > MOST_BRANCHES:
            continue
        known |= {id(one): _facts(one, resource) for several in branches for one in several if id(one) not in known}
        if all(
            _differ(known[id(one)], known[id(other)])
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


def _facts(schema: Schema, resource: Schema) -> _Facts:
    kinds = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    tags = {name: _identities(resolved(one, resource)) for name, one in _properties(schema).items()}
    return _Facts(
        {str(kind).replace("integer", "number") for kind in (kinds if isinstance(kinds, list) else [kinds])},
        _identities(schema),
        {name: values for name, values in tags.items() if values},
        {name for name in schema.get("required", ()) if isinstance(name, str)},
    )


def _differ(one: _Facts, other: _Facts) -> bool:
    """Return True if no value matches both, by types, constants, or a required property with different constants."""
    if one.types.isdisjoint(other.types) or (one.values and other.values and one.values.isdisjoint(other.values)):
        return True
    tags = (one.required | other.required) & one.tags.keys() & other.tags.keys()
    return {"object"} in (one.types, other.types) and any(one.tags[tag].isdisjoint(other.tags[tag]) for tag in tags)


def _identities(schema: Any) -> set[Any]:
    return {*map(identity, (values_of(schema) if isinstance(schema, dict) else None) or ())}


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
