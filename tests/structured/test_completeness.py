"""Valid instances are taken: schemas as programs send them, and instances that are made from them."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes
from json_formats import checker
from schemas import Schema, random_schema

from phonograph.evaluation.structured.judge import Judge

SCHEMAS = 250
"""Random schemas of each test, with three instances each; 20,000 by hand."""
# fmt: off
FORMATS = {
    "date": "2024-02-29", "time": "23:59:59.5+01:00", "date-time": "1999-12-31T00:00:00Z", "email": "a.b+c@example.com",
    "hostname": "www.example.com", "ipv4": "127.0.0.1", "ipv6": "2001:db8::1", "duration": "P1Y2M3DT4H",
    "uuid": "123e4567-e89b-12d3-a456-426614174000", "uri": "https://u@example.org:80/a/b?c=d#e", "int32": "any text",
    "uri-reference": "../a?b#c", "json-pointer": "/a/0/b~1c", "iri": "https://例え.jp/ü", "regex": "^[a-z]+$",
}
PATTERNS = {
    "^[A-Z]{2}[0-9]{1,3}$": "XY12", r"^\d{4}-\d{2}$": "2024-07", "b": "abc", r'^[^"\\]*$': "é", "^(yes|no)$": "no",
    r'^"\\"$': '"\\"', r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": "-007.50", r"^\S+@\S+$": "a@b", r"^[\w.-]+$": "a_b.c-9",
}
CONSTANTS: list[Any] = [None, True, 0, -7, 2.5, 10**15, "a", 'q"', "é\n", [], [1, "a"], {}, {"b": [None], "a": 1.25}]
# fmt: on


def wide_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of `random_schema`, or of forms that are less frequent around such ones."""

    def inner() -> Any:
        return wide_schema(rng, depth - 1)

    low, unit = rng.randint(-300, 300), rng.choice([1, 2, 7, 0.5, 0.01, 0.1])
    leaves: list[Schema] = [
        {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.randint(8, 2000)},
        {"type": "number", "minimum": low, "maximum": low + rng.randint(8, 999), "multipleOf": unit},
        {"type": "string", "format": rng.choice(list(FORMATS)), "minLength": 2},
        {"type": "string", "pattern": rng.choice(list(PATTERNS)), "maxLength": 12},
        {"enum": rng.sample(CONSTANTS, rng.randint(1, 4))},
        {"type": "array", "items": {"enum": rng.choice([["a", "b", "c"], [1, "x", None]])}, "uniqueItems": True},
        {},
    ]
    if depth == 3 and rng.random() < 0.3:
        return random_schema(rng)
    if depth <= 0 or rng.random() < 0.3:
        return rng.choice(leaves)
    kinds = [{"type": "object", "properties": {"kind": {"const": one}, "it": inner()}} for one in ("cat", "dog")]
    names = rng.sample(["first", "second", 'the "best"', "$ref", ""], 3)
    listed: Schema = {"type": "object", "properties": {name: inner() for name in names}, "required": names[:1]}
    forms: list[Schema] = [
        {"oneOf": [{**one, "required": ["kind"]} for one in kinds]},
        {"allOf": [listed, {"type": "object", "properties": {"more": inner()}, "required": ["more"]}]},
        {**listed, "patternProperties": {"^x-": inner()}},
        {**listed, "dependentRequired": {names[1]: names[2:]}},
        {**listed, "not": {"required": names[1:]}},
        {"type": "object", "additionalProperties": inner(), "propertyNames": {"pattern": "^x-[a-z]$"}},
        {"anyOf": [inner(), inner()], "description": "a note"},
        {"$defs": {"a/b": inner()}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}, "minItems": 1},
    ]
    return rng.choice(forms if depth == 3 else forms[:-1])


def instance(rng: random.Random, schema: Any, root: Schema) -> Any:
    """Make a value from a schema, which is nearly always valid. Names have the order that grammars have."""
    if "$ref" in schema:
        return instance(rng, root["$defs"][schema["$ref"].rpartition("/")[2].replace("~1", "/")], root)
    if "allOf" in schema:
        parts = [instance(rng, one, root) for one in schema["allOf"]]
        merged = {name: value for part in parts for name, value in part.items()}
        return dict(sorted(merged.items(), key=lambda one: one[0] == "x-a"))  # names that no schema lists come last
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return instance(rng, rng.choice(schema[key]), root)
    if "const" in schema or "enum" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", ["any"])
    kind = kinds if isinstance(kinds, str) else rng.choice(kinds)
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required", ())
        value = {
            name: instance(rng, one, root) for name, one in properties.items() if name in required or rng.random() < 0.4
        }
        others = schema.get("patternProperties", {}).get("^x-", schema.get("additionalProperties", {}))
        return value | {"x-a": instance(rng, others, root)} if others is not False and rng.random() < 0.5 else value
    if kind == "array":
        heads, items, least = schema.get("prefixItems", []), schema.get("items", {}), schema.get("minItems", 0)
        size = rng.randint(max(least, len(heads)), schema.get("maxItems", len(heads) + (2 if items else 0)))
        return [instance(rng, one, root) for one in [*heads, *[items] * size][:size]]
    if kind == "string":
        least = schema.get("minLength", 0)
        text = "".join(
            rng.choices('abc é😀日"\\/\n\tü{}[],:', k=rng.randint(least, schema.get("maxLength", least + 9)))
        )
        return FORMATS.get(schema.get("format", ""), PATTERNS.get(schema.get("pattern", ""), text))
    if kind in ("integer", "number"):
        step = Fraction(str(schema.get("multipleOf", 1 if kind == "integer" else rng.choice([1, 0.5, 0.001]))))
        least = schema.get("minimum", schema.get("exclusiveMinimum", -50) + step)
        most = schema.get("maximum", schema.get("exclusiveMaximum", 50) - step)
        number = step * rng.randint(-(-Fraction(least) // step), Fraction(most) // step)
        return int(number) if number.denominator == 1 else float(number)
    return {"boolean": True, "null": None}[kind] if kind in ("boolean", "null") else rng.choice(CONSTANTS)


@pytest.mark.parametrize("spaced", [False, True])
def test_valid_instances_are_taken(spaced: bool) -> None:
    compiler, judged = byte_compiler(), 0
    for seed in range(SCHEMAS):
        rng = random.Random(f"{spaced} {seed}")
        schema, closed = wide_schema(rng), rng.random() < 0.5
        how = {"disable_any_whitespace": not spaced, "disable_additional_properties": closed}
        grammar, judge = compiled(compiler, json=deepcopy(schema), **how), Judge(schema, (), checker())
        for _ in range(3):
            value = instance(rng, schema, schema)
            text = json.dumps(value, ensure_ascii=False, indent=rng.choice([None, 2, "\t"]) if spaced else None)
            if judge.fault(text.encode()) is None and not (closed and '"x-a"' in text):
                judged += 1
                stop = grammar.matcher().validate([*text.encode()])
                assert takes(grammar, text), f"{json.dumps(schema)}: {text} at {text.encode()[:stop]}"
    compiler.close()
    assert judged > 2 * SCHEMAS


def test_white_space_is_the_callers_choice() -> None:
    compiler, schema = byte_compiler(), {"type": "array", "items": {"type": "object"}}
    for spaced in (False, True):
        grammar = compiled(compiler, json=deepcopy(schema), disable_any_whitespace=not spaced)
        assert takes(grammar, '[{"a": 1}, {}]') and not takes(grammar, "[" + " " * 41 + "]")
        for text in ('[ {"a": 1}, {}]', '[{"a":1}, {}]', '[{"a": 1},{}]', '[{"a": 1}, {}\n]', '[{"a"\t: 1}]', "[ ]"):
            assert takes(grammar, text) == spaced, text
    compiler.close()
