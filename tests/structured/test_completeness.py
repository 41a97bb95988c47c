"""Valid instances are taken: random schemas, and for each of them instances that are made from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes
from json_formats import checker

from phonograph.evaluation.structured.judge import Judge

SCHEMAS = 250
"""Random schemas of each test, with three instances each; 50,000 by hand."""
Schema = dict[str, Any]
Maker = Callable[[], Any]
"""Function that makes a valid instance, another one each time."""
WORDS = ("a", "b", "name", "é", 'the "best"', "x\\y", "日付", "tab\t", "$ref", "a.b", "")
CONSTANTS: list[Any] = [None, True, 0, -7, 2.5, 10**15, "a", 'q"', "é\n", [], [1, "a"], {}, {"b": [None], "a": 1.25}]
FORMATS = {
    "date": "2024-02-29",
    "time": "23:59:59.5+01:00",
    "date-time": "1999-12-31T00:00:00Z",
    "email": "a.b+c@example.com",
    "hostname": "www.example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "2001:db8::1",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "uri": "https://u@example.org:80/a/b?c=d#e",
    "uri-reference": "../a?b#c",
    "duration": "P1Y2M3DT4H",
    "json-pointer": "/a/0/b~1c",
    "regex": "^[a-z]+$",
    "iri": "https://例え.jp/ü",
    "uri-template": "http://a/{x}{?y,z*}",
    "int32": "any text",
}
PATTERNS = {
    "^[A-Z]{2}[0-9]{1,3}$": "XY12",
    r"^\d{4}-\d{2}$": "2024-07",
    "b": "abc",
    r'^[^"\\]*$': "plain é",
    "^(yes|no)$": "no",
    r'^"\\"$': '"\\"',
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": "-007.50",
    r"^\S+@\S+$": "a@b",
    r"^[\w.-]+$": "a_b.c-9",
}


def characters(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choices('abc é😀日"\\/\n\tü{}[],:', k=rng.randint(least, most)))


class Cases:
    """Pairs of a schema and a maker of its instances. `definitions` are of the whole schema."""

    def __init__(self, rng: random.Random, *, closed: bool) -> None:
        self.rng = rng
        self.closed = closed
        self.definitions: Schema = {}

    def root(self) -> tuple[Schema, Maker]:
        schema, maker = self.case(3)
        return {**schema, "$defs": self.definitions} if self.definitions else schema, maker

    def case(self, depth: int) -> tuple[Schema, Maker]:
        leaves = [self.number, self.text, self.constant, self.typed, self.unique]
        inner = [
            self.object,
            self.object,
            self.array,
            self.any_of,
            self.all_of,
            self.reference,
            self.names,
            self.one_of,
        ]
        return self.rng.choice(leaves)() if depth <= 0 or self.rng.random() < 0.3 else self.rng.choice(inner)(depth - 1)

    def number(self) -> tuple[Schema, Maker]:
        rng = self.rng
        unit = rng.choice([None, None, 2, 7, 0.5, 0.01, 0.1])
        low, size = rng.randint(-300, 300), rng.randint(1, 2000)
        schema: Schema = {rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + size}
        integer = rng.random() < 0.5 and unit in (None, 2, 7)
        schema = {"type": "integer" if integer else "number"} | rng.choice(
            [schema, {"minimum": low}, {"maximum": low}, {}]
        )
        schema |= {} if unit is None else {"multipleOf": unit}
        bound = schema.get("minimum", schema.get("exclusiveMinimum"))
        least = bound if bound is not None else schema.get("maximum", 500) - 500
        most = schema.get("maximum", least + 500)
        step = Fraction(str(unit or (1 if integer else rng.choice([1, 0.5, 0.001]))))

        def make() -> Any:
            first = Fraction(least) // step + ("exclusiveMinimum" in schema or Fraction(least) % step > 0)
            value = step * rng.randint(first, max(first, Fraction(most) // step))
            return int(value) if value.denominator == 1 else float(value)

        return (schema, make) if Fraction(most) // step * step > least else ({"type": "integer"}, lambda: 5)

    def text(self) -> tuple[Schema, Maker]:
        rng = self.rng
        least, most = (size := rng.randint(0, 4)), size + rng.randint(0, 6)
        form, pattern = rng.choice(list(FORMATS)), rng.choice(list(PATTERNS))
        return rng.choice(
            [
                ({"type": "string"}, lambda: characters(rng, 0, 9)),
                ({"type": "string", "minLength": least, "maxLength": most}, lambda: characters(rng, least, most)),
                ({"type": "string", "format": form, "minLength": least}, lambda: FORMATS[form]),
                ({"type": "string", "pattern": pattern, "maxLength": 12}, lambda: PATTERNS[pattern]),
            ]
        )

    def constant(self) -> tuple[Schema, Maker]:
        values = self.rng.sample(CONSTANTS, self.rng.randint(1, 4))
        value = values[0]
        return self.rng.choice([({"enum": values}, lambda: self.rng.choice(values)), ({"const": value}, lambda: value)])

    def typed(self) -> tuple[Schema, Maker]:
        return self.rng.choice(
            [
                ({"type": ["boolean", "null"]}, lambda: self.rng.choice([True, False, None])),
                ({"type": ["integer", "string"], "minimum": 3}, lambda: self.rng.choice([3, 99, "x"])),
                ({"type": "number"}, lambda: self.rng.choice([0, -1.5, 1e30, 1e-7, 12345.678])),
                ({}, lambda: self.rng.choice([*CONSTANTS, {"a": {"b": [1]}}])),
            ]
        )

    def unique(self) -> tuple[Schema, Maker]:
        values = self.rng.choice([["a", "b", "c"], [1, "x", None], [2.5]])
        schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": self.rng.randint(0, 1)}
        return schema, lambda: self.rng.sample(values, self.rng.randint(schema["minItems"], len(values)))

    def array(self, depth: int) -> tuple[Schema, Maker]:
        (items, item), least, rng = self.case(depth), self.rng.randint(0, 2), self.rng
        heads = [self.case(depth) for _ in range(rng.randint(0, 2))]
        schema: Schema = {"type": "array", "items": items, "minItems": least, "maxItems": least + len(heads) + 2}
        schema |= {"prefixItems": [one for one, _ in heads]} if heads else {}

        def make() -> Any:
            size = rng.randint(least, schema["maxItems"])
            return [*(one() for _, one in heads), *(item() for _ in range(size))][:size]

        return schema, make

    def object(self, depth: int) -> tuple[Schema, Maker]:
        rng = self.rng
        names = rng.sample(WORDS, rng.randint(1, 4))
        inner = {name: self.case(depth) for name in names}
        required = [name for name in names if rng.random() < 0.5]
        schema: Schema = {"type": "object", "properties": {name: one for name, (one, _) in inner.items()}}
        schema |= rng.choice([{}, {"additionalProperties": False}]) | {"required": rng.sample(required, len(required))}
        if rng.random() < 0.3:
            schema["patternProperties"] = {"^x-": {"type": "integer"}}
        extra = not self.closed and schema.keys().isdisjoint({"additionalProperties", "patternProperties"})
        asked = rng.choice(names)
        if rng.random() < 0.3:
            schema["dependentRequired"] = {asked: names[-1:]}

        def make() -> Any:
            value = {name: make() for name, (_, make) in inner.items() if name in required or rng.random() < 0.5}
            if "dependentRequired" in schema and asked in value and names[-1] not in value:
                value[names[-1]] = inner[names[-1]][1]()
            # Names that no schema lists come behind those that one does.
            more = {"x-1": 7} if "patternProperties" in schema else {"other": [None]} if extra else {}
            return value | (more if rng.random() < 0.5 else {})

        return schema, make

    def names(self, depth: int) -> tuple[Schema, Maker]:
        items, item = self.case(depth)
        names = self.rng.choice([{"enum": ["k1", "k2"]}, {"pattern": "^k[0-9]$"}, {"minLength": 1, "maxLength": 3}])
        schema = {"type": "object", "additionalProperties": items, "propertyNames": names}
        return schema, lambda: {name: item() for name in ("k1", "k2")[: self.rng.randint(0, 2)]}

    def any_of(self, depth: int) -> tuple[Schema, Maker]:
        cases = [self.case(depth) for _ in range(self.rng.randint(1, 3))]
        return {"anyOf": [one for one, _ in cases]}, lambda: self.rng.choice(cases)[1]()

    def one_of(self, depth: int) -> tuple[Schema, Maker]:
        """Branches that a constant tells apart, as unions of programs have."""
        cases = {kind: self.case(depth) for kind in ("cat", "dog")}
        branches = [
            {"type": "object", "properties": {"kind": {"const": kind}, "it": one}, "required": ["kind", "it"]}
            for kind, (one, _) in cases.items()
        ]
        kinds = list(cases)
        return {"oneOf": branches}, lambda: {"kind": (kind := self.rng.choice(kinds)), "it": cases[kind][1]()}

    def all_of(self, depth: int) -> tuple[Schema, Maker]:
        """A base and what is added to it, as inheritance is written."""
        (first, one), (second, two) = self.case(depth), self.case(depth)
        parts = [
            {"type": "object", "properties": {"first": first}, "required": ["first"]},
            {"type": "object", "properties": {"second": second}, "required": ["second"]},
        ]
        return {"allOf": parts}, lambda: {"first": one(), "second": two()}

    def reference(self, depth: int) -> tuple[Schema, Maker]:
        schema, maker = self.case(depth)
        name = f"d/{len(self.definitions)}"
        self.definitions[name] = schema
        note = self.rng.choice([{}, {"description": "a note"}])
        return {"$ref": f"#/$defs/{name.replace('/', '~1')}", **note}, maker


@pytest.mark.parametrize("spaced", [False, True])
def test_valid_instances_are_taken(spaced: bool) -> None:
    compiler, judged = byte_compiler(), 0
    for seed in range(SCHEMAS):
        rng = random.Random(f"{spaced} {seed}")
        cases = Cases(rng, closed=rng.random() < 0.5)
        schema, maker = cases.root()
        how = {"disable_any_whitespace": not spaced, "disable_additional_properties": cases.closed}
        grammar = compiled(compiler, json=deepcopy(schema), **how)
        judge = Judge(schema, (), checker())
        for _ in range(3):
            text = json.dumps(maker(), ensure_ascii=False, indent=rng.choice([None, 2, "\t"]) if spaced else None)
            fault = judge.fault(text.encode())
            assert fault is None, f"the test's own: {json.dumps(schema)} {text} {fault}"
            judged += 1
            stop = grammar.matcher().validate([*text.encode()])
            assert takes(grammar, text), f"{json.dumps(schema)}: {text} at {text.encode()[:stop]}"
    compiler.close()
    assert judged == 3 * SCHEMAS


def test_white_space_is_the_callers_choice() -> None:
    compiler, schema = byte_compiler(), {"type": "array", "items": {"type": "object"}}
    for spaced in (False, True):
        grammar = compiled(compiler, json=deepcopy(schema), disable_any_whitespace=not spaced)
        assert takes(grammar, '[{"a": 1}, {}]') and not takes(grammar, "[" + " " * 41 + "]")
        for text in ('[ {"a": 1}, {}]', '[{"a":1}, {}]', '[{"a": 1},{}]', '[{"a": 1}, {}\n]', '[{"a"\t: 1}]', "[ ]"):
            assert takes(grammar, text) == spaced, text
    compiler.close()
