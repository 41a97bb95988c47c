"""The parameter that leaves a request without a next token, by name; and work that fails for one row of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from token_grammars import END, VOCAB, InTurn

from phonograph.core.batch import SlotFailure
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.sampling.dead_ends import dead_end
from phonograph.sampling.failures import SlotFailures

RULED = {"structured_outputs": StructuredOutputs(regex="ab")}
BANNED = {"logit_bias": {token_id: -math.inf for token_id in range(VOCAB)}}


def request(output: list[int], choices: list[list[int]] | None = None, **params: Any) -> Request:
    made = Request(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(**params), arrival=0, eos_token_ids=(END,)
    )
    made.output_token_ids.extend(output)
    made.grammar = None if choices is None else InTurn(*choices)  # pyright: ignore[reportAttributeAccessIssue]
    return made


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (request([], [[]], **RULED), "regex='ab': no token can begin it; check for rules"),
        (request([3, 5], [[3], [4, 5], []], **RULED), "no token can follow its first 2 tokens; check"),
        (request([], stop_token_ids=range(VOCAB), min_tokens=1), "min_tokens=1: every allowed token would end"),
        (request([], min_tokens=1, logit_bias={**BANNED["logit_bias"], END: 0.0}), "logit_bias.*bans every allowed"),
        (request([], [[3]], **RULED, logit_bias={3: -math.inf}), "logit_bias.*bans every allowed token"),
        (request([], **BANNED), "logit_bias.*bans every allowed token"),
    ],
)
def test_the_cause_is_named(one: Request, says: str) -> None:
    error = dead_end(one, VOCAB)
    assert error is not None
    with pytest.raises(type(error), match=says):
        raise error


@pytest.mark.parametrize(
    "one",
    [
        request([]),
        request([3], stop_token_ids=range(VOCAB), min_tokens=1),  # as many as there must be: it may end
        request([], min_tokens=1, logit_bias={**BANNED["logit_bias"], 3: 0.0}),
        request([3], [[3], [4, 5]], **RULED, logit_bias={4: -math.inf, 5: -100.0}),
        request([3, END], [[3]], **RULED),  # it has ended, and its grammar says no more
        request([], min_tokens=5),
        request([], logit_bias={**BANNED["logit_bias"], 7: 0.0}),
    ],
)
def test_a_token_is_left(one: Request) -> None:
    assert dead_end(one, VOCAB) is None


@pytest.mark.parametrize("bad", [None, 0, 2])
@pytest.mark.parametrize("rows", [[2], [0], [0, 1, 2]])
def test_work_that_raises_for_several_rows_is_repeated_row_by_row(rows: list[int], bad: int | None) -> None:
    calls: list[list[int]] = []

    def work(some: Sequence[int]) -> None:
        calls.append(list(some))
        if bad in some:
            raise ValueError("a test")

    failures = SlotFailures()
    failures.run_rows(rows, [7, 8, 9], "a part", work)
    alone = [[row] for row in rows]
    assert calls == ([rows] if bad not in rows or len(rows) == 1 else [rows, *alone])
    failed = [] if bad is None or bad not in rows else [[7, 8, 9][bad]]
    assert failures.by_slot == {slot: SlotFailure("a part", "ValueError: a test") for slot in failed}
