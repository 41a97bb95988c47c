"""Edges of the schemas' pre-pass: refusals by name, what a relaxed request leaves out, resources, merged objects."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes
from schemas import CHOICES, LISTS, MAPS

from phonograph.errors import RequestError
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.places import MAX_DEPTH

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
PAIRS = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
TWENTY = {"type": "array", "items": {"enum": [*range(20)]}, "uniqueItems": True}
OPEN = {"additionalProperties": True}
ONE_NAME = {"type": "object", "properties": {"a": {}}, "required": ["a"]}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (False, "the schema `false` allows nothing"),
        ({"enum": []}, "empty"),
        ({"type": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater than maxLength (2)"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"$ref": "#/$defs/a"}, "does not exist"),
        ({"$ref": "#"}, "never end"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "never end"),
        ({"const": 2**64}, "const has an integer beyond 2^53; write it as a string"),
        ({"enum": [{"a": [-(2**63)]}]}, "enum has an integer beyond 2^53"),
        ({"const": 1e22}, "const has an integer beyond 2^53"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}, "common multiple is above 1024"),
        (
            {"allOf": [{"multipleOf": 0.97}, {"properties": {"a": {"multipleOf": 1.1}}}]},
            "common multiple is above 1024",
        ),
        ({"allOf": [{"multipleOf": -97}, {"multipleOf": 89}]}, "common multiple is above 1024"),
        ({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 0}]}, "common multiple is above 1024"),
        ({"const": -(2**53) - 1}, "const has an integer beyond 2^53"),
        ({"multipleOf": 0}, "invalid multiple"),
        ({"type": "object", "required": "a"}, "Expected array for 'required'"),
        ({"type": "object", "properties": {"a": {}}, "required": None}, "Expected array for 'required'"),
        ({**ONE_NAME, "additionalProperties": False, "minProperties": 3}, "Unsatisfiable"),
        ({"type": "object", "properties": ["a"]}, "properties must be an object"),
        ({"type": "nope"}, "nope"),
        ({"required": [[]]}, "Expected string for 'required'"),
    ],
)
def test_refused_in_any_case(compiler: GrammarCompiler, schema: Any, says: str) -> None:
    for strictness in ("strict", "relaxed"):
        with pytest.raises(RequestError) as refusal:
            compiled(compiler, json=deepcopy(schema), strictness=strictness)
        assert says in str(refusal.value) and len(str(refusal.value)) < 800


@pytest.mark.parametrize(
    ("schema", "warning", "text"),
    [
        (UNIQUE, "uniqueItems cannot be enforced", "[1, 1]"),
        ({"contains": {"const": 1}, "type": "array"}, "contains cannot be enforced", "[2]"),
        ({"not": {"const": 1}}, "not cannot be enforced", "1"),
        ({"if": {"const": 1}, "then": False}, "if, then cannot be enforced", "1"),
        ({"type": "string", "pattern": "^(?=a)"}, "the pattern ^(?=a) cannot be enforced", '"b"'),
        ({"patternProperties": {"(?!a)": {"const": 1}}}, "the pattern (?!a) of names cannot be enforced", '{"b": 2}'),
        (
            {"$ref": "http://example.org/a"},
            "the reference http://example.org/a, which leads elsewhere, cannot be enforced",
            "1",
        ),
        ({"$ref": "other.json#/a"}, "the reference other.json#/a, which leads elsewhere, cannot be enforced", "1"),
        ({"multipleOf": 1025}, "multipleOf 1025, above 1024, cannot be enforced", "1"),
        ({"multipleOf": 10.27}, "multipleOf 10.27, above 1024, cannot be enforced", "1"),
        ({"multipleOf": -1025}, "multipleOf -1025, above 1024, cannot be enforced", "1"),
        ({"allOf": [{"multipleOf": 1025}, {"type": "integer"}]}, "multipleOf 1025, above 1024, cannot be", "1"),
        # The items' values are known, but not those of all lists.
        ({"items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems cannot be enforced", "3"),
        ({**PAIRS, "type": ["array", "null"]}, "uniqueItems cannot be enforced", "null"),
        (
            {
                **{"$id": "https://a.example/a", "type": "array", "uniqueItems": True},
                **{"items": {"$ref": "#/$defs/v", "maxLength": 1}, "$defs": {"v": {"enum": ["a", "bb"]}}},
            },
            "uniqueItems cannot be enforced",
            '["a", "a"]',
        ),
        ({**PAIRS, "prefixItems": [{"const": 5}]}, "uniqueItems cannot be enforced", "[5, 1, 1]"),
        ({**PAIRS, "contains": {"const": 1}}, "uniqueItems", "[2, 2]"),
        ({**PAIRS, "enum": [[1, 1]]}, "uniqueItems cannot be enforced", "[1, 1]"),
        ({"type": "array", "items": True, "uniqueItems": True}, "uniqueItems cannot be enforced", '["a", "a"]'),
        ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True}, "uniqueItems cannot be", "[8, 8]"),
        ({"minimum": 2**53 + 2}, "minimum beyond 2^53 cannot be enforced", "1"),
        ({"exclusiveMaximum": -(2**70)}, "exclusiveMaximum beyond 2^53 cannot be enforced", "1"),
        ({"exclusiveMinimum": 2**70}, "exclusiveMinimum beyond 2^53 cannot be enforced", "1"),
        ({"type": "object", "minProperties": 2}, "minProperties where names are open cannot be enforced", "{}"),
        (
            {**ONE_NAME, **OPEN, "minProperties": 3},
            "minProperties where names are open cannot be enforced",
            '{"a": 1}',
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2} | OPEN,
            "minProperties where names are open cannot be enforced",
            '{"a": 1}',
        ),
        ({**ONE_NAME, "not": {"required": "a"}}, "not cannot be enforced", '{"a": 1}'),
        ({**ONE_NAME, "not": {"required": ["a"], "minProperties": 2}}, "not cannot be enforced", '{"a": 1}'),
        ({**ONE_NAME, "not": {"type": "array", "required": ["a"]}}, "not cannot be enforced", '{"a": 1}'),
        (
            {"properties": {"a": {}, "b": {}}, "minProperties": 2, "type": "object"},
            "minProperties where names are optional cannot be enforced",
            '{"a": 1}',
        ),
        ({"propertyNames": {"not": {}}, "type": "object"}, "propertyNames", "{}"),
        (
            {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}, "type": "object"},
            "dependencies cannot be enforced",
            '{"a": 1, "c": 1}',
        ),
        ({"unevaluatedProperties": False, "type": "object"}, "unevaluatedProperties cannot be enforced", '{"a": 1}'),
    ],
)
def test_relaxed_leaves_out_with_a_warning(compiler: GrammarCompiler, schema: Any, warning: str, text: str) -> None:
    nested = {"type": "array", "items": schema}
    for whole, written in ((schema, text), (nested, f"[{text}]")):
        with pytest.raises(RequestError, match="cannot be compiled.*strictness='relaxed' accepts it"):
            compiled(compiler, json=deepcopy(whole))
        relaxed = compiled(compiler, json=deepcopy(whole), strictness="relaxed")
        assert any(warning in one for one in relaxed.warnings), relaxed.warnings
        assert takes(relaxed, written) and not takes(relaxed, "nope")


CONTAINERS = [
    *(
        '{"items": %s}',
        '{"properties": {"a": %s}}',
        '{"additionalProperties": %s}',
        '{"patternProperties": {"^a": %s}}',
    ),
    *('{"prefixItems": [%s]}', '{"anyOf": [%s]}', '{"allOf": [%s, {}]}', '{"oneOf": [%s]}', '{"$defs": {"a": %s}}'),
    *('{"not": %s}', '{"if": %s}', '{"contains": %s}', '{"dependentSchemas": {"a": %s}}', '{"propertyNames": %s}'),
    *('{"x": %s}', '{"const": %s}', '{"enum": [[%s]]}', '{"default": [%s]}'),
]


@pytest.mark.parametrize("strictness", ["strict", "relaxed"])
def test_deep_schemas_are_refused_and_crash_nothing(compiler: GrammarCompiler, strictness: str) -> None:
    rng, deep, refused = random.Random(strictness), 0, 0
    for containers in (*([one] for one in CONTAINERS), CONTAINERS[:4], CONTAINERS[:9], CONTAINERS):
        for depth in (3, MAX_DEPTH, *rng.sample(range(MAX_DEPTH - 40, MAX_DEPTH + 80), 2), 200, 450, 2000):
            schema = '{"type": "object"}'
            for _ in range(depth):
                schema = rng.choice(containers).replace("%s", schema)
            deep += depth > MAX_DEPTH
            try:
                compiled(compiler, json=schema, strictness=strictness)
            except RequestError as error:
                refused += depth > MAX_DEPTH
                assert len(str(error)) < 800 and "could not be compiled" not in str(error), (containers, depth)
    assert refused > 0.8 * deep
    assert takes(compiled(compiler, json={"type": "array", "items": {"type": "null"}}), "[null]")


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_schemas_are_nested_120_deep_at_most(compiler: GrammarCompiler, depth: int) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    if depth == MAX_DEPTH == 120:
        assert takes(compiled(compiler, json=schema), "[[]]")
        return
    with pytest.raises(RequestError, match="nested more than 120 deep"):
        compiled(compiler, json=schema)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (True, ["1", '{"a": [1]}'], ["nope"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5, "type": "number"}, ["0.1", "0.5"], ["0", "0.51", "-0.1"]),
        ({"exclusiveMaximum": -2, "allOf": [{"minimum": -2.5}], "type": "number"}, ["-2.5", "-2.1"], ["-2", "-2.6"]),
        # The largest numbers that a float holds exactly are bounds as any.
        ({"type": "integer", "minimum": 2**53}, [str(2**53)], [str(2**53 - 1)]),
        ({"type": "integer", "maximum": -(2**53)}, [str(-(2**53))], [str(1 - 2**53)]),
        ({"type": "integer", "maximum": 2**70, "minimum": -5}, ["-5", "123456"], ["-6"]),
        ({"type": "integer", "exclusiveMinimum": -(2**70), "exclusiveMaximum": 5}, ["-7", "4"], ["5", f"-{2**53 + 1}"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.0000000001"], ["0", "-0.1"]),
        ({"type": "integer", "exclusiveMaximum": 2**70, "maximum": 5}, ["-7", "5"], ["6"]),
        ({"type": "integer", "const": 2**53}, [str(2**53)], ["1"]),
        ({"allOf": [{"multipleOf": 1024}, {"multipleOf": -512}]}, ["2048"], ["512"]),
        # Multiples of different values have no common one.
        ({"items": {"multipleOf": 97}, "prefixItems": [{"multipleOf": 89}], "type": "array"}, ["[89, 97]"], ["[97]"]),
        ({"type": "integer", "enum": [1, "a", 2.5, 3.0]}, ["1"], ['"a"', "2.5"]),
        ({"type": "string", "maxLength": 10**12}, ['"aaa"'], ["1"]),
        (
            {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "type": "string"},
            ['"-007.50"', '".5"', '"5."'],
            ['"."', '""'],
        ),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ['["b", "a"]', "[]"], ['["a", "a"]']),
        (
            {"type": "array", "items": {"enum": [1, 1.0, True]}, "uniqueItems": True},
            ["[1, true]"],
            ["[1, 1]", "[1, 1.0]"],
        ),
        ({"type": "array", "items": {"enum": [1, "a"], "type": "string"}, "uniqueItems": True}, ['["a"]'], ["[1]"]),
        ({"type": "array", "items": {"enum": ["a", "bb"], "maxLength": 1}, "uniqueItems": True}, ['["a"]'], ['["bb"]']),
        ({"type": "string", "uniqueItems": True}, ['"a"'], ["[1]"]),
        ({**PAIRS, "minItems": 1, "maxItems": 1}, ["[1]", "[2]"], ["[]", "[1, 2]"]),
        ({**PAIRS, "minItems": 2, "maxItems": 9}, ["[1, 2]", "[2, 1]"], ["[1]", "[1, 2, 1]"]),
        # 400 lists of twenty values, and one more; then only those in order.
        ({**TWENTY, "minItems": 1, "maxItems": 2}, ["[1, 2]", "[2, 1]"], ["[]", "[1, 1]"]),
        ({**TWENTY, "maxItems": 2}, ["[]", "[1, 2]"], ["[2, 1]", "[1, 1]"]),
        ({**ONE_NAME, **OPEN, "minProperties": 2}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
        ({**ONE_NAME, **OPEN, "maxProperties": 1}, ['{"a": 1}'], ['{"a": 1, "b": 1}']),
        ({**ONE_NAME, **OPEN, "maxProperties": 3}, ['{"a": 1, "b": 1, "c": 1}'], ['{"a": 1, "b": 1, "c": 1, "d": 1}']),
        (
            {**ONE_NAME, "patternProperties": {"^x+$": {}}, "additionalProperties": False, "maxProperties": 1},
            ['{"a": 1}'],
            ['{"a": 1, "x": 1}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2},
            ['{"a": 1, "b": 1}'],
            ['{"a": 1}', '{"a": 1, "c": 1}'],
        ),
        ({"type": ["object", "null"], "not": {"required": ["a"]}}, ["{}"], ["null", '{"a": 1}']),
        ({"type": ["object", "null"], "not": {"type": "object", "required": ["a"]}}, ["{}", "null"], ['{"a": 1}']),
        (
            {"type": "object", "allOf": [{"required": ["b"]}], "not": {"required": ["a"]}},
            ['{"b": 1}'],
            ["{}", '{"b": 1, "a": 1}'],
        ),
        (
            {"type": "object", "not": {"required": ["a", "b"]}},
            ['{"a": 1}', '{"b": 1, "c": 2}', "{}"],
            ['{"a": 1, "b": 2}', '{"c": 1, "a": 1, "b": 2}'],
        ),
        ({"type": "object", "not": {"type": "object", "required": ["a"]}}, ['{"b": 1}', "{}"], ['{"a": 1}']),
        ({**UNIQUE, "maxItems": 1}, ["[7]", "[]"], ["[7, 7]"]),
        ({**UNIQUE, "uniqueItems": False}, ["[7, 7]"], ["7"]),
    ],
)
def test_taken_and_right(compiler: GrammarCompiler, schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(compiler, json=deepcopy(schema))
    assert grammar.warnings == ()
    for text in (*right, *wrong):
        assert takes(grammar, text) == (text in right), text


def test_objects_are_closed_where_nothing_says_or_needs_others(compiler: GrammarCompiler) -> None:
    plain: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    base = {"$defs": {"base": plain}, "properties": {"x": {"$ref": "#/$defs/base"}, "y": {"type": "null"}}}
    for schema, text, is_closed in (
        (plain, '{"b": 1}', True),
        ({"properties": {"x": plain}}, '{"x": {"b": 1}}', True),
        ({"$defs": {"p": plain}, "$ref": "#/$defs/p"}, '{"b": 1}', True),
        ({**plain, "additionalProperties": True}, '{"b": 1}', False),
        ({**plain, "required": ["b"]}, '{"b": 1}', False),
        ({**plain, "minProperties": 2, "required": ["a"]}, '{"a": 1, "b": 1}', False),
        ({"allOf": [plain, {"type": "object", "properties": {"b": {}}}]}, '{"a": 1, "b": 1}', False),
        ({"allOf": [plain]}, '{"b": 1}', True),
        ({"anyOf": [plain], "title": "a"}, '{"b": 1}', True),
        ({"anyOf": [plain], "required": ["b"]}, '{"b": 1}', False),
        ({"properties": {"x": plain}, "patternProperties": {"^x": {"type": "object"}}}, '{"x": {"b": 1}}', False),
        ({"anyOf": [{"properties": {"b": {}}}], **plain}, '{"b": 1, "a": 1}', False),
        ({**base, "allOf": [{"$ref": "#/$defs/base"}, {"required": ["y"]}]}, '{"x": {"a": 1}, "y": null}', False),
        ({"type": "object"}, '{"b": 1}', False),
    ):
        for closes in (True, False):
            grammar = compiled(compiler, json=deepcopy(schema), disable_additional_properties=closes)
            assert takes(grammar, text) is not (closes and is_closed), (schema, closes)


def test_names_of_resources_do_not_mix(compiler: GrammarCompiler) -> None:
    """As tools have them, each a document of its own with the same names in it."""
    kinds = {"integer": "1", "string": '"s"', "null": "null"}
    documents: dict[str, Any] = {
        kind: {
            "$id": f"https://tools.example/{kind}",
            "type": "object",
            "properties": {
                "pointer": {"$ref": "#/$defs/x"},
                "anchor": {"$ref": "#n"},
                "whole": {"$ref": "#"},
                "list": {"type": "array", "items": {"$ref": "#/$defs/values"}, "uniqueItems": True},
            },
            "$defs": {"x": {"type": kind}, "y": {"$anchor": "n", "type": kind}, "values": {"enum": [kind, 1]}},
        }
        for kind in kinds
    }
    other = {"$ref": "https://tools.example/null#/$defs/x"}
    grammar = compiled(compiler, json={"properties": {**documents, "other": other}, "type": "object"})
    for kind, own in kinds.items():
        for name, value in kinds.items():
            for text in (f'{{"pointer": {value}}}', f'{{"anchor": {value}}}', f'{{"whole": {{"pointer": {value}}}}}'):
                assert takes(grammar, f'{{"{kind}": {text}}}') == (value == own), (kind, text)
            assert takes(grammar, f'{{"{kind}": {{"list": [1, "{name}"]}}}}') == (name == kind)
        assert not takes(grammar, f'{{"{kind}": {{"list": ["{kind}", "{kind}"]}}}}')
    assert takes(grammar, '{"other": null}') and not takes(grammar, '{"other": 1}')


def test_schemas_of_wrong_types_are_a_request_error_or_taken(compiler: GrammarCompiler) -> None:
    values: list[Any] = [
        *(None, True, 0, -1, 2.5, 10**30, 1e300, "a", "#", "#/", "#/properties/a", "#/%ff", "string", "array", "date"),
        *(
            "(",
            [],
            {},
            [[]],
            [{}],
            [5],
            ["a"],
            {"a": {}},
            {"a": 5},
            {"a": [5]},
            {"$ref": "#"},
            {"(": {}},
            {"required": 5},
        ),
    ]
    keywords = ["$id", "$anchor", "$defs", "type", "if", "dependencies", *CHOICES, *LISTS, *MAPS]
    rng, taken = random.Random(0), 0
    for _ in range(1500):
        schema = {key: deepcopy(rng.choice(values)) for key in rng.sample(keywords, rng.randint(1, 4))}
        inner = {rng.choice(keywords): deepcopy(rng.choice(values))}
        whole = rng.choice([schema, {"properties": {"a": schema, "b": inner}, "$defs": rng.choice([{}, 5])}])
        try:
            taken += bool(compiled(compiler, json=whole, strictness=rng.choice(["strict", "relaxed"])))
        except RequestError as error:
            assert "could not be compiled" not in str(error), (json.dumps(whole), error)
    assert taken > 80


@pytest.mark.parametrize("count", [10, 11])
@pytest.mark.parametrize("key", ["pattern", "patternProperties"])
def test_patterns_that_meet_are_bounded(compiler: GrammarCompiler, key: str, count: int) -> None:
    kinds = {
        "pattern": [{"pattern": f"^.{{{length},}}$"} for length in range(count)],
        "patternProperties": [
            {"patternProperties": {f"^{letter}x+$": {"const": 1}}} for letter in "abcdefghijk"[:count]
        ],
    }
    schema = {"type": "string" if key == "pattern" else "object", "allOf": kinds[key]}
    if count == 10:
        assert not compiled(compiler, json=schema).warnings
        return
    with pytest.raises(RequestError, match="more than 10 patterns in schemas that are merged cannot be enforced"):
        compiled(compiler, json=deepcopy(schema))
    assert "more than 10 patterns" in compiled(compiler, json=schema, strictness="relaxed").warnings[0]


def test_a_one_of_that_is_disjoint_only_because_it_was_closed_says_so() -> None:
    compiler = byte_compiler()
    kinds = [{"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in "ab"]
    overlapping = [{"type": "object", "properties": {"a": {}}}, {"required": ["b"]}]
    for branches, warnings in ((kinds, ()), (overlapping, ("oneOf is treated as anyOf",))):
        assert compiled(compiler, json={"oneOf": branches}).warnings == warnings
    compiler.close()


@pytest.mark.parametrize(
    ("required", "limits", "right", "wrong"),
    [
        # At most, exactly and one more than the required names.
        (["a"], {"minProperties": 1}, ['{"a": 1}', '{"a": 1, "b": 1}'], ["{}"]),
        (["a"], {"minProperties": 2}, ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}'], ['{"a": 1}']),
        (["a", "b"], {"minProperties": 1}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
        # The number of names, and the required ones and one more.
        (["a"], {"maxProperties": 3}, ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}'], ["{}"]),
        (["a"], {"maxProperties": 2}, ['{"a": 1}', '{"a": 1, "c": 1}'], ['{"a": 1, "b": 1, "c": 1}']),
        (["a", "b", "c"], {"minProperties": 3, "maxProperties": 3}, ['{"a": 1, "b": 1, "c": 1}'], ['{"a": 1, "b": 1}']),
    ],
)
def test_counts_of_properties_next_to_those_that_the_names_imply(
    compiler: GrammarCompiler, required: list[str], limits: dict[str, int], right: list[str], wrong: list[str]
) -> None:
    names = {"properties": {name: {"const": 1} for name in "abc"}, "additionalProperties": False}
    grammar = compiled(compiler, json={"type": "object", "required": required, **names, **limits})
    assert not grammar.warnings
    assert [takes(grammar, text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)
