"""The search for structured outputs that cost without limit: its cases, its child process and its smaller cases."""

from __future__ import annotations

import json
import random

import pytest
from byte_grammars import byte_vocabulary

from checks.structured import fuzz
from checks.structured.fuzz import Trial, problem, shrunk
from checks.structured.fuzz_cases import random_case
from phonograph.core.structured_outputs import StructuredOutputs


def test_cases_are_valid_and_follow_from_their_seed() -> None:
    kinds = set()
    for seed in range(60):
        case = random_case(random.Random(seed))
        assert json.dumps(case) == json.dumps(random_case(random.Random(seed)))
        kinds.add(StructuredOutputs(**case).kind)
    assert kinds == {"json", "regex", "choice", "grammar"}


def test_a_case_without_end_is_ended_and_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    monkeypatch.setattr(fuzz, "TOKENS", 10**9)
    trial = Trial(byte_vocabulary())
    assert problem(trial.run({"regex": "[ab]+"}, 0)) == "time while stepping"
    assert trial.run({"regex": "("}, 0)["end"] == "refused"
    done = trial.run({"choice": ["ab"]}, 0)
    assert done["end"] == "ended" and done["tokens"] == 2 and problem(done) == ""
    trial.close()


def test_a_failing_case_is_shrunk() -> None:
    case = {"json": {"type": "object", "properties": {"a": {"pattern": "xyz"}, "b": {"maxLength": 5000}}}}
    smallest = shrunk(case, lambda one: "xyz" in json.dumps(one), seconds=5)
    assert len(json.dumps(smallest)) < len(json.dumps(case)) / 2 and "xyz" in json.dumps(smallest)
    assert problem({"end": "time", "compiled": True}) == "time while stepping"
    assert problem({"end": "tokens", "compile_ms": 2001}) == "compile"
