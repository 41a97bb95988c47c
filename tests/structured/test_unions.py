"""Unions of references: a `oneOf` whose branches have no value in common is exact, without a warning."""

from __future__ import annotations

import json
import random
from collections import Counter
from copy import deepcopy
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from byte_grammars import byte_compiler, compiled, takes, walk
from pydantic import BaseModel, Field, TypeAdapter
from schemas import VALUES

from checks.structured.judge import Judge
from phonograph.structured.compiler import GrammarCompiler

ONE_OF = ("oneOf is treated as anyOf",)
SCHEMAS = 150
"""Random unions; 20,000 by hand."""


class BlackCat(BaseModel):
    kind: Literal["cat"]
    color: Literal["black"] = "black"


class WhiteCat(BaseModel):
    kind: Literal["cat"] = "cat"
    color: Literal["white"]


class Dog(BaseModel):
    kind: Literal["dog", "puppy"] = "dog"
    friends: list[Pet] = []


Cat = Annotated[BlackCat | WhiteCat, Field(discriminator="color")]
Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Home(BaseModel):
    pet: Pet
    other: Annotated[BlackCat | Dog, Field(discriminator="kind")] | None = None


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("kind", [Home, Dog, Pet, list[Pet], dict[str, Pet]], ids=str)
def test_discriminated_unions_of_pydantic_are_exact(compiler: GrammarCompiler, kind: Any, closes: bool) -> None:
    model: TypeAdapter[Any] = TypeAdapter(kind)
    schema = model.json_schema()
    assert "oneOf" in json.dumps(schema) and "#/$defs" in json.dumps(schema)
    grammar = compiled(compiler, json=deepcopy(schema), disable_additional_properties=closes)
    assert grammar.warnings == ()
    walks = [walk(grammar, np.random.default_rng((3, turn)), 400) for turn in range(20)]
    texts = [one.text for one in walks if one.ended]
    assert len(texts) > 10 and not [text for text in texts if Judge(schema).fault(text)]
    for text in texts:
        model.validate_json(text)


def test_a_tag_with_a_default_is_required(compiler: GrammarCompiler) -> None:
    """Without it both branches match, and pydantic finds no tag."""
    grammar = compiled(compiler, json=TypeAdapter(Pet).json_schema())
    assert takes(grammar, '{"kind": "dog"}') and takes(grammar, '{"kind": "cat", "color": "black"}')
    assert not takes(grammar, "{}") and not takes(grammar, '{"kind": "cat"}')


NUMBER, TEXT, KINDS = {"type": "integer"}, {"type": "string"}, {"enum": ["a", "b"]}


def tagged(value: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}, "n": {}}, "required": [*required]}


@pytest.mark.parametrize(
    ("branches", "is_disjoint"),
    [
        ([NUMBER, TEXT], True),
        ([NUMBER, {"type": ["string", "number"]}], False),
        ([KINDS, {"const": "c"}], True),
        ([KINDS, {"const": "a"}], False),
        ([{"enum": [1, 2]}, {"const": 1.0}], False),
        ([{"enum": [1, 2]}, {"const": True}], True),
        ([KINDS, TEXT], False),
        ([tagged("a", "kind"), tagged("b")], True),
        ([tagged("a"), tagged("b")], False),
        ([tagged("a", "n"), tagged("b", "n")], False),
        ([tagged("a", "kind"), tagged("b", "kind"), tagged("a", "kind", "n")], False),
        ([{**tagged("a", "kind"), "type": ["object", "null"]}, tagged("b")], True),
        ([{**tagged("a", "kind"), "type": ["object", "null"]}, {**tagged("b"), "type": ["object", "null"]}], False),
        ([{"anyOf": [NUMBER, tagged("a", "kind")]}, {"oneOf": [TEXT, tagged("b")]}], True),
        ([{"anyOf": [NUMBER, tagged("a", "kind")]}, {"oneOf": [TEXT, tagged("a")]}], False),
        ([{"$ref": "#/$defs/0"}, TEXT], False),
        ([{}, TEXT], False),
    ],
)
def test_branches_behind_references(compiler: GrammarCompiler, branches: list[Any], is_disjoint: bool) -> None:
    definitions = {str(number): one for number, one in enumerate(branches)}
    references = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    schema = {"$defs": {**definitions, "all": {"oneOf": references}}, "type": "array", "items": {"$ref": "#/$defs/all"}}
    if {"$ref": "#/$defs/0"} in branches:
        schema["$defs"]["0"] = {"oneOf": [TEXT, NUMBER]}
    assert compiled(compiler, json=schema).warnings == (() if is_disjoint else ONE_OF)


def test_random_unions_are_exact_or_have_a_warning(compiler: GrammarCompiler) -> None:
    counts = Counter[bool]()
    for seed in range(SCHEMAS):
        rng = random.Random(seed)
        leaves = [NUMBER, TEXT, KINDS, {"const": 1}, {"enum": ["c", 2.5]}, {"type": "null"}, {"type": "array"}]
        objects = [tagged(rng.choice(["a", "b", 1]), *rng.sample(["kind", "n"], rng.randint(0, 2))) for _ in range(4)]
        values = {"a": {"properties": {"a": {"enum": rng.choice([[1], ["x"]])}}, "type": "object", "required": ["a"]}}
        definitions = {
            str(key): deepcopy(one) for key, one in enumerate([*rng.sample(leaves, 4), *objects, *values.values()])
        }
        references = [{"$ref": f"#/$defs/{name}"} for name in definitions]
        definitions["u"] = {rng.choice(["anyOf", "oneOf"]): rng.sample(references, 2)}
        union = [*rng.sample(references, rng.randint(1, 3)), *([{"$ref": "#/$defs/u"}] if rng.random() < 0.3 else [])]
        schema = {"$defs": definitions, "oneOf": union}
        how = {"disable_additional_properties": rng.random() < 0.5}
        grammar = compiled(compiler, json=deepcopy(schema), **how)
        counts[not grammar.warnings] += 1
        assert grammar.warnings in ((), ONE_OF)
        judge = Judge(schema, ("oneOf",) if grammar.warnings else ())
        tags = [{"kind": kind, "n": 1} for kind in ("a", "b", 1)] + [{"kind": "a"}, {"n": 1}]
        for value in [*VALUES, *tags]:
            text = json.dumps(value, ensure_ascii=False)
            is_valid = judge.fault(text.encode()) is None
            assert is_valid or not takes(grammar, text), (json.dumps(schema), text, grammar.warnings)
            assert not is_valid or how["disable_additional_properties"] or takes(grammar, text), (
                json.dumps(schema),
                text,
            )
    assert min(counts.values()) > 0.2 * SCHEMAS


def test_a_reference_into_a_union_keeps_its_target(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"x": {"oneOf": [NUMBER, TEXT]}, "y": {"$ref": "#/properties/x/oneOf/1"}}, "type": "object"}
    grammar = compiled(compiler, json=schema)
    assert grammar.warnings == () and takes(grammar, '{"x": 1, "y": "a"}') and not takes(grammar, '{"y": 1}')


def test_unions_that_refer_to_themselves_are_bounded(compiler: GrammarCompiler) -> None:
    for count in (1, 2, 300):
        own = {"oneOf": [*[{"$ref": "#/$defs/a"}] * count, {"type": "null"}]}
        schema = {
            "$defs": {"a": own},
            "properties": {"x": {"oneOf": [{"$ref": "#/$defs/a"}] * count}},
            "type": "object",
        }
        try:
            assert takes(compiled(compiler, json=schema), "{}")
        except Exception as error:
            assert "cannot be compiled" in str(error)
