"""Texts that grammars let through are valid: random schemas against jsonschema, patterns and formats against others."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from byte_grammars import byte_compiler, compiled, takes, walk
from json_formats import CHECKS, checker
from jsonschema.exceptions import _WrappedReferencingError
from schemas import VALUES, random_root

from checks.structured.judge import Judge
from checks.structured.measure import keywords_in
from phonograph.errors import RequestError

SCHEMAS = 300
"""Random schemas of each test; 60,000 by hand."""
FORMATS = checker()


def texts_of(value: Any) -> list[str]:
    """Return a value as JSON in each order of its names: a grammar has that of its schema."""
    orders = itertools.permutations(value.items()) if isinstance(value, dict) else ()
    return [json.dumps(one, ensure_ascii=False) for one in (map(dict, orders) if orders else [value])]


def check(schema: Any, compiler: Any, seed: int, counts: Counter[str], **how: Any) -> None:
    """Compiles a schema, and judges the values that its grammar takes and texts drawn from it."""
    counts["schemas"] += 1
    try:
        grammar = compiled(compiler, json=deepcopy(schema), **how)
    except RequestError as error:
        assert "wrong type" not in str(error) and "could not be compiled" not in str(error), json.dumps(schema)
        return
    without = keywords_in(grammar.warnings)
    assert without <= {"oneOf"} or how["strictness"] == "relaxed", (json.dumps(schema), grammar.warnings)
    walks = [walk(grammar, np.random.default_rng((seed, turn)), 150) for turn in range(4)]
    texts = [texts_of(value) for value in VALUES]
    escaped = [text.replace('"a', r'"\u0061') for several in texts for text in several]
    taken = [text for text in itertools.chain(*texts, escaped) if takes(grammar, text)]
    counts.update(accepted=1, walks=len(walks), ended=sum(one.ended for one in walks), taken=len(taken))
    judge = Judge(schema, without, FORMATS)
    try:
        for text in {*taken, *(one.text.decode() for one in walks if one.ended)}:
            fault = judge.fault(text.encode())
            assert fault is None, f"{json.dumps(schema)}: {text} {fault} {grammar.warnings}"
        for several in texts if not (grammar.warnings or how["disable_additional_properties"]) else ():
            is_valid = judge.fault(several[0].encode()) is None
            assert is_valid <= bool({*several} & {*taken}), f"{json.dumps(schema)}: {several} is not taken"
            counts["valid"] += is_valid
    except (_WrappedReferencingError, RecursionError):  # a reference that leads nowhere, or back to itself
        counts["unjudged"] += 1


@pytest.mark.parametrize("strictness", ["strict", "relaxed"])
def test_grammars_are_as_wide_as_their_schemas(strictness: str) -> None:
    compiler, counts = byte_compiler(), Counter[str]()
    for seed in range(SCHEMAS):
        rng = random.Random(f"{strictness} {seed}")
        how = {"strictness": strictness, "disable_additional_properties": rng.random() < 0.5}
        schema = random_root(rng, [form for form in CHECKS if form != "regex"])  # which allows a part of its texts
        check(schema, compiler, seed, counts, disable_any_whitespace=rng.random() < 0.8, **how)
    compiler.close()
    assert counts["accepted"] > 0.4 * SCHEMAS and counts["unjudged"] < 0.1 * SCHEMAS and counts["valid"] > SCHEMAS
    assert counts["ended"] + counts["taken"] > 4 * counts["accepted"]


@pytest.mark.parametrize("closes", [True, False])
def test_no_spelling_of_a_listed_name_is_another_name(closes: bool) -> None:
    compiler, rng, counts = byte_compiler(), random.Random(7), Counter[bool]()
    how = {"disable_additional_properties": closes, "disable_any_whitespace": True}
    for _ in range(60):
        names = ["".join(rng.choices('abé字😀"\\/\n\t]^- u0', k=rng.randint(0, 3))) for _ in range(4)]
        others = {"additionalProperties": {"type": "boolean"}} if closes or rng.random() < 0.5 else {}
        others |= rng.choice([{}, {"patternProperties": {"^[^é]$": {"type": "integer"}}}])
        properties = {name: {"type": "integer"} for name in names[:2]}
        schema = {"type": "object", "properties": properties, **others}
        try:
            grammar, judge = compiled(compiler, json=deepcopy(schema), **how), Judge(schema)
        except RequestError as error:  # a pattern of names beside such a name is not always held
            assert "disjoint" in str(error)
            continue
        for name in (*names, *(name[:-1] for name in names), *(name + rng.choice('a"') for name in names)):
            for value in ("true", "1", "null"):
                plain = json.dumps(name, ensure_ascii=False)
                units = name.encode("utf-16-be").hex()
                escaped = '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'
                for spelled in {
                    plain,
                    escaped,
                    plain.replace("/", r"\/"),
                    json.dumps(name),
                    plain.replace("a", r"\u0061"),
                }:
                    text = f"{{{spelled}: {value}}}"
                    is_valid = judge.fault(text.encode()) is None
                    assert is_valid or not takes(grammar, text), (schema, text)
                    assert spelled != plain or takes(grammar, text) == is_valid, (schema, text)
                    counts[is_valid] += 1
    compiler.close()
    assert counts[True] > 1000 and counts[False] > 1000
