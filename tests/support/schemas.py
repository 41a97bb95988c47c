"""Random JSON schemas of the kind that programs send: nested objects and arrays of bounded values, enums, unions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

WORDS = ("name", "age", "price", "tags", "city", "Größe", "id", "is_open", 'the "best"', "x y", "日付", "note")
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """An object, whose values end soon: what has no bound in its schema could run into any limit of tokens."""
    schema = _object(rng, depth)
    if rng.random() < 0.2:
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    properties = {name: _value(rng, depth - 1) for name in rng.sample(WORDS, rng.randint(1, 4))}
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> Schema:
    choice = rng.random()
    if depth <= 0 or choice < 0.5:
        return _leaf(rng)
    if choice < 0.65:
        return _object(rng, depth)
    if choice < 0.8:
        low = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if choice < 0.9:
        return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    items = [_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _leaf(rng: random.Random) -> Schema:
    low, size = rng.randint(-1000, 1000), rng.randint(0, 2000)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + size},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + size + 2},
            {"type": "boolean"},
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 8)},
            {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{1,3}$", "^(yes|no)$", r"^\d{4}-\d{2}$"])},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample([1, 2.5, "a", "b\n", None, True, "é", -7], rng.randint(1, 4))},
            {"const": rng.choice(["fixed", 3, None, False])},
            {"type": "null"},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        ]
    )


TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        5,
        7,
        100,
        -1,
        -3,
        2.5,
        0.5,
        3.0,
        1.05,
        "",
        "a",
        "b",
        "ab",
        "abc",
        "aaaa",
        "é",
        "1",
    ),
    *(
        [],
        [1],
        [1, 2],
        [1, 1],
        [1, 2, 3],
        ["a"],
        ["a", "b"],
        ["a", "a"],
        ["a", 1],
        [[]],
        [None],
        {},
        {"a": 1},
        {"a": "x"},
    ),
    *({"b": 1}, {"a": [1]}, {"a": 1, "b": 2}, {"ab": 1}, {"a": None}, {"a": 1, "c": 3}, {"c": "x"}, {"a": {"a": 1}}),
]
"""Values that random schemas of any keywords often allow."""
_REFERENCES = (
    "#",
    "#/$defs/d",
    "#/$defs/a~1b",
    "#/$defs/d/items",
    "#n",
    "#/properties/a",
    "https://example.org/r",
    "r#n",
)
_PATTERNS = (
    "^a$",
    "^[ab]+$",
    "a",
    "^a",
    "b$",
    "^a|b$",
    "^(a|é){2,3}$",
    r'"',
    r"^\\?a",
    r"^\d+$",
    r"^\w*$",
    "^.$",
    "^$",
)

_REFUSED = ("contains", "minProperties", "not", "uniqueItems")
"""Keywords for which most schemas are refused."""


def random_root(rng: random.Random, formats: Sequence[str]) -> Schema:
    """Any keywords, with definitions that they and each other refer to, and a resource with the same names."""

    def definitions() -> Schema:
        names = {"d": any_schema(rng, formats, 1), "a/b": any_schema(rng, formats, 1)}
        return {"$defs": {**names, "n": {**any_schema(rng, formats, 0), "$anchor": "n"}}}

    root = {**any_schema(rng, formats, 3), **definitions()}
    if rng.random() < 0.5:
        root["$id"] = rng.choice(["https://example.org/root", "https://example.org/a/b.json"])
    root["$defs"]["r"] = {**any_schema(rng, formats, 2), **definitions(), "$id": "https://example.org/r"}
    return root


def any_schema(rng: random.Random, formats: Sequence[str], depth: int = 2) -> Schema:
    """Any keywords beside each other, with a type or without, sensible or not."""

    def inner() -> Any:
        return any_schema(rng, formats, depth - 1) if depth > 0 else rng.choice([{}, True, *map(_typed, TYPES)])

    def typed() -> Schema:
        """An object or array with bounds, as most schemas have at their top."""
        names = rng.sample(["a", "b", "ab", "c"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": [name for name in names if rng.random() < 0.4],
            **rng.choice([{}, {}, {"additionalProperties": False}, {"patternProperties": {"^b": inner()}}]),
        }

    def huge() -> Any:
        return rng.choice([2**64, -(2**70), 1e30]) if rng.random() < 0.1 else 4

    keywords: dict[str, Callable[[], Any]] = {
        "pattern": lambda: rng.choice(_PATTERNS),
        "minLength": lambda: rng.randint(0, 3),
        "maxLength": lambda: rng.randint(0, 4),
        "minimum": lambda: rng.choice([0, 1, 3, 2.5, -2, 0.05, -0.125, -5, 10, 0.5, huge()]),
        "maximum": lambda: rng.choice([0, 3, 5, 2.5, 1.05, 99.99, 100, 7, -1, 0.75, huge()]),
        "exclusiveMinimum": lambda: rng.choice([0, 1, 2, 0.1, -(2**63), -1.5]),
        "exclusiveMaximum": lambda: rng.choice([3, 5, 1e-7, 2.25, 2**70]),
        "multipleOf": lambda: rng.choice([2, 3, 0.5, 0.01, 0.3, 2.5, 7]),
        "items": lambda: rng.choice([inner(), inner(), False]),
        "prefixItems": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "minItems": lambda: rng.randint(0, 2),
        "maxItems": lambda: rng.randint(0, 3),
        "uniqueItems": lambda: rng.random() < 0.7,
        "properties": lambda: {name: inner() for name in rng.sample(["a", "b", "ab"], rng.randint(1, 2))},
        "required": lambda: rng.sample(["a", "b"], rng.randint(0, 2)),
        "additionalProperties": lambda: rng.choice([False, True, inner()]),
        "patternProperties": lambda: {rng.choice(["^a", "b$", "^[a-c]$", "."]): inner()},
        "propertyNames": lambda: rng.choice(
            [{"pattern": "^a$"}, {"enum": ["a", "c"]}, {"minLength": 1, "maxLength": 2}, {"const": "b"}, {}, inner()]
        ),
        "minProperties": lambda: rng.choice([0, 1, 1, 2]),
        "maxProperties": lambda: rng.randint(0, 2),
        "dependentRequired": lambda: {rng.choice("ab"): rng.sample("abc", rng.randint(0, 2))},
        "dependencies": lambda: {rng.choice("ab"): rng.sample("abc", rng.randint(0, 2))},
        "not": lambda: rng.choice([{"required": rng.sample("abc", rng.randint(1, 2))}, inner()]),
        "enum": lambda: rng.sample(
            [1, "a", None, 2.5, True, "b", [1], {"a": 1}, 1.0, "ab", 3, 10**15], rng.randint(1, 4)
        ),
        "const": lambda: rng.choice([1, "a", None, {"a": 1}, [1, 2], huge(), {"$ref": "#"}, '"\\/\n']),
        "anyOf": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "oneOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "allOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "$ref": lambda: rng.choice(_REFERENCES),
        "format": lambda: rng.choice([*formats, "int32", "phone"]),
        "contains": inner,
        "$comment": lambda: {"$ref": "#"},
    }
    schema: Schema = typed() if rng.random() < 0.3 else {}
    chosen = rng.sample(sorted(keywords), rng.choice([0, 1, 1, 2, 2, 3]))
    schema |= {key: keywords[key]() for key in chosen if key not in _REFUSED or rng.random() < 0.3}
    choice = rng.random()
    if "type" not in schema and choice < 0.7:
        schema["type"] = rng.choice(TYPES) if choice < 0.6 else rng.sample(TYPES, rng.randint(1, 3))
    return schema


def _typed(kind: str) -> Schema:
    return {"type": kind}
