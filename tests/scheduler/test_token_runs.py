"""Steps that return several tokens for a request: a request takes those up to its end."""

from __future__ import annotations

import pytest
from invariants import check_scheduler
from scheduling import EOS, add, make_scheduler, output_of, request, step

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import Request
from phonograph.scheduling.scheduler import Scheduler


def entries(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_ids=[token_id], logprobs=[-1.0], ranks=[1]) for token_id in token_ids]


def take(scheduler: Scheduler, *token_ids: int) -> list[Request]:
    """Run a step whose first request gets these tokens, with log-probabilities."""
    batch = scheduler.schedule()
    output = output_of(batch)
    output.token_ids[0] = [*token_ids]
    output.logprobs[batch.slots[0]] = entries(*token_ids)
    news = scheduler.update(batch, output)
    check_scheduler(scheduler)
    return news


@pytest.mark.parametrize(
    ("params", "kept", "reason", "stop_reason"),
    [
        ({}, [7, 8, EOS], "stop", None),
        ({"ignore_eos": True}, [7, 8, EOS, 9, EOS, 3], None, None),
        ({"stop_token_ids": (8,)}, [7, 8], "stop", 8),
        ({"stop_token_ids": (9, EOS)}, [7, 8, EOS], "stop", EOS),
        ({"min_tokens": 4}, [7, 8, EOS], "stop", None),
        ({"min_tokens": 5}, [7, 8, EOS, 9, EOS], "stop", None),
        ({"min_tokens": 6}, [7, 8, EOS, 9, EOS], "stop", None),
        ({"min_tokens": 7}, [7, 8, EOS, 9, EOS, 3], None, None),
        ({"max_tokens": 3}, [7, 8], "length", None),
        ({"max_tokens": 4}, [7, 8, EOS], "stop", None),
        ({"max_tokens": 6, "ignore_eos": True}, [7, 8, EOS, 9, EOS], "length", None),
        ({"max_tokens": 7, "ignore_eos": True}, [7, 8, EOS, 9, EOS, 3], "length", None),
    ],
)
def test_a_run_is_cut_at_the_first_end(
    params: dict[str, object], kept: list[int], reason: str | None, stop_reason: int | None
) -> None:
    """One token came with the prompt, and six come in one step."""
    scheduler = make_scheduler()
    add(scheduler, one := request("a", logprobs=0, **params), other := request("b"))
    assert take(scheduler, 5) == [one, other]
    assert take(scheduler, 7, 8, EOS, 9, EOS, 3) == [one, other]
    assert one.output_token_ids == [5, *kept] and one.logprobs == entries(5, *kept)
    assert (one.finish_reason, one.stop_reason) == (reason, stop_reason)
    assert other.output_token_ids == [7, 7], "the other request has its own tokens"


def test_a_run_is_cut_at_the_end_of_the_context() -> None:
    scheduler = make_scheduler(max_model_len=9)
    add(scheduler, one := request("a", 5, logprobs=0))
    take(scheduler, 1)
    take(scheduler, 2, 3, 4, 5, 6, 7)
    assert one.output_token_ids == [1, 2, 3, 4] and one.finish_reason == "length"
    assert one.logprobs == entries(1, 2, 3, 4) and scheduler.stats.blocks_used == 0


def test_a_run_for_a_request_that_has_ended_is_dropped() -> None:
    scheduler = make_scheduler()
    add(scheduler, one := request("a"), other := request("b"))
    step(scheduler)
    batch = scheduler.schedule()
    scheduler.abort("a")
    output = output_of(batch)
    output.token_ids[0] = [1, 2, 3]
    assert scheduler.update(batch, output) == [other]
    assert one.output_token_ids == [7] and one.finish_reason == "abort"
