"""Tokens that samples of one prompt compute: all of it once, then the last token of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scheduling import add, full_group, make_scheduler, output_of, request, sliding_group, step

from phonograph.core.batch import ScheduledBatch
from phonograph.core.request import Request
from phonograph.scheduling import prompt_tails
from phonograph.scheduling.scheduler import Scheduler

PROMPT = list(range(11))
"""Two blocks of four tokens, a tail of two and the last token."""


@pytest.fixture(autouse=True)
def waits_for_short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 4)


def samples(count: int, prompt: list[int] | None = None, *, salt: str | None = None, **params: Any) -> list[Request]:
    made = [request(chr(97 + index), prompt or PROMPT, arrival=index, **params) for index in range(count)]
    for index, one in enumerate(made):
        one.sample_index, one.cache_salt = index, salt
    return made


def prefills(batch: ScheduledBatch) -> list[int]:
    return batch.query_lens[batch.num_decodes :]


def make(**changes: Any) -> Scheduler:
    return make_scheduler(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **changes})


@pytest.mark.parametrize(
    ("groups", "ahead"),
    [([full_group()], 0), ([full_group()], 3), ([sliding_group(9), full_group(), sliding_group(2)], 0)],
)
def test_samples_copy_the_tail_of_the_first(groups: Any, ahead: int) -> None:
    """With blocks for keys that a draft model writes behind the step, or without."""
    scheduler = make(groups=groups, lookahead_tokens=ahead)
    requests = samples(5)
    add(scheduler, *requests)
    first = step(scheduler)
    assert (prefills(first), first.copies) == ([11], [])
    second = step(scheduler)
    assert prefills(second) == [1] * 4 and second.context_lens[1:] == [10] * 4
    assert len(second.copies) == 4 * len(groups)
    assert [one.num_cached_tokens for one in requests] == [0, 10, 10, 10, 10]


def test_a_chunk_that_ends_the_budget_makes_nothing_wait() -> None:
    scheduler = make(max_num_batched_tokens=11)
    add(scheduler, *samples(2))
    assert [prefills(step(scheduler)) for _ in range(2)] == [[11], [1]]


def test_few_tokens_run_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 9)
    scheduler = make()
    add(scheduler, *samples(5))
    # Four samples would save two tokens each.
    batch = step(scheduler)
    assert prefills(batch) == [11, 3, 3, 3, 3] and not batch.copies


def test_a_prompt_behind_samples_keeps_its_place() -> None:
    scheduler = make()
    add(scheduler, *samples(3), request("z", 5, arrival=9))
    assert [prefills(step(scheduler)) for _ in range(3)] == [[11], [1, 1, 5], []]


def abort(scheduler: Scheduler, first: Request) -> None:
    assert scheduler.abort(first.request_id)


def fail(scheduler: Scheduler, first: Request) -> None:
    assert scheduler.fail(first.request_id)


def preempt(scheduler: Scheduler, first: Request) -> None:
    scheduler.preempt_all()


def reset(scheduler: Scheduler, first: Request) -> None:
    scheduler.reset_prefix_cache()


@pytest.mark.parametrize(
    ("ends", "lens"), [(abort, [3, 3, 3]), (fail, [11, 3, 3]), (preempt, [4, 3, 3, 3]), (reset, [11, 3, 3])]
)
def test_the_others_go_on_at_once(ends: Callable[[Scheduler, Request], None], lens: list[int]) -> None:
    """They wait for one step, whatever becomes of the first, and compute what is lost."""
    scheduler = make()
    requests = samples(4)
    add(scheduler, *requests)
    step(scheduler)
    ends(scheduler, requests[0])
    batch = step(scheduler)
    # They waited for this tail once already.
    assert prefills(batch) == lens and not batch.copies
    for _ in range(8):
        step(scheduler)
    assert all(one.output_token_ids for one in requests[1:])


@pytest.mark.parametrize(
    ("settings", "params", "salt"),
    [
        ({"enable_prefix_caching": False}, {}, None),
        ({"groups": [full_group(4), full_group(8)]}, {}, None),
        ({}, {"prompt_logprobs": 0}, None),
        ({}, {"max_tokens": 1}, None),
        ({}, {}, "another"),
    ],
    ids=["no prefix cache", "blocks of two sizes", "prompt logprobs", "one token", "another salt"],
)
def test_what_is_not_copied_does_not_wait(settings: dict[str, Any], params: dict[str, Any], salt: str | None) -> None:
    scheduler = make(**settings)
    requests = samples(4, **params)
    for one in requests[1:]:
        one.cache_salt = salt
    add(scheduler, *requests[:2])
    batch = step(scheduler)
    assert len(prefills(batch)) == 2 and not batch.copies
    add(scheduler, *requests[2:])
    batch = step(scheduler)
    assert len(prefills(batch)) == 2
    assert bool(batch.copies) == (salt is not None)


def test_a_tail_of_nothing_is_not_copied() -> None:
    scheduler = make()
    add(scheduler, *samples(3, list(range(9))))
    batch = step(scheduler)
    assert prefills(batch) == [1, 1, 9] and not batch.copies


def test_blocks_are_copied_while_their_sequence_runs() -> None:
    """The first has the tail until it ends; then a later one that copied it has."""
    scheduler = make()
    first, second, third, fourth = samples(1, max_tokens=3) + samples(4)[1:]
    add(scheduler, first)
    step(scheduler)
    add(scheduler, second)
    batch = step(scheduler)
    ((source, target),) = batch.copies
    step(scheduler)
    assert first.finished and source != target
    add(scheduler, third)
    ((again, _),) = step(scheduler).copies
    assert again == target
    while scheduler.has_unfinished:
        step(scheduler)
    add(scheduler, fourth)
    batch = scheduler.schedule()
    assert not batch.copies and prefills(batch) == [3]
    scheduler.update(batch, output_of(batch))
