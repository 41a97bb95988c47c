"""Valid instances are taken: schemas as programs send them, and instances that are made from them."""

from __future__ import annotations

import json
import random
from collections import Counter
from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes
from json_formats import checker
from schemas import Schema, random_schema

from checks.structured.judge import Judge
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError

SCHEMAS = 250
"""Random schemas of each test; 20,000 by hand. Those of any keywords are in test_soundness."""
EXAMPLES = {
    **{"date": "2024-02-29", "ipv4": "127.0.0.1", "uuid": "123e4567-e89b-12d3-a456-426614174000"},
    **{"^[A-Z]{2}[0-9]{1,3}$": "XY12", "^(yes|no)$": "no", r"^\d{4}-\d{2}$": "2024-07"},
}


def instance(rng: random.Random, schema: Any, root: Schema) -> Any:
    """Make a valid value from a schema of `random_schema`. Names have the order that grammars have."""
    if "$ref" in schema:
        return instance(rng, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return instance(rng, rng.choice(schema["anyOf"]), root)
    if "const" in schema or "enum" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    kind = schema["type"] if isinstance(schema["type"], str) else rng.choice(schema["type"])
    if kind == "object":
        names = [name for name in schema["properties"] if name in schema["required"] or rng.random() < 0.4]
        return {name: instance(rng, schema["properties"][name], root) for name in names}
    if kind == "array":
        heads, items, least = schema.get("prefixItems", []), schema.get("items", {}), schema.get("minItems", 0)
        size = rng.randint(max(least, len(heads)), schema.get("maxItems", len(heads)))
        return [instance(rng, one, root) for one in [*heads, *[items] * size][:size]]
    if kind == "string":
        least = schema.get("minLength", 0)
        text = "".join(
            rng.choices('abc é😀日"\\/\n\tü{}[],:', k=rng.randint(least, schema.get("maxLength", least + 9)))
        )
        return EXAMPLES.get(schema.get("format", schema.get("pattern", "")), text)
    if kind == "integer":
        least, most = schema.get("exclusiveMinimum", -1), schema.get("exclusiveMaximum", 1)
        return rng.randint(schema.get("minimum", least + 1), schema.get("maximum", most - 1))
    return rng.choice([True, False]) if kind == "boolean" else None


@pytest.mark.parametrize("spaced", [False, True])
def test_valid_instances_are_taken(spaced: bool) -> None:
    compiler = byte_compiler()
    for seed in range(SCHEMAS):
        rng = random.Random(f"{spaced} {seed}")
        schema = random_schema(rng)
        grammar = compiled(compiler, json=deepcopy(schema), disable_any_whitespace=not spaced)
        judge = Judge(schema, (), checker())
        for _ in range(3):
            value = instance(rng, schema, schema)
            text = json.dumps(value, ensure_ascii=False, indent=rng.choice([None, 2, "\t"]) if spaced else None)
            assert judge.fault(text.encode()) is None, "the test's own"
            assert takes(grammar, text), f"{json.dumps(schema)}: {text}"
    compiler.close()


def test_white_space_is_the_callers_choice() -> None:
    compiler, schema = byte_compiler(), {"type": "array", "items": {"type": "object"}}
    for spaced in (False, True):
        grammar = compiled(compiler, json=deepcopy(schema), disable_any_whitespace=not spaced)
        assert not takes(grammar, "[" + " " * 41 + "]")
        for text in ('[{"a": 1}, {}]', '[{"a":1},{}]', '[{"a":1}, {}]', '[{"a": 1},{}]'):
            assert takes(grammar, text), text
        for text in ('[ {"a": 1}]', '[{"a":  1}]', '[{"a":\n1}]', '[{"a" :1}]', '[{"a": 1}, {}\n]', "[{},\t{}]", "[ ]"):
            assert takes(grammar, text) == spaced, text
    for structured in (StructuredOutputs(json=schema), StructuredOutputs(json_object=True)):
        grammar = compiler.request(structured).result()
        assert not any(takes(grammar, text) for text in ('[{"a":\n1}]', '{ "a":1}', "{ }")), "the default is compact"
    compiler.close()


def test_numbers_are_taken_where_they_lie_within_the_bounds() -> None:
    compiler, counts = byte_compiler(), Counter[bool]()
    for seed in range(SCHEMAS):
        rng = random.Random(seed)
        low, size = rng.choice([(rng.randint(-3000, 3000), rng.randint(1, 999)), (10 * rng.randint(-9, 9), 5)])
        digits = rng.choice([1, 1, 10, 100])
        lower, upper = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        schema: Schema = {"type": "number", lower: low / digits, upper: (low + size) / digits}
        schema |= rng.choice([{}, {"multipleOf": rng.choice([0.5, 0.01, 0.1, 2, 7, 2.5, 0.3])}])
        try:
            grammar, judge = compiled(compiler, json=dict(schema)), Judge(schema)
        except RequestError as error:
            assert "does not contain a multiple" in str(error) or size == 1, (schema, error)
            continue
        for _ in range(40):
            number = Fraction(low, digits) + Fraction(rng.randint(-9, size + 9), digits * rng.choice([1, 10]))
            text = json.dumps(int(number) if number.denominator == 1 else float(number))
            is_valid = judge.fault(text.encode()) is None
            # A number that is shorter than a bound with its first digits needs zeros at its end.
            assert takes(grammar, text) == is_valid or (is_valid and digits > 1), (schema, text)
            counts[is_valid] += 1
    compiler.close()
    assert min(counts.values()) > 3 * SCHEMAS
