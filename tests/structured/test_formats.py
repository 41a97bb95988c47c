"""Formats of strings: what grammars let through is of the format, by checks that know nothing of their patterns."""

from __future__ import annotations

import calendar
import json
from typing import Any

import numpy as np
import pytest
from byte_grammars import byte_compiler, compiled, takes, walk
from json_formats import CHECKS, checker

from phonograph.structured.formats import BY_LIBRARY, PATTERNS

WALKS = 40
"""Random texts of each format; 20,000 by hand."""


@pytest.fixture(scope="module")
def compiler() -> Any:
    return byte_compiler()


def test_all_formats_are_checked() -> None:
    assert CHECKS.keys() == PATTERNS.keys() | BY_LIBRARY and not PATTERNS.keys() & BY_LIBRARY


@pytest.mark.parametrize("form", CHECKS)
def test_formats_hold_in_random_texts(compiler: Any, form: str) -> None:
    checks = checker()
    for schema in (
        {"type": "string", "format": form},
        {"format": form, "type": ["null", "string"], "minLength": 3},
        {"type": "string", "format": form, "pattern": "[0-9]"},
    ):
        grammar = compiled(compiler, json=schema)
        walks = [walk(grammar, np.random.default_rng((5, turn)), 200) for turn in range(WALKS)]
        found = [json.loads(one.text) for one in walks if one.ended]
        assert len(found) > 0.3 * WALKS and [one for one in found if not checks.conforms(one, form)] == []
        assert all(len(one) >= schema.get("minLength", 0) for one in found if one is not None)
        assert all(set(one) & {*"0123456789"} for one in found if "pattern" in schema)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.125+23:59"], ["24:00:00Z", "23:59:60Z", "12:00:00", "12:00Z", "1:00:00Z"]),
        (
            "date-time",
            ["2024-02-29T12:30:00Z", "1999-12-31T23:59:59.5-08:00"],
            ["2024-02-30T12:30:00Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01T00:00:00"],
        ),
        ("email", ["a.b+c@example.com", "x@y"], ["a@", ".a@b", "a..b@c", "a@-b", "a@b@c", "a b@c"]),
        ("hostname", ["example.com", "a.b.c.example.co.uk", "x-1"], ["-a", "a-", "a..b", "", "a" * 64, "a_b"]),
        ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::", "::1", "2001:db8::ff"], ["1", "1::2::3", "::ffff:1.2.3.04", "12345::", ":"]),
        ("json-pointer", ["", "/a/0", "/a~1b~0"], ["a", "/~2", "/~"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["", "01", "/a", "1#/a", "1a"]),
        ("uri", ["https://u@example.org:80/a?b#c", "s3://a/b", "urn:a:b"], ["example.org", "a b:c", "1:a", "a:%2"]),
        ("uri-reference", ["", "../a?b#c", "//example.org", "http://a/b"], ["1:a", "a b", "a#b#c"]),
        ("uri-template", ["http://a/{x}{?y,z*}{+p.q:3}", "", "%20"], ["{", "{}", "{x", "a b", "{x:0}", "'", "%2"]),
        ("duration", ["P1Y2M3D", "PT5H", "P4W"], ["P", "PT", "P1Y2D", "1D", "P1H", "P1W2D"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "g"]),
        ("iri", ["https://例え.jp/ü?ß"], ["例:a"]),
        ("regex", ["^[a-z]+$", r"\d|a*", r"^\^.?$"], ["(", "[", "a**", "\\"]),
    ],
)
def test_formats_by_example(compiler: Any, form: str, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(compiler, json={"type": "string", "format": form})
    for text in (*right, *wrong):
        assert takes(grammar, json.dumps(text, ensure_ascii=False)) == (text in right), text


def test_dates_are_those_of_the_calendar(compiler: Any) -> None:
    grammar = compiled(compiler, json={"type": "string", "format": "date"})
    for year in (1600, 1700, 2000, 2023, 2024, 2042, 2096, 2100, 9996):
        for month in range(14):
            for day in (0, 1, 9, 10, 28, 29, 30, 31, 32):
                exists = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
                assert takes(grammar, f'"{year}-{month:02}-{day:02}"') == exists, (year, month, day)


def test_other_formats_are_notes(compiler: Any) -> None:
    for schema in ({"type": "string", "format": "phone", "maxLength": 3}, {"type": "integer", "format": "date"}):
        grammar = compiled(compiler, json=schema)
        assert grammar.warnings == () and takes(grammar, '"äé"') == (schema["type"] == "string") != takes(grammar, "5")
