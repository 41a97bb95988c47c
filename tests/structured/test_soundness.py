"""Texts that grammars let through are valid: random schemas against jsonschema, patterns and formats against others."""

from __future__ import annotations

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

from phonograph.errors import RequestError
from phonograph.evaluation.structured.judge import Judge
from phonograph.evaluation.structured.measure import keywords_in

SCHEMAS = 300
"""Random schemas of each test; 60,000 by hand."""
FORMATS = checker()
TEXTS = [json.dumps(value, ensure_ascii=False) for value in VALUES]


def check(schema: Any, compiler: Any, seed: int, counts: Counter[str], **how: Any) -> None:
    """Compiles a schema, and judges the values that its grammar takes and texts drawn from it."""
    counts["schemas"] += 1
    try:
        grammar = compiled(compiler, json=deepcopy(schema), **how)
    except RequestError:
        return
    without = keywords_in(grammar.warnings)
    assert without <= {"oneOf"} or how["strictness"] == "relaxed", (json.dumps(schema), grammar.warnings)
    walks = [walk(grammar, np.random.default_rng((seed, turn)), 150) for turn in range(4)]
    taken = [text.encode() for text in TEXTS if takes(grammar, text)]
    counts.update(accepted=1, walks=len(walks), ended=sum(one.ended for one in walks), taken=len(taken))
    judge = Judge(schema, without, FORMATS)
    for text in {*taken, *(one.text for one in walks if one.ended)}:
        try:
            fault = judge.fault(text)
        except (_WrappedReferencingError, RecursionError):  # a reference that leads nowhere, or back to itself
            counts["unjudged"] += 1
            continue
        assert fault is None, f"{json.dumps(schema)}: {text.decode()} {fault} {grammar.warnings}"


@pytest.mark.parametrize("strictness", ["strict", "relaxed"])
def test_no_grammar_is_wider_than_its_schema(strictness: str) -> None:
    compiler, counts = byte_compiler(), Counter[str]()
    for seed in range(SCHEMAS):
        rng = random.Random(f"{strictness} {seed}")
        how = {"strictness": strictness, "disable_additional_properties": rng.random() < 0.5}
        schema = random_root(rng, list(CHECKS))
        check(schema, compiler, seed, counts, disable_any_whitespace=rng.random() < 0.8, **how)
    compiler.close()
    assert counts["accepted"] > 0.5 * SCHEMAS and counts["unjudged"] < 0.1 * SCHEMAS
    assert counts["ended"] + counts["taken"] > 4 * counts["accepted"]
