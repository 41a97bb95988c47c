"""The measurement of structured output over real schemas finds faults that are planted. It downloads nothing here."""

import json
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from checks.structured.judge import Judge, ecma_pattern
from checks.structured.measure import SchemaMeasurement, judged, keywords_in
from checks.structured.summary import bars, summarize
from checks.structured.walk import Walker
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary

EOS = 256
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset({EOS}), (EOS,), 257)
TOOL = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 14}, "maxItems": 3},
    },
    "required": ["city", "unit"],
}
OVERLAP = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}
NEVER_UNIQUE = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3, "maxItems": 4}
TWO_UNIQUE = {"type": "object", "properties": {name: NEVER_UNIQUE for name in "ab"}}


@pytest.fixture(scope="module")
def measurement() -> Iterator[SchemaMeasurement]:
    found = SchemaMeasurement(BYTES, texts=20, max_tokens=300, seed=7)
    yield found
    found.close()


def test_texts_of_a_schema_that_is_held_end_and_are_valid(measurement: SchemaMeasurement) -> None:
    record = measurement.measure(0, TOOL)
    assert record["strict"]["accepted"] and record["relaxed"]["accepted"]
    assert record["walks"]["ended"] >= 15 and record["walks"]["invalid"] == [] and record["walks"]["problems"] == []
    assert measurement.fill_us


def test_a_planted_fault_is_found_in_each_text_that_has_it() -> None:
    compiler = GrammarCompiler(lambda: BYTES, BYTES.eos)
    schema = {"type": "integer", "minimum": 10, "maximum": 99}
    grammar = compiler.request(StructuredOutputs(json=schema)).result()
    compiler.close()
    walker, planted = Walker(BYTES.tokens, BYTES.eos, BYTES.size), {**schema, "multipleOf": 2}
    walks = [walker.walk(grammar.matcher(), np.random.default_rng((3, turn)), 300) for turn in range(40)]
    odd = [walk.text for walk in walks if walk.ended and int(walk.text) % 2]
    found = [fault for walk in walks if walk.ended for fault in judged(planted, walk.text, frozenset())]
    assert len(odd) > 5
    assert [fault["text"].encode() for fault in found] == odd
    assert all(fault["keyword"] == "multipleOf" and not fault["explained"] for fault in found)


def test_an_overlapping_one_of_is_distinguished_from_other_faults(measurement: SchemaMeasurement) -> None:
    record = measurement.measure(1, OVERLAP)
    assert record["strict"]["accepted"] and keywords_in(record["strict"]["warnings"]) == {"oneOf"}
    invalid = record["walks"]["invalid"]
    assert invalid and all(fault["one_of_overlap"] and 0 <= int(fault["text"]) <= 9 for fault in invalid)
    assert not judged(OVERLAP, b'"text"', frozenset({"oneOf"}))[0]["one_of_overlap"]


@pytest.mark.parametrize("schema", [NEVER_UNIQUE, TWO_UNIQUE])
def test_faults_of_relaxed_texts_are_explained_by_the_warning(measurement: SchemaMeasurement, schema: object) -> None:
    record = measurement.measure(2, schema)
    assert not record["strict"]["accepted"] and "uniqueItems" in record["strict"]["refusal"]
    assert record["relaxed"]["accepted"] and keywords_in(record["relaxed"]["warnings"]) == {"uniqueItems"}
    assert record["walks"]["invalid"] and all(fault["explained"] for fault in record["walks"]["invalid"])


def test_the_bars_fail_by_one_invalid_text(measurement: SchemaMeasurement) -> None:
    records = [measurement.measure(number, TOOL) for number in range(2)]
    records[1]["walks"]["invalid"] = judged(TOOL, b"{}", frozenset())
    for size, passes in ((1, True), (2, False)):
        summary = summarize(records[:size], [10.0])
        invalid = [passed for text, passed in bars({"bytes": summary}) if "invalid" in text]
        assert invalid == [passes]


def test_the_judge_is_exact_where_jsonschema_is_not() -> None:
    assert Judge({"multipleOf": 0.1}).fault(b"0.3") is None
    assert Judge({"multipleOf": 0.1}).fault(b"0.30000000000000000001") is not None
    assert Judge({"type": "integer"}).fault(b"1.0") is None
    assert Judge({"type": "integer"}).fault(b"1.00000000000000000001") is not None
    rng = np.random.default_rng()
    for _ in range(50):
        unit, value = int(rng.integers(1, 400)), int(rng.integers(0, 10**6))
        valid = (Fraction(value, 1000) / Fraction(unit, 100)).denominator == 1
        fault = Judge({"multipleOf": unit / 100}).fault(f"{value / 1000:.3f}".encode())
        assert (fault is None) == valid, (unit, value)
    closed = {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
    for value, keyword in (({"xa": 1}, None), ({"xa": ""}, "type"), ({"y": 1}, "additionalProperties")):
        fault = Judge(closed).fault(json.dumps(value).encode())
        assert (fault and fault.keyword) == keyword
    assert Judge({}).fault(b"NaN") is not None and Judge({}).fault(b"\xff") is not None


def test_patterns_are_those_of_ecmascript() -> None:
    for pattern, text, found in (
        ("^a$", "a\n", False),
        ("^[$]$", "$", True),
        (r"^\$$", "$", True),
        (r"^\d$", "٣", False),
        (r"^[\d.]$", "٣", False),
        (r"^\w$", "é", False),
        (r"^\p{L}$", "é", True),
        (r"^[\]$]+$", "]$", True),
    ):
        assert bool(ecma_pattern(pattern).search(text)) == found, pattern
