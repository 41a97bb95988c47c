"""Proposed."""

from __future__ import annotations

import pytest
from scheduling import add, make_scheduler, output_of, request, step

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import RequestState
from phonograph.errors import RequestError


def test_a_prompt_that_fills_all_blocks_and_one_more_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=2)
    with pytest.raises(RequestError, match="prompt length=9.*KV cache.*holds 8"):
        scheduler.add(request("a", 9))


def test_a_resumed_request_whose_prompt_logprobs_are_complete_finds_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, a := request("a", 8, max_tokens=17), b := request("b", 8, max_tokens=17, prompt_logprobs=0))
    entry = TokenLogprobs(token_ids=[1], logprobs=[-1.0], ranks=[1])
    while b.state is not RequestState.PREEMPTED:
        batch = scheduler.schedule()
        output = output_of(batch)
        if not b.prompt_logprobs:
            output.prompt_logprobs[b.slot] = [entry] * 7
        scheduler.update(batch, output)
    scheduler.abort(a.request_id)
    assert step(scheduler).new[0].num_computed == 16 and b.prompt_logprobs == [entry] * 7
