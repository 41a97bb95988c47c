"""Regular expressions: what a grammar lets through is what the expression matches, random ones against `re`."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator

import pytest
from byte_grammars import byte_compiler, compiled, takes

from phonograph.errors import RequestError

PATTERNS = 250
"""Random expressions of each test; 20,000 by hand."""
CHARACTERS = ["a", "b", "A", "1", "0", "^", "$", "-", "]", "\\", '"', "\n", "\t", ".", "é", "😀", "{", "}", "x", ","]
ATOMS = [
    *("a", "b", "1", ".", "é", "😀", r"\d", r"\w", r"\S", r"\.", r"\\", '"', r"\n", r"\t", r"\x61", r"\u0061", "(ab)"),
    *(r"\$", r"\^", "-", "]", "[a]", "[^a]", "[ab1-]", "[-a]", r"[\^]", r"[\^a]", r"[a^]", r"[^^]", r"[^\n]", r"[^\d]"),
    *(
        r"[\w-]",
        r"[\d\^]",
        "[!-~]",
        r"[\^-b]",
        r"[\"\\]",
        r"[\n\ta]",
        r"[\x00-\x1fa]",
        r'["]',
        r"[\]]",
        r"[\S\s]",
        "[.$]",
    ),
]


def random_pattern(rng: random.Random, *, anchors: bool, depth: int = 2) -> str:
    branches: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        pieces: list[str] = []
        for _ in range(rng.choice([0, 1, 1, 2, 2, 3])):
            atom = rng.choice(ATOMS)
            if depth and rng.random() < 0.25:
                atom = rng.choice(["(", "(?:"]) + random_pattern(rng, anchors=False, depth=depth - 1) + ")"
            pieces.append(atom + rng.choice(["", "", "", "?", "*", "+", "{2}", "{1,2}", "{0,1}", "{1,}", "{0}", "+?"]))
        start, end = (anchors and rng.random() < 0.3 for _ in range(2))
        branches.append("^" * start + "".join(pieces) + "$" * end)
    return "|".join(branches)


def cases(seed: int, *, anchors: bool) -> Iterator[tuple[str, re.Pattern[str], list[str]]]:
    """Yield expressions that `re` takes, and texts. `$` is the end alone there too."""
    for number in range(PATTERNS):
        rng = random.Random(f"{seed} {number}")
        pattern = random_pattern(rng, anchors=anchors)
        texts = ["", *CHARACTERS, *("".join(rng.choices(CHARACTERS, k=rng.randint(2, 4))) for _ in range(60))]
        ends = re.sub(
            r"\\.|\[.*?\]|\$", lambda found: found[0].replace("$", r"\Z") if found[0] == "$" else found[0], pattern
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield pattern, re.compile(ends, re.ASCII), texts


def test_a_grammar_is_as_wide_as_its_expression() -> None:
    compiler, taken = byte_compiler(), 0
    for pattern, expression, texts in cases(1, anchors=False):
        try:
            grammar = compiled(compiler, regex=pattern or "()")
        except RequestError as error:
            raise AssertionError(pattern) from error
        for text in texts:
            matches = expression.fullmatch(text) is not None
            assert takes(grammar, text) == matches, f"{pattern}: {text!r}"
            taken += matches
    compiler.close()
    assert taken > PATTERNS


@pytest.mark.parametrize("place", ["value", "name"])
def test_strings_of_a_pattern_are_those_that_match(place: str) -> None:
    compiler, taken, refused = byte_compiler(), 0, 0
    for pattern, expression, texts in cases(2, anchors=True):
        schema = {"type": "string", "pattern": pattern}
        if place == "name":
            schema = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
        try:
            grammar = compiled(compiler, json=schema)
        except RequestError:
            refused += 1
            continue
        for text in texts:
            written = json.dumps(text, ensure_ascii=False)
            matches = expression.search(text) is not None
            assert takes(grammar, written if place == "value" else f"{{{written}: 1}}") == matches, (pattern, text)
            taken += matches
    compiler.close()
    assert taken > PATTERNS and refused < 0.1 * PATTERNS


@pytest.mark.parametrize("pattern", ["a$b", "(?=a)", "(?<!a)b", r"(a)\1", r"a\b", "a(", "a)", "[a", "a{3,2}", "[b-a]"])
def test_expressions_that_no_grammar_can_hold_are_refused(pattern: str) -> None:
    compiler = byte_compiler()
    for structured in ({"regex": pattern}, {"json": {"type": "string", "pattern": pattern}}):
        with pytest.raises(RequestError, match="cannot be compiled"):
            compiled(compiler, **structured)
    grammar = compiled(compiler, json={"type": "string", "pattern": pattern}, strictness="relaxed")
    assert takes(grammar, '"-"') and grammar.warnings == (f"the pattern {pattern} cannot be enforced",)
    compiler.close()


def test_classes_hold_quotes_and_backslashes_only_where_they_say_so() -> None:
    compiler, characters = byte_compiler(), ['"', "\\", "\n", "a", "]", "^", "é"]
    classes = [
        *(r'[^"]', r"[^\\]", r'[^"\\]', r'[^\]"]', r"[\x00-\x1f]", r"[\u0000-!]", r"[\0-\x1f\\]", "[^ -~]", r'[^^"]')
    ]
    for one in classes:
        expression = re.compile(rf"^{one}\Z")
        for character in (*characters, *(f"[{character}" for character in characters)):
            text = json.dumps(character, ensure_ascii=False)
            matches = expression.search(character) is not None
            value = compiled(compiler, json={"type": "string", "pattern": f"^{one}$"})
            assert takes(value, text) == matches, (one, character)
            names = {"type": "object", "patternProperties": {f"^{one}$": {}}, "additionalProperties": False}
            assert takes(compiled(compiler, json=names), f"{{{text}: 1}}") == matches, (one, character)
    compiler.close()
