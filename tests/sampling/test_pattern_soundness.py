"""What the grammar of a regular expression lets through is what the expression matches: random ones, against `re`."""

from __future__ import annotations

import json
import random
import re
import warnings
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes

from phonograph.engine.grammars.patterns import PatternError, rewritten
from phonograph.engine.grammars.schema import narrow, refusal

pytest.importorskip("xgrammar")

CHARACTERS = ["a", "b", "A", "1", "0", "^", "$", "-", "]", "\\", '"', "\n", "\t", ".", "é", "😀", "{", "}", "x", ","]
# fmt: off
ATOMS = [
    "a", "b", "1", ".", "é", "😀", r"\d", r"\w", r"\S", r"\.", r"\\", '"', r"\n", r"\t", r"\x61", r"\x410", r"\u0061",
    r"\$", r"\^", "-", "]", "{", "}", "a{", ",", "[a]", "[^a]", "[ab1-]", "[-a]", r"[\^]", r"[\^a]", r"[a^]", r"[^^]",
    r"[^\n]", r"[^\d]", r"[\w-]", r"[\d\^]", "[!-~]", "[^-a]", r"[\^-b]", r"[\"\\]", r"[\n\ta]", r"[\x00-\x1fa]",
    r'["]', r"[\]]", r"[\\-b]", r"[\S\s]", "[.$]", "()", "(?:)",
]
# fmt: on


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    branches = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        pieces = []
        for _ in range(rng.choice([0, 1, 1, 2, 2, 3])):
            atom = rng.choice(ATOMS)
            if depth and rng.random() < 0.25:
                atom = rng.choice(["(", "(?:", "(?P<n>"]) + random_pattern(rng, depth - 1).replace("?P<n>", "") + ")"
            pieces.append(atom + rng.choice(["", "", "", "?", "*", "+", "{2}", "{1,2}", "{,1}", "{1,}", "{0}", "+?"]))
        if rng.random() < 0.15:
            pieces.insert(rng.choice([0, 0, len(pieces)]), rng.choice(["^", r"\A"]))
        if rng.random() < 0.15:
            pieces.insert(rng.choice([0, len(pieces), len(pieces)]), rng.choice(["$", r"\Z"]))
        branches.append("".join(pieces))
    return "|".join(branches)


def random_texts(rng: random.Random) -> list[str]:
    return ["", *CHARACTERS, *("".join(rng.choices(CHARACTERS, k=rng.randint(2, 4))) for _ in range(60))]


@pytest.fixture(scope="module")
def compiler() -> Any:
    return byte_compiler()


def patterns(seed: int, count: int) -> list[tuple[str, re.Pattern[str], list[str]]]:
    """Expressions that `re` takes, and texts: random ones, and the expression's own characters."""
    rng = random.Random(seed)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        while len(found) < count:
            pattern = random_pattern(rng)
            try:
                expression = re.compile(pattern, re.ASCII)
            except re.error:
                continue
            found.append((pattern, expression, random_texts(rng)))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_a_grammar_is_as_wide_as_its_expression(compiler: Any, seed: int) -> None:
    taken = refused = 0
    for pattern, expression, texts in patterns(seed, 600):
        try:
            text_for_library = rewritten(pattern, in_json=False)
        except PatternError:
            refused += 1
            continue
        grammar = compiled(compiler, "regex", text_for_library)
        for text in texts:
            expected = expression.fullmatch(text) is not None
            assert takes(grammar, text) == expected, f"{pattern} as {text_for_library}: {text!r}"
            taken += expected
    assert taken > 1000 and refused < 200


@pytest.mark.parametrize("seed", range(2))
def test_strings_of_a_pattern_are_json_and_match(compiler: Any, seed: int) -> None:
    taken = refused = 0
    for pattern, expression, texts in patterns(100 + seed, 500):
        for place in ("value", "name"):
            schema = {"type": "string", "pattern": pattern}
            if place == "name":
                schema = {"type": "object", "patternProperties": {pattern: {"type": "null"}}}
            if refusal(schema) is not None:
                refused += 1
                continue
            narrow(schema)
            grammar = compiled(compiler, "json", schema)
            for text in texts:
                for written in (json.dumps(text), json.dumps(text, ensure_ascii=False), f'"{text}"'):
                    if takes(grammar, written if place == "value" else f"{{{written}: null}}"):
                        assert expression.fullmatch(json.loads(written)), f"{pattern} as {schema}: {written}"
                        taken += 1
    assert taken > 1000 and refused < 500


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a$b", r"has \$ before its end"),
        ("a^b", r"has \^ behind its start"),
        ("(^a)+", "repeats an anchor"),
        ("$*", "repeats an anchor"),
        ("(?=a)", "looks ahead or back"),
        ("(?<!a)b", "looks ahead or back"),
        ("(?i)a", r"has a group \(\?i"),
        (r"(a)\1", r"has \\1"),
        (r"a\b", r"has \\b"),
        ("a(", "not closed"),
        ("a)", "too many"),
        ("[a", "not closed"),
        ("[]a]", "first in a class"),
        ("a\\", "ends in a backslash"),
        ("a**", "two quantifiers"),
        ("a{3,2}", "exclude each other"),
        ("[b-a]", "exclude each other"),
        (r"[\d-z]", "bound of a range"),
        (r"\ud83d", "no character"),
        ("(" * 101 + ")" * 101, "more than 100 deep"),
    ],
)
def test_what_no_grammar_can_hold_is_named(pattern: str, problem: str) -> None:
    for in_json in (False, True):
        with pytest.raises(PatternError, match=problem):
            rewritten(pattern, in_json=in_json)


def test_ways_that_json_writes_with_a_backslash_are_left_out() -> None:
    assert rewritten(r'a|"|[\\\n]', in_json=True) == "a"
    assert rewritten(r'a"*', in_json=True) == "a()"
    assert rewritten(r'["-#]', in_json=True) == r"[\u{23}]"
    with pytest.raises(PatternError, match="needs a character that JSON writes with a backslash"):
        rewritten(r'a"', in_json=True)


def test_repetitions_do_not_grow_without_bound() -> None:
    with pytest.raises(PatternError, match="repetitions written out"):
        rewritten("(" * 20 + "a" + "{2,})" * 20, in_json=True)
