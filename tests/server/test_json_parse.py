"""Parsing in steps against `json.loads`: the same values and refusals, and no step with much work."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from phonograph.server.http import json_parse
from phonograph.server.http.json_parse import parse_json


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small bodies too, in many places."""
    monkeypatch.setattr(json_parse, "WHOLE_BYTES", 7)
    monkeypatch.setattr(json_parse, "STEP_COMMAS", 2)
    monkeypatch.setattr(json_parse, "STEP_BYTES", 40)


def parsed(body: bytes) -> Any:
    """Run the parser without an event loop, which it only yields to."""
    steps = parse_json(body)
    while True:
        try:
            steps.send(None)
        except StopIteration as end:
            return end.value


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


@pytest.mark.parametrize("seed", range(40))
def test_values_are_those_of_json_loads(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        value = [drawn(rng, 5) for _ in range(rng.randrange(8))]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 2)))
        assert same(parsed(text.encode()), json.loads(text))


@pytest.mark.parametrize("seed", range(40))
def test_refusals_are_those_of_json_loads(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        text = list(json.dumps({"a": [drawn(rng, 3) for _ in range(5)], "b": [1] * 9, "c": {"d": [[], {}] * 4}}))
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(2)] = rng.choice('a"\\{}[],:1 \n')
        broken = "".join(text)
        try:
            expected = json.loads(broken)
        except ValueError:
            with pytest.raises(ValueError):
                parsed(broken.encode())
        else:
            assert same(parsed(broken.encode()), expected), broken


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2, 3, 4], "b": 1, "a": 5, "c": 6}',
        '{"a": 1, "b": 2, "c": 3, "a": [1, 2, 3, 4]}',
        '{"a": [1, 2, 3, 4], "b": 1, "a": [5, 6, 7, 8]}',
        '{"{": [1, 2, 3, 4], "[,": {"]": [[1, 2, 3, 4], 5, 6, 7]}}',
        " [[[[[1, 2, 3, [4, 5, 6, 7, 8]]]]]] ",
        '["' + "\\\\" * 9 + '", "' + "\\\\" * 8 + '\\"", 1, 2, 3, 4]',
        "\ufeff[1, 2, 3, 4, 5]",
        "[NaN, Infinity, -1e5, 1, 2, 3]",
    ],
)
def test_names_and_texts_that_could_be_cut_wrongly(text: str) -> None:
    assert same(parsed(text.encode()), json.loads(text.removeprefix("\ufeff")))


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3, 4, ]",
        "[, 1, 2, 3, 4]",
        "[1, 2, 3, , 4]",
        "[1, 2, 3, 4] 5",
        "[1, 2, 3, 4], 5",
        "[1, 2], [3, 4, 5]",
        "[1, 2, 3, 4}",
        "[1, 2, 3, 4",
        "1, 2, 3, 4]",
        '{"a": 1, "b": 2, "c": 3, "d": 4, }',
        '{"a": 1 [1, 2, 3, 4], "b": 2}',
        '{"a" [1, 2, 3, 4], "b": 2}',
        '{"a": {"b": [1, 2, 3, 4]: 5}, "b": 2}',
        '{[1, 2, 3, 4], "b": 2}',
        '{"a": "b": [1, 2, 3, 4]}',
        '{"a": , "b": [1, 2, 3, 4]}',
        "]]], 1, 2, 3, 4",
        '["a, b, c, d, e',
        "\ufeff\ufeff[1, 2, 3, 4, 5]",
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        json.loads(text)
    with pytest.raises(ValueError):
        parsed(text.encode())


def test_errors_have_the_byte_in_the_body() -> None:
    text = '{"é": [1, 2, 3, 4], "b": ["é", 2, x, 4]}'.encode()
    with pytest.raises(ValueError, match=f"Expecting value at byte {text.index(b'x')}$"):
        parsed(text)
    with pytest.raises(UnicodeDecodeError) as error:
        parsed(text.replace(b"x", b'"\xff"'))
    assert error.value.start == text.index(b"x") + 1


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": [' + "5," * 99_999 + "5]}",
        "{" + ",".join(f'"k{index}": 1' for index in range(50_000)) + "}",
        '{"a": {"b": [[' + "{}," * 30_000 + "{}]]}}",
        '{"prompt": [' + ("[" + "5," * 499 + "5],") * 199 + "[1]]}",
    ],
)
def test_each_step_is_short(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    loads, counts, step = json.loads, [0], parse_json(body.encode())

    def counted(text: str) -> Any:
        counts[-1] += text.count(",")
        return loads(text)

    with monkeypatch.context() as patch, pytest.raises(StopIteration) as end:
        patch.setattr(json, "loads", counted)
        while True:
            step.send(None)
            counts.append(0)
    assert end.value.value == json.loads(body)
    assert sum(counts) >= body.count(",") - len(counts) and max(counts) <= 4200
