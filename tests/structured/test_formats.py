"""Formats of strings: what grammars let through is of the format, by checks that know nothing of their patterns."""

from __future__ import annotations

import calendar
import json
import random
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
    assert CHECKS.keys() == PATTERNS.keys() > BY_LIBRARY


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
        (
            "email",
            ["a.b+c@example.com", "x@y", f"{'a' * 64}@b.co", f"{'a' * 32}.{'b' * 31}@c", f"{'a.' * 31}a@b"],
            ["a@", ".a@b", "a..b@c", "a@-b", "a@b@c", "a b@c", f"{'a' * 65}@b.co", f"a@{'b' * 64}", f"a@b{'.b' * 126}"],
        ),
        (
            "hostname",
            ["example.com", "a.b.c.example.co.uk", "x-1", f"a{'.a' * 126}"],
            ["-a", "a-", "a..b", "", "a" * 64, "a_b", f"a{'.a' * 127}"],
        ),
        ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        (
            "ipv6",
            ["::", "::1", "2001:db8::ff", "::ffff:1.2.3.4", "1::1.2.3.4", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:1.2.3.4"],
            ["1", "1::2::3", "::ffff:1.2.3.04", "12345::", ":", "1:2:3:4:5:6:7::8:9", "1:2:3:4:5:6:7:1.2.3.4", ":1"],
        ),
        ("ipv6interface", ["::1/128", "::/0", "::1"], ["::1/129", "::1/"]),
        ("ipv4interface", ["10.0.0.1/8", "10.0.0.1/32", "10.0.0.1"], ["10.0.0.1/33", "10.0.0.1/08"]),
        ("uuid4", ["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"]),
        ("base64", ["", "YWI=", "YQ==", "+/+/"], ["YWI", "Y===", "YQ=", "-_-_", "Y=Q="]),
        ("base64url", ["", "YWI=", "-_-_"], ["+/+/", "YWI"]),
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


def test_addresses_are_those_that_a_parser_reads(compiler: Any) -> None:
    rng, check = random.Random(6), checker()
    groups = [":".join(["1"] * count) for count in range(10)] + ["1.2.3.4", "::", "1:1.2.3.4"]
    for form in ("ipv4", "ipv6"):
        grammar, counts = compiled(compiler, json={"type": "string", "format": form}), [0, 0]
        for _ in range(2000):
            text = rng.choice(groups) + rng.choice(["::", ":", ""]) + rng.choice(groups)
            if form == "ipv4" or rng.random() < 0.2:
                text = ".".join(
                    rng.choices(["0", "9", "25", "255", "10", "199", "256", "01"], k=rng.choice([3, 4, 4, 4]))
                )
            is_valid = check.conforms(text, form)
            assert takes(grammar, f'"{text}"') == is_valid, text
            counts[is_valid] += 1
        assert min(counts) > 200, counts


def test_dates_are_those_of_the_calendar(compiler: Any) -> None:
    grammar = compiled(compiler, json={"type": "string", "format": "date"})
    for year in (1600, 1700, 2000, 2023, 2024, 2042, 2096, 2100, 9996):
        for month in range(14):
            for day in (0, 1, 9, 10, 28, 29, 30, 31, 32):
                exists = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
                assert takes(grammar, f'"{year}-{month:02}-{day:02}"') == exists, (year, month, day)


def test_other_formats_are_notes(compiler: Any) -> None:
    """Each has a warning unless it says nothing about texts."""
    for form, warnings in (("phone", ("format phone cannot be enforced",)), ("binary", ()), ("int32", ())):
        grammar = compiled(compiler, json={"type": "string", "format": form, "maxLength": 3})
        assert grammar.warnings == warnings and takes(grammar, '"äé"') and not takes(grammar, "5")
    for form in ("date", "phone"):
        grammar = compiled(compiler, json={"type": "integer", "format": form})
        assert grammar.warnings == () and takes(grammar, "5") and not takes(grammar, '"äé"')


def test_encodings_are_held_and_contents_are_notes(compiler: Any) -> None:
    text: dict[str, Any] = {"type": "string", "minLength": 1}
    grammar = compiled(compiler, json={**text, "contentEncoding": "base64", "contentMediaType": "image/png"})
    assert grammar.warnings == ("contentMediaType image/png cannot be enforced",)
    assert takes(grammar, '"YQ=="') and not takes(grammar, '"YQ="') and not takes(grammar, '""')
    inner = {"type": "array", "uniqueItems": True}
    for content, warnings in (
        ({"contentMediaType": "application/json"}, ("contentMediaType application/json cannot be enforced",)),
        ({"contentMediaType": "text/plain", "contentEncoding": "8bit"}, ()),
        ({"contentEncoding": "base32"}, ("contentEncoding base32 cannot be enforced",)),
    ):
        grammar = compiled(compiler, json={**text, **content, "contentSchema": inner})
        assert grammar.warnings == warnings and takes(grammar, '"[1"')


@pytest.mark.parametrize("form", ["email", "hostname"])
def test_a_format_with_a_longest_text_keeps_a_lower_maximum(compiler: Any, form: str) -> None:
    for most, length in ((9, 9), (300, 253), (None, 253)):
        bounds = {} if most is None else {"maxLength": most}
        grammar = compiled(compiler, json={"type": "string", "format": form, **bounds})
        for count in (length - 2, length, length + 2):
            text = "a." * (count // 2) + "a" if form == "hostname" else "a@a" + ".a" * (count // 2 - 1)
            assert len(text) == count and takes(grammar, f'"{text}"') == (count <= length)
