"""Whatever a grammar lets through is valid by its schema: random schemas of every keyword, against jsonschema."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from byte_grammars import byte_compiler, compiled, takes
from json_formats import CHECKS, checker
from samples import sample

from phonograph.engine.grammars.schema import narrow, refusal

pytest.importorskip("xgrammar")

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""pydantic's pattern of a decimal number as a string"""
FORMATS = checker()
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
# fmt: off
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, 5, 7, 100, -1, -3, 2.5, 0.5, 3.0, "", "a", "b", "ab", "abc", "aaaa", "1", "é", [],
    [1], [1, 2], [1, 2, 3], ["a"], ["a", 1], [[]], [None], [1, 1], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": [1]},
    {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"ab": 1}, {"a": None}, {"a": 1, "c": 3}, {"c": "x"}, {"a": {"a": 1}},
]
# fmt: on
PLACES = {
    "properties": {"a": {}, "b": {}},
    "$defs": {
        "plain": {},
        "a/b": {"$anchor": "other"},
        "c d": {"$dynamicAnchor": "dynamic"},
        "list": {"anyOf": [{}, {}]},
        "object": {"properties": {"a": {}, "b": {}}},
    },
    "x": {"y": {}, "list": [{}, {}]},
    "$anchor": "here",
}
REFERENCES = [
    *("#", "#here", "#other", "#/$defs/plain", "#/$defs/a~1b", "#/$defs/c%20d", "#/$defs/c d", "#/x/y", "#/x/list/1"),
    *("#/$defs/list/anyOf/0", "#/$defs/object/properties/a", "#/$defs/object", "#/properties/a", "#dynamic"),
]
"""To each of the places."""


def random_root(rng: random.Random) -> dict[str, Any]:
    """A schema with something at each of the places, and references from some to others."""

    def filled(place: Any) -> Any:
        if isinstance(place, str):
            return place
        if isinstance(place, list):
            return [filled(one) for one in place]
        return (
            {key: filled(one) for key, one in place.items()}
            if place.keys() - {"$anchor", "$dynamicAnchor"}
            else {**place, **part()}
        )

    def part() -> dict[str, Any]:
        """What is not refused by itself: of so many schemas one nearly always would be."""
        while True:
            found = random_schema(rng, 1) if rng.random() < 0.7 else {"$ref": rng.choice(REFERENCES)}
            if refusal({**PLACES, "additionalProperties": found}) is None:
                return found

    return {"type": rng.choice(["object", ["object", "null"]]), **filled(PLACES)}


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Any keywords beside each other, with a type or without, sensible or not."""

    def inner() -> Any:
        return (
            random_schema(rng, depth - 1) if depth else rng.choice([{}, {"type": "integer"}, {"type": "string"}, True])
        )

    keywords: dict[str, Callable[[], Any]] = {
        "pattern": lambda: rng.choice(["^a$", "^[ab]+$", "a", "^a", "^(?=a)", "(?<!b)a", r"\(?=", "[(?=]", DECIMAL]),
        "minLength": lambda: rng.randint(0, 3),
        "maxLength": lambda: rng.randint(0, 3),
        "minimum": lambda: rng.choice([0, 1, 3, 2.5, -2, 2**64, -(2**70), 1e30]),
        "maximum": lambda: rng.choice([0, 3, 5, 2.5, 2**63, 2**64 - 1, -(2**64)]),
        "exclusiveMinimum": lambda: rng.choice([0, 2, -(2**63)]),
        "exclusiveMaximum": lambda: rng.choice([3, 5, 1e-7, 2**70]),
        "multipleOf": lambda: rng.choice([2, 3]),
        "items": lambda: rng.choice([inner(), inner(), False]),
        "prefixItems": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "minItems": lambda: rng.randint(0, 2),
        "maxItems": lambda: rng.randint(0, 3),
        "properties": lambda: {name: inner() for name in rng.sample(["a", "b"], rng.randint(1, 2))},
        "required": lambda: rng.sample(["a", "b"], rng.randint(0, 2)),
        "additionalProperties": lambda: rng.choice([False, True, inner()]),
        "patternProperties": lambda: {"^a": inner()},
        "propertyNames": lambda: {"pattern": "^a$"},
        "minProperties": lambda: rng.randint(0, 2),
        "maxProperties": lambda: rng.randint(0, 2),
        "enum": lambda: rng.sample([1, "a", None, 2.5, True, "b", [1], {"a": 1}, 2**64], rng.randint(1, 4)),
        "const": lambda: rng.choice([1, "a", None, {"a": 1}, [1, 2], 2**70, 1e22, {"$ref": "#"}]),
        "anyOf": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "allOf": lambda: [inner()],
        "$ref": lambda: rng.choice(REFERENCES),
        "$dynamicRef": lambda: rng.choice(["#", "#other", "#dynamic"]),
        "format": lambda: rng.choice([*CHECKS, "regex", "int32", "phone"]),
    }
    schema = {key: keywords[key]() for key in rng.sample(sorted(keywords), rng.choice([1, 1, 2, 2, 3]))}
    if rng.random() < 0.5:
        schema["type"] = rng.choice(TYPES)
    elif rng.random() < 0.2:
        schema["type"] = rng.sample(TYPES, rng.randint(1, 3))
    return schema


def check(schema: dict[str, Any], compiler: Any, rng: random.Random, texts: int) -> tuple[int, int]:
    """How many values and random texts its grammar lets through, all of which are valid."""
    narrowed = deepcopy(schema)
    if refusal(narrowed) is not None:
        return 0, 0
    assert narrowed == schema
    narrow(narrowed)
    try:
        grammar = compiled(compiler, "json", narrowed)
    except RuntimeError:  # the library's own refusal is the request's error
        return 0, 0
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    taken = [value for value in VALUES if takes(grammar, json.dumps(value, ensure_ascii=False))]
    found = [text for text in (sample(grammar, rng, most=120) for _ in range(texts)) if text is not None]
    for value in (*taken, *map(json.loads, found)):
        assert validator.is_valid(value), f"{schema} as {narrowed} takes {value!r}"
    return len(taken), len(found)


@pytest.mark.parametrize("seed", range(3))
def test_no_grammar_is_wider_than_its_schema(seed: int, count: int = 1500) -> None:
    rng = random.Random(seed)
    compiler = byte_compiler()
    taken = sum(check(random_schema(rng), compiler, rng, 0)[0] for _ in range(count))
    assert taken > 1.3 * count


@pytest.mark.parametrize("seed", range(2))
def test_what_grammars_with_references_let_through_is_valid(seed: int, count: int = 400) -> None:
    rng = random.Random(100 + seed)
    compiler = byte_compiler()
    counts = [check(random_root(rng), compiler, rng, 6) for _ in range(count)]
    held = sum(taken + found > 0 for taken, found in counts)
    assert held > 0.1 * count and sum(found for _, found in counts) > 3 * held


def test_dictionaries_as_pydantic_writes_them() -> None:
    named = {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"minLength": 2}}
    matching = {"type": "object", "properties": {}, "patternProperties": {"^a": {"type": "integer"}}}
    assert refusal({"type": "object", "properties": {"named": named, "matching": matching}}) is None


def test_decimals_as_pydantic_writes_them() -> None:
    schema = {"pattern": DECIMAL}
    assert refusal(schema) is None
    narrow(schema)
    assert schema["type"] == "string"
    grammar = compiled(byte_compiler(), "json", schema)
    for text in ("0", "-1", "+12.50", ".5", "5.", "007", "", "-", ".", "+.", "1.2.3", "a", "1e5", "--1", "1-"):
        assert takes(grammar, f'"{text}"') == bool(re.search(DECIMAL, text)), text
