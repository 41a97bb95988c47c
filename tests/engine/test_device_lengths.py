"""Lengths, parameters and draw keys live in a GPU's slots: the tokens are those of each request alone on the host."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import request

from phonograph.core.request import Request
from phonograph.graphs.modes import GraphMode

pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from table_engine import MakeEngine, engine_maker, free, ruled, wanted

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2, "top_k": 40},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 6},
]
"""The last two are sampled by the host, all their life and for six tokens."""


@pytest.fixture(scope="module")
def make() -> MakeEngine:
    return engine_maker()


def requests(count: int) -> list[Request]:
    made: list[Request] = []
    for index in range(count):
        prompt, params = [7 * index % 90 + 1] * (1 + 5 * index % 23), KINDS[index % len(KINDS)]
        made.append(request(f"{index}", prompt, seed=index, max_tokens=6 + 4 * index % 17, **params))
    return made


@pytest.mark.parametrize(("mode", "num_blocks"), [(GraphMode.NONE, 11), (GraphMode.FULL, 11), (GraphMode.FULL, 64)])
def test_tokens_are_those_of_each_request_alone(mode: GraphMode, num_blocks: int, make: MakeEngine) -> None:
    """Slots are used again with other parameters, and with few blocks requests are preempted and loaded again."""
    engine = make(mode, num_blocks=num_blocks)
    several = requests(2 * len(KINDS))
    engine.run(*several)
    assert [one.output_token_ids for one in several] == [wanted(engine.model, one) for one in several]
    assert bool(engine.core.scheduler.stats.num_preemptions) == (num_blocks == 11)


def test_rows_that_are_masked_behind_a_step_keep_their_lengths(make: MakeEngine) -> None:
    engine = make()
    several = [ruled("a", 9), free("b", temperature=1.0), ruled("c", 4, temperature=1.0), free("d", logprobs=0)]
    engine.run(*several)
    assert [one.output_token_ids for one in several] == [wanted(engine.model, one) for one in several]
