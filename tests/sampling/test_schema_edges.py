"""What schemas are refused or narrowed for, keyword by keyword."""

from __future__ import annotations

import calendar
import json
import random
import re
from copy import deepcopy
from typing import Any

import pytest

from phonograph.engine.grammars.formats import PATTERNS
from phonograph.engine.grammars.numbers import BOUNDS
from phonograph.engine.grammars.places import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS
from phonograph.engine.grammars.references import ANCHORS, KEYWORDS
from phonograph.engine.grammars.schema import REFUSED, narrow, refusal


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf of several schemas"),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "'not'"),
        ({"definitions": {"a": {"uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "minProperties": 2, "additionalProperties": {}}, "'minProperties': 2 cannot be held"),
        ({"minProperties": 3, "patternProperties": {"^a": {}}}, "'minProperties': 3 cannot be held"),
    ],
)
def test_refused(schema: dict[str, Any], says: str) -> None:
    assert says in (refusal(schema) or "")


def test_schemas_of_wrong_types_are_refused_or_left_to_the_library() -> None:
    keywords = sorted(REFUSED | SCHEMA_MAPS | SCHEMA_LISTS | SCHEMAS | {*KEYWORDS, *ANCHORS, *BOUNDS})
    keywords += [
        "$id",
        "const",
        "enum",
        "format",
        "maxItems",
        "minProperties",
        "multipleOf",
        "pattern",
        "required",
        "type",
    ]
    # fmt: off
    values: list[Any] = [
        None, True, 0, -1, 2.5, 10**30, 1e300, "a", "#", "#/", "#a", "#/properties/a", "#/%ff", "#/~2", "string",
        "date", "(", [], {}, [[]], [{}], [5], {"a": {}}, {"a": 5}, {"$ref": "#"}, {"$anchor": "a"}, {"(": {}},
    ]
    # fmt: on
    rng = random.Random(0)
    for _ in range(5000):
        schema = {key: deepcopy(rng.choice(values)) for key in rng.sample(keywords, rng.randint(1, 4))}
        inner = {rng.choice(keywords): deepcopy(rng.choice(values))}
        whole = rng.choice([schema, {"properties": {"a": schema, "b": inner}, "$defs": rng.choice([{}, 5])}])
        if refusal(whole) is None:
            narrow(whole)
            json.dumps(whole, allow_nan=False)


def test_least_numbers_of_properties_that_hold() -> None:
    named = {"properties": {"a": {}, "b": {}}, "minProperties": 2}
    assert refusal(named) is None and refusal({**named, "additionalProperties": False}) is None
    assert refusal({**named, "required": ["a"], "additionalProperties": True}) is None


def test_a_whole_number_with_a_point_is_an_integer() -> None:
    assert refusal({"type": "integer", "const": 3.0}) is None


@pytest.mark.parametrize(
    ("schema", "narrowed"),
    [
        ({"type": "integer", "enum": [1, "a", 2.5, True]}, {"enum": [1]}),
        ({"type": ["string", "null"], "const": None}, {"const": None}),
        ({"pattern": "a", "minimum": 1}, {"pattern": "a", "minimum": 1, "type": ["number", "string"]}),
    ],
)
def test_narrowed(schema: dict[str, Any], narrowed: dict[str, Any]) -> None:
    narrow(schema)
    assert schema == narrowed


def test_dates_and_addresses_exactly() -> None:
    date, ipv4 = (re.compile(PATTERNS[form]) for form in ("date", "ipv4"))
    for month in range(14):
        for day in range(33):
            for year in (1600, 1700, 2000, 2023, 2024, 2042, 2096, 2100, 9996):
                there = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
                assert bool(date.fullmatch(f"{year}-{month:02}-{day:02}")) == there, (year, month, day)
    for byte in range(400):
        assert bool(ipv4.fullmatch(f"1.2.3.{byte}")) == (byte < 256), byte
        assert bool(ipv4.fullmatch(f"{byte}.2.3.4")) == (byte < 256), byte
