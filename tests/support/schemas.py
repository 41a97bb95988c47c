"""Random JSON schemas of the kind that programs send: nested objects and arrays of bounded values, enums, unions."""

from __future__ import annotations

import random
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
