"""Limits of schemas and grammars, with the last value that is taken and the first one that is not.

The numbers are written out, because users meet them: a schema that was taken must stay so.
"""

from __future__ import annotations

from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes

from phonograph.errors import RequestError
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.gbnf import lark_from_gbnf
from phonograph.structured.names import names_of


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


def patterns(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"^a{{{least},20}}$"} for least in range(count)]}


def lists(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": lists(depth - 1)} if depth else {"type": "object"}


@pytest.mark.parametrize(
    ("taken", "refused", "says"),
    [
        (patterns(10), patterns(11), "more than 10 patterns in schemas that are merged"),
        (lists(120), lists(121), "nested more than 120 deep"),
        ({"multipleOf": 1024}, {"multipleOf": 1025}, "multipleOf 1025, above 1024"),
        ({"multipleOf": 10.24}, {"multipleOf": 10.25001}, "above 1024"),
        (
            {"allOf": [{"multipleOf": 512}, {"multipleOf": 1024}]},
            {"allOf": [{"multipleOf": 25}, {"multipleOf": 41}]},
            "common multiple is above 1024",
        ),
        ({"minimum": 2**53}, {"minimum": 2**53 + 2}, "minimum beyond 2\\^53"),
        ({"maximum": -(2**53)}, {"maximum": -(2**53) - 2}, "maximum beyond 2\\^53"),
        ({"const": 2**53}, {"const": 2**53 + 1}, "const has an integer beyond 2\\^53"),
        ({"enum": [[-(2**53)]]}, {"enum": [[-(2**53) - 1]]}, "enum has an integer beyond 2\\^53"),
    ],
)
def test_schemas_at_a_limit(compiler: GrammarCompiler, taken: Any, refused: Any, says: str) -> None:
    assert compiled(compiler, json=taken).warnings == ()
    with pytest.raises(RequestError, match=says):
        compiled(compiler, json=refused)


def union(within: int, others: int) -> dict[str, Any]:
    """Return a union with another union of constants within it."""
    references = [{"$ref": f"#/$defs/{number}"} for number in range(within + others)]
    definitions = {str(number): {"const": number} for number in range(within + others)}
    branches = [*references[within:], *([{"anyOf": references[:within]}] if within else [])]
    return {"$defs": definitions, "type": "array", "items": {"oneOf": branches}}


@pytest.mark.parametrize(
    ("within", "others", "is_exact"), [(0, 100, True), (0, 101, False), (50, 50, True), (50, 51, False)]
)
def test_a_hundred_branches_are_compared(compiler: GrammarCompiler, within: int, others: int, is_exact: bool) -> None:
    warnings = () if is_exact else ("oneOf is treated as anyOf",)
    assert compiled(compiler, json=union(within, others)).warnings == warnings


@pytest.mark.parametrize(("least", "any_order"), [(1, True), (0, False)])
def test_four_hundred_lists_without_repetition_are_written_out(
    compiler: GrammarCompiler, least: int, any_order: bool
) -> None:
    """Lists of one or two of 20 values are 400 and have any order; the empty one more leaves the enum's order."""
    array = {"type": "array", "items": {"enum": [*range(20)]}, "uniqueItems": True, "minItems": least, "maxItems": 2}
    grammar = compiled(compiler, json=array)
    assert [takes(grammar, text) for text in ("[1, 2]", "[2, 1]", "[1, 1]")] == [True, any_order, False]
    assert takes(grammar, "[]") == (least == 0)


def test_names_of_a_pattern() -> None:
    """A name has at most 300 bytes in JSON, and a pattern as many names as the caller lists."""
    (name,) = names_of("^a{298}$", 1) or [""]
    assert name == "a" * 298 and names_of("^a{299}$", 1) is None
    assert len(names_of("^[0-9]{2}$", 100) or ()) == 100 and names_of("^[0-9]{2}$", 99) is None


@pytest.mark.parametrize("more", ["", "|x"])
def test_a_hundred_names_of_a_pattern_become_properties(compiler: GrammarCompiler, more: str) -> None:
    """The library would allow a listed name of a pattern twice."""
    schema = {"type": "object", "patternProperties": {f"^([0-9]{{2}}{more})$": {}}, "additionalProperties": False}
    assert takes(compiled(compiler, json=schema), '{"12": 1, "12": 1}') == bool(more)


@pytest.mark.parametrize("counts", ["{%d}", "{3,%d}", "{%d,}"])
def test_counts_of_gbnf(counts: str) -> None:
    assert "1000000" in lark_from_gbnf(f'root ::= "a"{counts % 1_000_000}')
    with pytest.raises(ValueError, match="must be in order and at most 1000000"):
        lark_from_gbnf(f'root ::= "a"{counts % 1_000_001}')
