"""The meter against a parser: whatever a JSON text holds, in whatever pieces it comes, the counts bound it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from phonograph.config.server_config import ServerConfig
from phonograph.server.http import json_meter
from phonograph.server.http.api_errors import ApiError
from phonograph.server.http.json_meter import MAX_NUMBER, JsonMeter


def metered(text: bytes, *, size: int | None = None, seed: int = 0, **limits: int) -> ApiError | None:
    """Return the meter's result for a text in pieces of `size` bytes, or of random sizes."""
    meter, rng, start = JsonMeter(ServerConfig(**limits)), random.Random(seed), 0
    try:
        while start < len(text):
            end = start + (size or rng.choice((1, 2, 3, 7, 30, 1000)))
            meter.check(text[start:end])
            start = end
    except ApiError as error:
        return error
    return None


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth and kind < 0.3:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(6))]
    if depth and kind < 0.6:
        return {drawn_text(rng): drawn(rng, depth - 1) for _ in range(rng.randrange(6))}
    return rng.choice((None, True, rng.randrange(10**9), rng.random(), drawn_text(rng), drawn_text(rng)))


def drawn_text(rng: random.Random) -> str:
    return "".join(rng.choice('a"\\/{}[],:\n é😀') for _ in range(rng.randrange(8)))


def counts(value: Any) -> tuple[int, int, int]:
    """Texts, names, lists and objects of a value; its other values; its depth."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 1, 0
    inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    return (
        1 + names + sum(one[0] for one in inner),
        sum(one[1] for one in inner),
        1 + max((one[2] for one in inner), default=0),
    )


@pytest.mark.parametrize("seed", range(40))
def test_counts_are_those_of_the_parser(seed: int) -> None:
    rng = random.Random(seed)
    value = [drawn(rng, 8) for _ in range(20)]
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 2))).encode()
    fields, numbers, depth = counts(json.loads(text))
    limits = {
        "max_request_fields": fields,
        "max_request_token_ids": max(numbers, 1),
        "max_request_depth": max(depth, 8),
    }
    assert metered(text, seed=seed, **limits) is None
    too_many = metered(text, seed=seed, **{**limits, "max_request_fields": fields - 1})
    assert too_many is not None and "(max_request_fields)" in too_many.message
    if depth > 8:
        too_deep = metered(text, seed=seed, **{**limits, "max_request_depth": depth - 1})
        assert too_deep is not None and "(max_request_depth)" in too_deep.message


@pytest.mark.parametrize("size", [1, 5, 65_536])
def test_numbers_are_bounded(size: int) -> None:
    ids = json.dumps({"prompt": list(range(1000))}).encode()
    assert metered(ids, size=size, max_request_token_ids=1000) is None
    error = metered(ids, size=size, max_request_token_ids=990)
    assert error is not None and "more than 990 token ids or other numbers (max_request_token_ids)" in error.message
    text = json.dumps({"prompt": "1" * 5000, "n": 1, "x": [2.5] * 5}).encode()
    assert metered(text, size=size) is None, "digits of a text are no number"
    long = text.replace(b"2.5", b"9" * (MAX_NUMBER + 1), 1)
    error = metered(long, size=size)
    assert error is not None and error.code == "number_too_long"


def test_a_text_is_refused_before_its_end() -> None:
    """The rest of what a client sends need not come."""
    piece = b'{"role":"user","content":""},' * 1000
    meter = JsonMeter(ServerConfig(max_request_fields=10_000))
    with pytest.raises(ApiError, match=re.escape("more than 10000 texts, field names, lists and objects")):
        for _ in range(3):
            meter.check(piece)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_a_text_is_counted_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_meter, "PIECE", size)
    JsonMeter(ServerConfig(max_request_depth=8)).check_text("[" * 8 + "]" * 8)
    for text, limits in (("[" * 9, {"max_request_depth": 8}), ('["\u00e9", "", ""]', {"max_request_fields": 3})):
        meter = JsonMeter(ServerConfig(**limits))
        with pytest.raises(ApiError):
            meter.check_text(text)
