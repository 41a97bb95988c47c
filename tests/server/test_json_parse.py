"""Bodies of any length: the values and refusals of `json.loads`, from both parsers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from phonograph.server.http import json_route
from phonograph.server.http.json_route import parse_json


@pytest.fixture(autouse=True, params=["short", "long"])
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Treat every body as a long one, for pydantic's parser, or as a short one."""
    monkeypatch.setattr(json_route, "EXACT_BYTES", 0 if request.param == "long" else 1 << 20)
    return request.param


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth and kind < 0.35:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(6))]
    if depth and kind < 0.7:
        return {drawn_text(rng): drawn(rng, depth - 1) for _ in range(rng.randrange(6))}
    return rng.choice((None, True, rng.randrange(10**9), rng.random(), drawn_text(rng)))


def drawn_text(rng: random.Random) -> str:
    return "".join(rng.choice('a"\\/{}[],:\n é😀') for _ in range(rng.randrange(5)))


def same(found: Any, expected: Any) -> bool:
    """Compare with the order of names."""
    return json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize("seed", range(10))
def test_values_are_those_of_json_loads(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        value = [drawn(rng, 5) for _ in range(rng.randrange(8))]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 2)))
        assert same(parse_json(text.encode()), json.loads(text))


@pytest.mark.parametrize("seed", range(10))
def test_refusals_are_those_of_json_loads(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(80):
        value = {"a": [drawn(rng, 3) for _ in range(5)], "b": [1] * 9, "c": {"d": [[], {}] * 4}}
        text = list(json.dumps(value, ensure_ascii=False))  # A half of an escaped pair has a test of its own.
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(2)] = rng.choice('a"\\{}[],:1 \n')
        broken = "".join(text)
        try:
            expected = json.loads(broken)
        except ValueError:
            with pytest.raises(ValueError):
                parse_json(broken.encode())
        else:
            assert same(parse_json(broken.encode()), expected), broken


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2], "b": 1, "a": 5, "c": 6}',
        '{"a": 1, "b": 2, "c": 3, "a": [1, 2]}',
        "\ufeff[1, 2]",
        "[NaN, Infinity, -Infinity, -1e5, 1e400, -0.0, 0.1]",
        f"[{'9' * 1024}, -{'9' * 1023}, 18446744073709551616]",
        '"\\ud83d\\ude00 \\u0000"',
        " [" * 199 + "] " * 199,
    ],
)
def test_names_numbers_and_texts_of_all_kinds(text: str) -> None:
    assert same(parse_json(text.encode()), json.loads(text.removeprefix("\ufeff")))


@pytest.mark.parametrize("text", ["", "[1, 2, ]", "[1, 2] 5", "1, 2]", '{"a" [1]}', '["a', "\ufeff\ufeff[1]", "[01]"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        json.loads(text)
    with pytest.raises(ValueError):
        parse_json(text.encode())


def test_errors_have_the_place_in_the_body(length: str) -> None:
    text = '{"é": 1, "b": ["é", x]}'.encode()
    place = "line 1 column 23" if length == "long" else r"line 1 column 21 \(char 20\)"
    with pytest.raises(ValueError, match=f"xpect.*{place}$"):
        parse_json(text)
    with pytest.raises(ValueError) as error:
        parse_json(text.replace(b"x", b'"\xff"'))
    if length == "short":
        assert isinstance(error.value, UnicodeDecodeError) and error.value.start == text.index(b"x") + 1


@pytest.mark.parametrize("text", ['"\\ud83d"', "[" * 300 + "]" * 300])
def test_long_bodies_have_no_half_pairs_and_200_levels_at_most(text: str, length: str) -> None:
    if length == "short":
        assert same(parse_json(text.encode()), json.loads(text))
    else:
        with pytest.raises(ValueError, match="hex escape|recursion limit"):
            parse_json(text.encode())
