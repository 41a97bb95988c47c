"""Numbers in a schema hold as they are written, or are refused by name."""

from __future__ import annotations

import json
import math
import random
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from byte_grammars import byte_compiler, compiled, takes
from samples import sample

from phonograph import StructuredOutputs
from phonograph.engine.grammars.schema import narrow, refusal
from phonograph.errors import RequestError

pytest.importorskip("xgrammar")

BIG = 2**70


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"const": BIG}, f"'const' has the integer {BIG}, beyond 64 bits"),
        ({"enum": [1, {"a": [-BIG]}]}, f"'enum' has the integer -{BIG}, beyond 64 bits"),
        ({"type": "integer", "const": 2**63}, "beyond 64 bits"),
        ({"items": {"const": -(2**63) - 1}}, "beyond 64 bits"),
        (
            {"type": "integer", "minimum": 2**63},
            "no integer of 64 bits lies within the bounds minimum: 9223372036854775808",
        ),
        ({"type": "integer", "maximum": -BIG}, "no integer of 64 bits"),
        ({"type": ["integer", "null"], "exclusiveMinimum": 2**63 - 1}, "no integer of 64 bits"),
        ({"type": "integer", "minimum": 2.2, "maximum": 2.9}, "no integer of 64 bits"),
        ({"type": "number", "minimum": 1e-9, "maximum": 1e-8}, "no number of six decimals"),
        ({"exclusiveMinimum": 0.999999, "maximum": 0.9999999}, "no number of six decimals"),
        ({"type": "number", "minimum": 10**400}, "no number of floating point"),
        ({"type": "integer", "multipleOf": 2.5}, "multipleOf 2.5 cannot be held"),
        ({"type": "integer", "multipleOf": BIG}, f"multipleOf {BIG} cannot be held"),
        ({"type": "integer", "multipleOf": "a"}, "multipleOf a cannot be held"),
        ({"type": "string", "minLength": BIG}, f"'minLength' of {BIG} is more than an output can have"),
        ({"type": "array", "minItems": 2**31}, "'minItems' of 2147483648 is more"),
    ],
)
def test_refused(schema: dict[str, Any], says: str) -> None:
    assert says in (refusal(schema) or "")


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "[1, Infinity]"])
def test_what_is_no_number_of_json(text: str) -> None:
    with pytest.raises(RequestError, match="is no JSON"):
        StructuredOutputs(json=f'{{"const": {text}}}')


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": [2**63 - 1, -(2**63)]}, [str(2**63 - 1), str(-(2**63))], [str(2**63), "9.2e18"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["-1", str(2**64)]),
        ({"type": "integer", "minimum": -BIG}, ["0", str(-(2**63)), str(BIG)], [str(-BIG - 1)]),
        ({"type": "integer", "exclusiveMaximum": BIG}, ["0", str(2**63 - 1), str(-BIG)], [str(BIG)]),
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3.5}, ["1", "3"], ["0", "4"]),
        ({"type": "integer", "exclusiveMinimum": 1.0, "maximum": 3.0}, ["2", "3"], ["1", "4"]),
        ({"type": "integer", "multipleOf": 2.0}, ["4", "-6"], ["3"]),
        ({"type": "number", "maximum": 2**64 + 1}, ["0.5", "-3"], [str(2**65), "2e19"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2**31 - 1}, ["[]", "[null, null]"], ["[1]"]),
        ({"type": "string", "maxLength": 2**32 - 1}, ['"abc"'], ["1"]),
        ({"type": "object", "maxProperties": BIG}, ["{}", '{"a": 1}'], ["[]"]),
    ],
)
def test_bounds_beyond_what_the_library_takes(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    validator = jsonschema.Draft202012Validator(deepcopy(schema))
    assert refusal(schema) is None
    narrow(schema)
    grammar = compiled(byte_compiler(), "json", schema)
    assert (
        [text for text in right if not takes(grammar, text)] == [] == [text for text in wrong if takes(grammar, text)]
    )
    assert all(validator.is_valid(json.loads(text)) for text in right)


def test_constants_are_what_is_written() -> None:
    rng = random.Random(3)
    compiler = byte_compiler()
    usual = [0, 1.0, -0.0, 1e-7, 0.1, 100.0, 1e22, 1e300, 5e-324, 2.0**70, 1.7976931348623157e308, 2**53 + 1]
    drawn = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300) for _ in range(60)]
    for value in (*usual, *drawn, *(rng.randint(-(2**63), 2**63 - 1) for _ in range(20))):
        for schema, expected in (({"const": value}, value), ({"enum": [value]}, value), ({"const": [value]}, [value])):
            assert refusal(schema) is None
            narrow(schema)
            text = sample(compiled(compiler, "json", schema), rng, ends=1)
            assert text is not None and json.loads(text) == expected, (value, text)


def random_bound(rng: random.Random) -> float:
    return rng.choice(
        [
            lambda: rng.randint(-20, 20),
            lambda: round(rng.uniform(-3, 3), rng.randint(1, 9)),
            lambda: rng.uniform(-1, 1) * 10.0 ** rng.randint(-12, 30),
            lambda: rng.randint(-(10 ** rng.randint(1, 30)), 10 ** rng.randint(1, 30)),
            lambda: rng.choice([-1, 1]) * 2 ** rng.choice([53, 63, 64, 70]) + rng.randint(-2, 2),
            lambda: rng.choice([0.5, 1e-7, -1e-7, 1e-6, 0.999999, 0.9999999, 9.9999999, 1e18, 1e9, 12345.6789012]),
        ]
    )()


@pytest.mark.parametrize("kind", ["integer", "number", None])
def test_no_number_is_out_of_bounds(kind: str | None, count: int = 120) -> None:
    rng = random.Random(kind or "any")
    compiler = byte_compiler()
    held = 0
    for _ in range(count):
        names = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
        schema: dict[str, Any] = {name: random_bound(rng) for name in rng.sample(names, rng.choice([1, 1, 2, 2, 3]))}
        schema |= {"type": kind} if kind else {}
        narrowed = deepcopy(schema)
        if refusal(narrowed) is not None:
            continue
        narrow(narrowed)
        try:
            grammar = compiled(compiler, "json", narrowed)
        except Exception:  # the library's own refusal
            continue
        held += 1
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(8):
            text = sample(grammar, rng, ends=0.2)
            assert text is None or validator.is_valid(json.loads(text)), (schema, narrowed, text)
        for bound in (schema[name] for name in names if name in schema):
            for near in (bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf), int(bound) + 1):
                text = json.dumps(near)
                assert not takes(grammar, text) or validator.is_valid(near), (schema, narrowed, text)
    assert held > count / 2
