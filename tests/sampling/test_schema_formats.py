"""What a grammar lets through as a format is of that format, by checks that know nothing of its pattern."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from byte_grammars import byte_compiler, compiled, takes
from json_formats import CHECKS, checker
from samples import sample

from phonograph.engine.grammars.formats import PATTERNS
from phonograph.engine.grammars.schema import narrow, refusal

pytest.importorskip("xgrammar")


def grammar_of(compiler: Any, schema: dict[str, Any]) -> Any:
    assert refusal(schema) is None
    narrow(schema)
    return compiled(compiler, "json", schema)


@pytest.mark.parametrize("form", CHECKS)
def test_formats_hold_in_random_texts(form: str) -> None:
    rng = random.Random(form)
    compiler, checks = byte_compiler(), checker()
    for kinds in ("string", ["null", "string"], None):
        schema = {"format": form} | ({"type": kinds} if kinds else {})
        grammar = grammar_of(compiler, schema)
        texts = [sample(grammar, rng, ends=rng.choice([0.02, 0.3])) for _ in range(40)]
        found = [json.loads(text) for text in texts if text is not None]
        assert len(found) > 20 and [one for one in found if not checks.conforms(one, form)] == []
        assert takes(grammar, "null") == isinstance(kinds, list)


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
        ("ipv6", ["::", "::1", "2001:db8::ff", "::ffff:1.2.3.4"], ["1", "1::2::3", "::ffff:1.2.3.04", "12345::", ":"]),
        ("json-pointer", ["", "/a/0", "/a~1b~0"], ["a", "/~2", "/~"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["", "01", "/a", "1#/a", "1a"]),
        ("uri", ["https://u@example.org:80/a?b#c", "s3://a/b", "urn:a:b"], ["example.org", "a b:c", "1:a", "a:%2"]),
        ("uri-reference", ["", "../a?b#c", "//example.org", "http://a/b"], ["1:a", "a b", "a#b#c"]),
        ("uri-template", ["http://a/{x}{?y,z*}{+p.q:3}", "", "%20"], ["{", "{}", "{x", "a b", "{x:0}", "'", "%2"]),
        ("duration", ["P1Y2M3D", "PT5H", "P4W"], ["P", "PT", "P1Y2D", "1D", "P1H", "P1W2D"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "g"]),
        ("iri", ["https://例え.jp/ü?ß"], ["例:a"]),
    ],
)
def test_formats_by_example(form: str, right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(byte_compiler(), {"type": "string", "format": form})
    for text in right:
        assert takes(grammar, json.dumps(text, ensure_ascii=False)), text
    for text in wrong:
        assert not takes(grammar, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize("form", ["json-pointer", "relative-json-pointer", "email"])
def test_formats_are_json(form: str) -> None:
    grammar = grammar_of(byte_compiler(), {"type": "string", "format": form})
    for inner in ('/"', "/\\", "/\x01", "/\n", '0/"', '"a"@b', r"\"\q\"@b"):
        assert not takes(grammar, f'"{inner}"'), inner


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "format": "date", "pattern": "^2"}, "'pattern' beside the format 'date'"),
        ({"format": "uuid", "pattern": "^2"}, "'pattern' beside the format 'uuid'"),
        ({"type": ["string", "null"], "format": "regex"}, "the format 'regex' cannot be held"),
        (
            {"type": "string", "format": "date", "maxLength": 3},
            "maxLength 3 beside the format 'date', whose texts have 10",
        ),
        (
            {"type": "string", "format": "uri", "maxLength": 2083},
            "maxLength 2083 beside the format 'uri', whose texts have",
        ),
        ({"format": "uuid", "minLength": 37}, "minLength 37 beside the format 'uuid', whose texts have 36 to 36"),
        ({"format": "time", "minLength": "1"}, "minLength 1 beside the format 'time'"),
    ],
)
def test_refused(schema: dict[str, Any], says: str) -> None:
    assert says in (refusal(schema) or "")


@pytest.mark.parametrize("form", PATTERNS)
def test_lengths_that_all_texts_of_a_format_have_are_held(form: str) -> None:
    python = re.sub(r"\\u\{(\w+)\}", lambda code: chr(int(code[1], 16)), PATTERNS[form])
    least, most = re._parser.parse(python).getwidth()  # pyright: ignore
    schema: dict[str, Any] = {"type": "string", "format": form, "minLength": least}
    if most < 1000:
        schema["maxLength"] = most
        assert refusal({**schema, "maxLength": most - 1}) is not None
    assert refusal({**schema, "minLength": least + 1}) is not None
    narrow(schema)
    assert schema.keys() == {"type", "pattern"}


@pytest.mark.parametrize(
    ("schema", "narrowed"),
    [
        # Formats that JSON Schema does not define are notes, and so is any beside a type that is not of strings.
        ({"type": "string", "format": "password", "minLength": 8}, {"type": "string", "minLength": 8}),
        ({"type": "string", "format": "phone", "pattern": "^[0-9]$"}, {"type": "string", "pattern": "[0-9]"}),
        ({"type": "integer", "format": "int64"}, {"type": "integer"}),
        ({"type": "integer", "format": "date"}, {"type": "integer"}),
        ({"type": "integer", "format": "regex"}, {"type": "integer"}),
    ],
)
def test_notes(schema: dict[str, Any], narrowed: dict[str, Any]) -> None:
    assert refusal(schema) is None
    narrow(schema)
    assert schema == narrowed
