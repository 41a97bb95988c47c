"""Random JSON schemas of the kind that programs send: nested objects and arrays of bounded values, enums, unions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

WORDS = ("name", "age", "price", "tags", "city", "Größe", "id", "is_open", 'the "best"', "x y", "日付", "note")
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return a schema of an object with bounded values, which cannot run into a limit of tokens."""
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
# fmt: off
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, 7, 100, -1, -3, 2.5, 0.5, 1.05, "", "a", "b", "ab", "abc", "aaaa", "é", "1", [],
    [1], [1, 2], [1, 1], [1, 2, 3], ["a"], ["a", "b"], ["a", "a"], ["a", 1], [[]], [None], {}, {"a": 1}, {"a": "x"},
    {"b": 1}, {"a": [1]}, {"a": 1, "b": 2}, {"ab": 1}, {"a": None}, {"a": 1, "c": 3}, {"c": "x"}, {"a": {"a": 1}},
    {"a": 1, "ab": "a"},
]
"""Values that random schemas of any keywords often allow."""
_NUMBERS = [0, 1, 3, 4, 5, 7, 10, 99.99, 2.5, 2.25, 1.05, 0.5, 0.75, 0.1, 1e-7, 0.05, -0.125, -1.5, -2, -5]
_NAMES = [["a"], ["b"], ["a", "b"], ["c", "a"], []]
CHOICES: dict[str, Any] = {
    "pattern": [
        "^a$", "^[ab]+$", "a", "b$", "^a|b$", "^(a|é){2,3}$", r'^[^"]$', r"^\\?a", r"^\d+$", r"^\w*$", "^.$", "^$",
    ],
    "minLength": range(4), "maxLength": range(5), "minItems": range(3), "maxItems": range(4), "maxProperties": range(3),
    "minProperties": range(3), "minimum": _NUMBERS, "maximum": _NUMBERS, "exclusiveMinimum": _NUMBERS,
    "exclusiveMaximum": _NUMBERS, "multipleOf": [2, 3, 0.5, 0.01, 0.3, 2.5, 7], "uniqueItems": [True, True, False],
    "required": _NAMES, "dependentRequired": [{"a": ["b"]}, {"b": ["a", "c"]}], "additionalProperties": [False, True],
    "not": [{"required": one} for one in _NAMES], "propertyNames": [
        {"pattern": "^a$"}, {"enum": ["a", "c"]}, {"minLength": 1, "maxLength": 2}, {"const": "b"}, {},
    ],
    "enum": [[1, "a", None], [2.5, True, "b"], [[1], {"a": 1}, 1.0], ["ab", 3, 10**15]], "$comment": [{"$ref": "#"}],
    "const": [1, "a", None, {"a": 1}, [1, 2], {"$ref": "#"}, '"\\/\n', 2**70, 1e22], "contains": [{"const": 1}],
    "$ref": ["#", "#/$defs/d", "#/$defs/a~1b", "#/$defs/d/items", "#n", "#/properties/a", "https://example.org/r", "r"],
}
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPS = {"properties": ["a", "b", "ab", "c"], "patternProperties": ["^a", "b$", "^[a-c]$", "."]}
_SINGLE = ("items", "additionalProperties", "not", "propertyNames")
_REFUSED = ("contains", "minProperties", "maxProperties", "not", "uniqueItems")
"""Keywords for which most schemas are refused."""
# fmt: on


def random_root(rng: random.Random, formats: Sequence[str]) -> Schema:
    """Any keywords, with definitions that they and each other refer to, and a resource with the same names."""

    def definitions() -> Schema:
        names = {"d": any_schema(rng, formats, 1), "a/b": any_schema(rng, formats, 1)}
        return {"$defs": {**names, "n": {**any_schema(rng, formats, 0), "$anchor": "n"}}}

    root = {**any_schema(rng, formats, 3), **definitions(), "$id": "https://example.org/a"}
    root["$defs"]["r"] = {**any_schema(rng, formats, 2), **definitions(), "$id": "https://example.org/r"}
    return root


def any_schema(rng: random.Random, formats: Sequence[str], depth: int = 2) -> Schema:
    """Any keywords beside each other, with a type or without, sensible or not."""

    def inner() -> Any:
        return any_schema(rng, formats, depth - 1) if depth > 0 else rng.choice([{}, True, {"type": rng.choice(TYPES)}])

    schema: Schema = {}
    if rng.random() < 0.3:
        schema = {"type": "object", "properties": {name: inner() for name in rng.sample(["a", "b", "ab", "c"], 2)}}
    for key in rng.sample(sorted({*CHOICES, *LISTS, *MAPS, *_SINGLE, "format"}), rng.choice([0, 1, 1, 2, 2, 3])):
        if key in _REFUSED and rng.random() < 0.7:
            continue
        if key in LISTS:
            schema[key] = [inner() for _ in range(rng.randint(1, 3))]
        elif key in MAPS:
            schema[key] = {name: inner() for name in rng.sample(MAPS[key], rng.randint(1, 2))}
        elif key == "items" or (key in _SINGLE and rng.random() < 0.3):
            schema[key] = inner()
        else:
            schema[key] = rng.choice([*formats, "int32"] if key == "format" else CHOICES[key])
    choice = rng.random()
    if "type" not in schema and choice < 0.7:
        schema["type"] = rng.choice(TYPES) if choice < 0.6 else rng.sample(TYPES, rng.randint(1, 3))
    return schema
