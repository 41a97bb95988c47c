"""Names behind patterns: no comma without a name to follow, and `propertyNames` in the forms that pydantic emits."""

from __future__ import annotations

import datetime
import enum
import itertools
import json
import random
import time
import uuid
from collections import Counter
from copy import deepcopy
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from byte_grammars import byte_compiler, compiled, takes, walk
from json_formats import checker
from pydantic import UUID4, AnyUrl, StringConstraints, TypeAdapter

from checks.structured.judge import Judge
from phonograph.errors import RequestError
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.names import MOST_NAMES, names_of

SCHEMAS = 200
"""Random schemas; 20,000 by hand."""
PATTERNS = {
    **{
        "^a$": ["a"],
        "^$": [""],
        "^(a|b|c)$": ["a", "b", "c"],
        "^[ab]?$": ["", "a", "b"],
        "^a|^b$": None,
        "^(a|b)": None,
        "a": None,
    },
    **{"^x[0-9]$": [f"x{digit}" for digit in range(10)], "^a{1,3}$": ["a", "aa", "aaa"], "^a{0}b*$": None, "": None},
    **{r"^\u0062$": ["b"], r"^(a|\")$": ['"', "a"], "^(é|日)$": ["é", "日"], "^(a|b)$|^c$": ["a", "b", "c"], ".": None},
    **{
        "^[0-9]{2}$": [f"{number:02}" for number in range(100)],
        "^[0-9]{3}$": None,
        "^.$": None,
        "^a+$": None,
        "(": None,
    },
    **{r"[^\s\S]": [], r"^[^\x00-\x{10ffff}]?a$": ["a"], "^[^a]$": None, r"^\*[+]$": ["*+"], "^a{2,}$": None},
}
NAMES = ["a", "b", "c", "x0", "x1", "", "aa", "z"]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_finite_patterns_are_listed(pattern: str) -> None:
    found, names = names_of(pattern, MOST_NAMES), PATTERNS[pattern]
    assert found == (None if names is None else tuple(sorted(names, key=lambda name: (len(name), name))))
    assert not found or names_of(pattern, len(found) - 1) is None


def random_names(rng: random.Random) -> dict[str, Any]:
    """Return a schema of an object whose patterns and listed names often cover each other."""
    values = [{"const": 1}, {"type": "integer"}, {"minimum": 3}, {"enum": [1, "a"]}, True, False, {"type": "string"}]

    def some(names: list[str], most: int) -> dict[str, Any]:
        return {name: deepcopy(rng.choice(values)) for name in rng.sample(names, rng.randint(0, most))}

    schema: dict[str, Any] = {"type": "object", "additionalProperties": rng.choice([False, False, True, {"const": 7}])}
    schema |= {
        "properties": some(NAMES, 4),
        "patternProperties": some([one for one in PATTERNS if one != "(" and "{10ffff}" not in one], 2),
    }
    schema |= {"required": rng.sample(NAMES, rng.choice([0, 0, 1, 2]))}
    rules = [
        {"enum": ["a", "b"]},
        {"const": "a"},
        {"pattern": "^(a|b)$"},
        {"pattern": "^x"},
        {"minLength": 1},
        {"maxLength": 0},
    ]
    schema |= rng.choice(
        [{}, {"propertyNames": rng.choice([*rules, {"$ref": "#/$defs/rule"}, False, {"type": "null"}])}]
    )
    schema |= rng.choice([{}, {}, {}, {"maxProperties": rng.randint(0, 3)}, {"minProperties": 1}])
    for key in rng.sample(["properties", "patternProperties", "required"], rng.choice([0, 0, 1, 2])):
        del schema[key]
    if rng.random() < 0.2:  # merged by the library
        return {"allOf": [schema, {"properties": some(NAMES, 2)}], "$defs": {"rule": rng.choice(rules)}}
    return {**schema, "$defs": {"rule": rng.choice(rules)}}


def test_random_walks_never_come_to_a_dead_end(compiler: GrammarCompiler) -> None:
    counts = Counter[str]()
    for seed in range(SCHEMAS):
        schema = random_names(random.Random(seed))
        try:
            grammar = compiled(compiler, json=deepcopy(schema))
        except RequestError as error:
            assert "wrong type" not in str(error) and "could not be compiled" not in str(error), json.dumps(schema)
            counts["refused"] += 1
            continue
        judge = Judge(schema, (), checker())
        for turn in range(6):
            one = walk(grammar, np.random.default_rng((seed, turn)), 250)
            assert not one.problem, f"{json.dumps(schema)}: {one}"
            assert not one.ended or judge.fault(one.text) is None, f"{json.dumps(schema)}: {one.text}"
            counts.update(walks=1, ended=one.ended)
        for size in range(3):
            for names in itertools.permutations(NAMES, size):
                text = json.dumps(dict(zip(names, (1, 7), strict=False)))
                is_valid = judge.fault(text.encode()) is None
                assert is_valid or not takes(grammar, text), f"{json.dumps(schema)}: {text}"
                counts.update(taken=is_valid and takes(grammar, text))
    assert counts["refused"] < 0.6 * SCHEMAS and counts["ended"] > 0.9 * counts["walks"] and counts["taken"] > SCHEMAS


NUMBER = {"type": "integer"}
SCORE = {"properties": {"score": NUMBER}, "required": ["score"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {**SCORE, "patternProperties": {"^score$": {"minimum": 3}}, "additionalProperties": False},
            ['{"score": 3}'],
            ['{"score": 2}', "{}", '{"score": 3, "a": 1}'],
        ),
        (
            {**SCORE, "patternProperties": {"^(score|a)$": {"const": 1}}},
            ['{"score": 1, "a": 1, "b": 2}'],
            ['{"score": 2}'],
        ),
        (
            {"patternProperties": {"^(a|b)$": {"const": 1}, "^[bc]$": NUMBER}, "additionalProperties": False},
            ['{"a": 1, "b": 1, "c": 2}', "{}"],
            ['{"b": 2}', '{"a": 1, "a": 1}', '{"d": 1}'],
        ),
        ({"patternProperties": {"^a$": {"const": 1}}}, ['{"a": 1}', '{"b": 2}'], ['{"a": 2}']),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "patternProperties": {"^a": {"const": 1}}},
            ['{"a": 1, "b": 2}'],
            ['{"a": 2}'],
        ),
        (
            {"properties": {"ab": NUMBER, "B": NUMBER}, "propertyNames": {"pattern": "^[a-z]+$"}},
            ['{"ab": 1, "c": "d"}', '{"c": 1}'],
            ['{"ab": "d"}', '{"B": 1}', '{"C": 1}'],
        ),
        ({"propertyNames": False}, ["{}"], ['{"a": 1}']),
        ({"propertyNames": {"enum": ["", "a"], "minLength": 1}}, ['{"a": 1}'], ['{"": 1}']),
    ],
)
def test_a_pattern_binds_the_names_that_it_matches(
    compiler: GrammarCompiler, schema: Any, right: list[str], wrong: list[str]
) -> None:
    grammar = compiled(compiler, json={"type": "object", **schema})
    for text in (*right, *wrong):
        assert takes(grammar, text) == (text in right), text


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


NAME_TYPES: list[tuple[Any, str, str]] = [
    (Color, "blue", "green"),
    (Literal["a", "b"], "b", "c"),
    (uuid.UUID, "123e4567-e89b-12d3-a456-426614174000", "123"),
    (UUID4, "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
    (datetime.date, "2024-02-29", "2023-02-29"),
    (datetime.datetime, "2024-02-29T12:00:00Z", "2024-02-29"),
    (datetime.time, "12:00:00Z", "25:00:00Z"),
    (datetime.timedelta, "P1D", "1D"),
    (IPv4Address, "127.0.0.1", "127.0.0.256"),
    (AnyUrl, "https://example.org/", ""),
    (bytes, "any", None),
    (Annotated[str, StringConstraints(pattern="^a+$", min_length=1)], "aa", ""),
    (Annotated[str, StringConstraints(min_length=2, max_length=3)], "ab", "a"),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), NAME_TYPES, ids=str)
def test_pydantics_dicts_have_the_names_of_their_type(
    compiler: GrammarCompiler, kind: Any, right: str, wrong: str | None
) -> None:
    schema = TypeAdapter(dict[kind, int]).json_schema()
    grammar, judge = compiled(compiler, json=deepcopy(schema)), Judge(schema, (), checker())
    assert grammar.warnings == () and takes(grammar, "{}") and takes(grammar, json.dumps({right: 1}))
    assert not takes(grammar, json.dumps({right: "text"})) and (
        wrong is None or not takes(grammar, json.dumps({wrong: 1}))
    )
    walks = [walk(grammar, np.random.default_rng((2, turn)), 250) for turn in range(15)]
    texts = [one.text for one in walks if one.ended]
    assert len(texts) > 8 and not [text for text in texts if judge.fault(text)]


def test_a_rule_of_names_that_no_grammar_holds_is_refused_or_left_out(compiler: GrammarCompiler) -> None:
    for rule in (
        {"pattern": "^(?=a)"},
        {"pattern": "a", "maxLength": 3},
        {"not": {"const": "a"}},
        {"$ref": "#/nowhere"},
    ):
        schema = {"type": "object", "propertyNames": rule}
        with pytest.raises(RequestError, match="propertyNames cannot be enforced; strictness='relaxed' accepts it"):
            compiled(compiler, json=deepcopy(schema))
        grammar = compiled(compiler, json=schema, strictness="relaxed")
        assert "propertyNames cannot be enforced" in grammar.warnings and takes(grammar, '{"b": 1}')


def test_patterns_within_patterns_are_bounded() -> None:
    compiler, schema = byte_compiler(), {"const": "x" * 50}
    for _ in range(40):
        schema = {"type": "object", "patternProperties": {"^[0-9]{2}$": schema}, "additionalProperties": False}
    start = time.perf_counter()
    assert takes(compiled(compiler, json=schema), '{"00": {"99": {}}}')
    many = {f"^{'a' * count}b+$": {"const": 1} for count in range(60)}
    compiled(compiler, json={"type": "object", "patternProperties": many})
    used_up = {"$defs": {"a": {"properties": {str(digit): {} for digit in range(10)}}}}
    large = {"patternProperties": {"^[0-9]$": {"const": "x" * 30_000}}, "additionalProperties": False, "type": "object"}
    with pytest.raises(RequestError, match="of 10 names is too large"):
        compiled(compiler, json={**large, **used_up})
    assert takes(compiled(compiler, json=large), "{}")
    names = {"enum": [str(number) for number in range(5000)]}
    with pytest.raises(RequestError, match="propertyNames with a schema of 90013 characters is too large"):
        compiled(
            compiler, json={"type": "object", "propertyNames": names, "additionalProperties": {"const": "x" * 90_000}}
        )
    assert takes(compiled(compiler, json={"type": "object", "propertyNames": names}), '{"4999": 1}')
    assert time.perf_counter() - start < 60
    compiler.close()
