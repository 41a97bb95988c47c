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

from phonograph.engine.grammars.schema import narrow, refusal

pytest.importorskip("xgrammar")

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""pydantic's pattern of a decimal number as a string"""
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
# fmt: off
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, 5, 7, 100, -1, -3, 2.5, 0.5, 3.0, "", "a", "b", "ab", "abc", "aaaa", "1", "é", [],
    [1], [1, 2], [1, 2, 3], ["a"], ["a", 1], [[]], [None], [1, 1], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": [1]},
    {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"ab": 1}, {"a": None}, {"a": 1, "c": 3}, {"c": "x"}, {"a": {"a": 1}},
]
# fmt: on


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
        "minimum": lambda: rng.choice([0, 1, 3, 2.5, -2]),
        "maximum": lambda: rng.choice([0, 3, 5, 2.5]),
        "exclusiveMinimum": lambda: rng.choice([0, 2]),
        "exclusiveMaximum": lambda: rng.choice([3, 5]),
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
        "enum": lambda: rng.sample([1, "a", None, 2.5, True, "b", [1], {"a": 1}], rng.randint(1, 4)),
        "const": lambda: rng.choice([1, "a", None, {"a": 1}, [1, 2]]),
        "anyOf": lambda: [inner() for _ in range(rng.randint(1, 2))],
        "allOf": lambda: [inner()],
    }
    schema = {key: keywords[key]() for key in rng.sample(sorted(keywords), rng.choice([1, 1, 2, 2, 3]))}
    if rng.random() < 0.5:
        schema["type"] = rng.choice(TYPES)
    elif rng.random() < 0.2:
        schema["type"] = rng.sample(TYPES, rng.randint(1, 3))
    return schema


@pytest.mark.parametrize("seed", range(3))
def test_no_grammar_is_wider_than_its_schema(seed: int) -> None:
    rng = random.Random(seed)
    compiler = byte_compiler()
    taken = 0
    for _ in range(1200):
        schema = random_schema(rng)
        narrowed = deepcopy(schema)
        if refusal(narrowed) is not None:
            continue
        narrow(narrowed)
        try:
            grammar = compiled(compiler, "json", narrowed)
        except Exception:  # the library's own refusal, of whatever kind, is the request's error
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for value in VALUES:
            if takes(grammar, json.dumps(value, ensure_ascii=False)):
                taken += 1
                assert validator.is_valid(value), f"{schema} as {narrowed} takes {value!r}"
    assert taken > 2000


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
