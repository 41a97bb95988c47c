"""References within a schema mean what JSON Schema says, or are refused by name."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from byte_grammars import byte_compiler, compiled, takes

from phonograph.engine.grammars.schema import narrow, refusal

pytest.importorskip("xgrammar")

INTEGER = {"type": "integer"}
PAIR = {"type": "array", "items": {"$ref": "#/prefixItems/0"}, "prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}]}
TREE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
# fmt: off
VALUES: list[Any] = [
    1, -3, "a", "ab", None, True, [], [1], [1, 2], [1, "a"], ["a"], [[1]], {}, {"a": 1}, {"a": "a"}, {"b": 1},
    {"b": "a"}, {"a": {}}, {"a": {"a": {}}}, {"a": {"a": 1}}, {"a": []}, {"a": [{"a": []}]}, {"a": [1]},
]
# fmt: on


@pytest.mark.parametrize(
    ("schema", "takes_some"),
    [
        ({"properties": {"a": {"$ref": "#n"}}, "$defs": {"x": {"$anchor": "n", **INTEGER}}}, {"a": 1}),
        ({"$ref": "#n", "definitions": {"x": {"items": {"$anchor": "n", **INTEGER}}}}, 1),
        ({"properties": {"a": {"$dynamicRef": "#n"}}, "$defs": {"x": {"$dynamicAnchor": "n", **INTEGER}}}, {"a": 1}),
        ({"$anchor": "me", "type": "object", "properties": {"a": {"$ref": "#me"}}}, {"a": {"a": {}}}),
        ({**TREE, "$recursiveAnchor": True}, {"a": {"a": {}}}),
        (TREE, {"a": {"a": {}}}),
        (PAIR, [1, 2]),
        ({"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}}, {"b": 1}),
        ({"properties": {"a": {"$ref": "#/$defs/x~1y~0z"}}, "$defs": {"x/y~z": INTEGER}}, {"a": 1}),
        ({"properties": {"a": {"$ref": "#/$defs/x%20y%25"}}, "$defs": {"x y%": INTEGER}}, {"a": 1}),
        ({"properties": {"a": {"$ref": "#/$defs/Gr%C3%B6%C3%9Fe"}}, "$defs": {"Größe": INTEGER}}, {"a": 1}),
        ({"properties": {"a": {"$ref": "#/$defs/"}}, "$defs": {"": INTEGER}}, {"a": 1}),
        (
            {"properties": {"a": {"$ref": "#/components/schemas/A"}}, "components": {"schemas": {"A": INTEGER}}},
            {"a": 1},
        ),
        # A place where no schema is looked for, whose keywords the library would take too widely as they are.
        (
            {
                "properties": {"a": {"$ref": "#/x/y"}},
                "x": {"y": {"pattern": "^a", "items": {"$ref": "#/x/z"}}, "z": {"minimum": 3}},
            },
            {"a": "a"},
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b/anyOf/1"}, "b": {"anyOf": [INTEGER, TREE]}}}, {}),
        # What moves has references, or is in another that moves.
        (
            {
                "properties": {"a": {"$ref": "#/x/a"}, "b": {"$ref": "#/x/a/items"}},
                "x": {"a": {"type": "array", "items": {"type": "object", "properties": {"a": {"$ref": "#/x/a"}}}}},
            },
            {"a": [{"a": []}]},
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": True, "moved0": False}}, 1),
        ({"properties": {"a": {"$ref": "#/x"}}, "x": True, "$defs": {"moved0": INTEGER}}, {"a": [1]}),
        ({"properties": {"$ref": INTEGER, "a": {"const": {"$ref": "#/nowhere"}}}}, {"$ref": 1}),
        ({"$id": "http://example.org/a", "$ref": "#/$defs/a", "$defs": {"a": {**INTEGER, "$id": "b"}}}, 1),
    ],
)
def test_references_mean_what_they_say(schema: dict[str, Any], takes_some: Any) -> None:
    narrowed = deepcopy(schema)
    assert refusal(narrowed) is None and narrowed == schema
    narrow(narrowed)
    grammar = compiled(byte_compiler(), "json", narrowed)
    validator = jsonschema.Draft202012Validator(schema)
    assert takes(grammar, json.dumps(takes_some)), narrowed
    for value in VALUES:
        assert not takes(grammar, json.dumps(value)) or validator.is_valid(value), (narrowed, value)


def test_recursion_through_what_moves() -> None:
    schema = {"$ref": "#node", "$defs": {"x/y": {"$anchor": "node", **TREE, "properties": {"a": {"$ref": "#node"}}}}}
    assert refusal(schema) is None
    narrow(schema)
    grammar = compiled(byte_compiler(), "json", schema)
    assert takes(grammar, '{"a": {"a": {"a": {}}}}') and not takes(grammar, '{"a": {"a": {"b": {}}}}')


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "#n"}, "'#n' leads nowhere: no schema has this $anchor"),
        ({"$ref": "#/$defs/a"}, "'#/$defs/a' leads nowhere: there is no '$defs'"),
        ({"$ref": "#/$defs/a", "$defs": {"b": {}}}, "there is no 'a'"),
        ({"prefixItems": [{}, {"$ref": "#/prefixItems/2"}]}, "there is no '2'"),
        ({"prefixItems": [{}, {"$ref": "#/prefixItems/01"}]}, "there is no '01'"),
        ({"properties": {"a": {"$ref": "#/properties"}}}, "leads to something that is no schema"),
        ({"$ref": "#/required", "required": []}, "leads to something that is no schema"),
        ({"$ref": "#/$defs/a/const", "$defs": {"a": {"const": {}}}}, "leads to something that is no schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": "integer"}}, "leads to something that is no schema"),
        ({"$ref": "other.json"}, "leads elsewhere"),
        ({"$dynamicRef": "other.json#a"}, "leads elsewhere"),
        ({"$ref": 5}, "$ref '5' is no reference"),
        ({"$recursiveRef": "#a"}, "'#a' leads nowhere"),
        ({"$ref": "#"}, "'#' leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "back to itself"),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#"}]}, "back to itself"),
        ({"$defs": {"a": {"$anchor": "n"}, "b": {"$dynamicAnchor": "n"}}}, "two schemas have the anchor 'n'"),
        ({"$defs": {"a": {"$id": "a", "items": {"$ref": "#"}}}}, "the $id 'a' changes what references within mean"),
        ({"$defs": {"a": {"$id": "a", "$anchor": "n"}}}, "the $id 'a' changes"),
        ({"$ref": "#/x", "x": {"$id": "a", "items": {"$ref": "#"}}}, "the $id 'a' changes"),
        ({"items": {"$ref": "#/x"}, "x": {"items": {"uniqueItems": True}}}, "uniqueItems"),
        ({"items": {"$dynamicRef": "#", "type": "integer"}}, "'type' beside '$dynamicRef'"),
        ({"properties": {"a": {"$ref": "#/x"}}, "x": {}, "$defs": 5}, "'$defs' must be an object"),
    ],
)
def test_references_that_are_refused(schema: dict[str, Any], says: str) -> None:
    assert says in (refusal(schema) or "")


def test_what_a_reference_leads_to_lies_too_deep() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    assert "more than 200 deep" in (refusal({"$ref": "#/x", "x": deep}) or "")
