"""What schemas are refused or narrowed for, keyword by keyword."""

from __future__ import annotations

import calendar
import re
from typing import Any

import pytest

from phonograph.engine.grammars.schema import narrow, refusal


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf of several schemas"),
        ({"type": "string", "format": "date", "maxLength": 3}, "format and a length exclude each other"),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "'not'"),
        ({"definitions": {"a": {"uniqueItems": True}}}, "uniqueItems"),
    ],
)
def test_refused(schema: dict[str, Any], says: str) -> None:
    assert says in (refusal(schema) or "")


def test_a_whole_number_with_a_point_is_an_integer() -> None:
    assert refusal({"type": "integer", "const": 3.0}) is None


@pytest.mark.parametrize(
    ("schema", "narrowed"),
    [
        ({"type": "integer", "enum": [1, "a", 2.5, True]}, {"enum": [1]}),
        ({"type": ["string", "null"], "const": None}, {"const": None}),
        ({"pattern": "a", "minimum": 1}, {"pattern": "a", "minimum": 1, "type": ["number", "string"]}),
        ({"type": "string", "pattern": "a", "format": "date"}, None),
    ],
)
def test_narrowed(schema: dict[str, Any], narrowed: dict[str, Any] | None) -> None:
    expected = schema.copy() if narrowed is None else narrowed
    narrow(schema)
    assert schema == expected


def test_dates_and_addresses_exactly() -> None:
    """A 29th of February would need the year, so no year has one."""
    date, ipv4 = ({"type": "string", "format": form} for form in ("date", "ipv4"))
    narrow(date), narrow(ipv4)
    for month in range(14):
        for day in range(33):
            there = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(2023, month)[1]
            assert bool(re.search(date["pattern"], f"2024-{month:02}-{day:02}")) == there, (month, day)
    for byte in range(400):
        assert bool(re.search(ipv4["pattern"], f"1.2.3.{byte}")) == (byte < 256), byte
        assert bool(re.search(ipv4["pattern"], f"{byte}.2.3.4")) == (byte < 256), byte
