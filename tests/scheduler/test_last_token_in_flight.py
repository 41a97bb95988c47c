"""A request whose last token is being computed has given its slot and blocks to the next step, and still gets it."""

from __future__ import annotations

from collections import deque

import pytest
from invariants import check_scheduler
from scheduling import EOS, add, make_scheduler, output_of, request

from phonograph.core.batch import ScheduledBatch, SlotFailure, StepOutput, TokenLogprobs
from phonograph.core.request import Request, RequestState
from phonograph.scheduling.scheduler import Scheduler


def take(scheduler: Scheduler, batch: ScheduledBatch, token_id: int = 7) -> list[Request]:
    news = scheduler.update(batch, output_of(batch, token_id))
    check_scheduler(scheduler)
    return news


def test_slot_and_blocks_are_the_next_requests() -> None:
    # One slot, and blocks for one prompt.
    scheduler = make_scheduler(max_num_seqs=1, num_blocks=2)
    add(scheduler, a := request("a", 8, max_tokens=1), b := request("b", 8, max_tokens=1))
    first = scheduler.schedule()
    assert a.state is RequestState.RUNNING
    second = scheduler.schedule()
    check_scheduler(scheduler)
    assert (a.state, a.slot, b.state) == (RequestState.ENDING, -1, RequestState.RUNNING)
    assert (first.slots, second.slots, second.freed) == ([0], [0], [0])
    assert sorted(first.appends[0].block_ids) == sorted(second.appends[0].block_ids) == [0, 1]
    assert (scheduler.stats.num_running, scheduler.stats.num_waiting) == (2, 0)
    # Both steps have slot 0; each token reaches the request of its own step.
    assert take(scheduler, first, 8) == [a] and take(scheduler, second, 9) == [b]
    assert (a.output_token_ids, a.finish_reason) == ([8], "length")
    assert (b.output_token_ids, b.finish_reason) == ([9], "length")
    assert not scheduler.has_unfinished and scheduler.stats.blocks_used == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_short_requests_beside_a_long_one_cost_a_step_each(lookahead: int) -> None:
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=128, max_model_len=256)
    add(scheduler, long := request("long", 10, max_tokens=100))
    add(scheduler, *(request(f"s{number}", [number] * 5, max_tokens=1) for number in range(100)))
    in_flight: deque[ScheduledBatch] = deque()
    num_steps = num_mixed = 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        check_scheduler(scheduler)
        if batch.slots:
            in_flight.append(batch)
            num_steps += 1
            num_mixed += 0 < batch.num_decodes < batch.num_reqs
        if len(in_flight) > lookahead or not batch.slots:
            take(scheduler, in_flight.popleft())
    assert long.output_token_ids == [7] * 100
    assert (num_steps, num_mixed) == (100, 99), "the first step has two prefills"


def test_decodes_grow_into_its_blocks_instead_of_preempting() -> None:
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=6)
    add(scheduler, a := request("a", 8), b := request("b", 7, max_tokens=5))
    for _ in range(4):
        take(scheduler, scheduler.schedule())
    last = scheduler.schedule()
    assert last.slots == [a.slot, b.slot] and scheduler.stats.blocks_used == 6
    # a needs its fourth block.
    batch = scheduler.schedule()
    check_scheduler(scheduler)
    assert b.state is RequestState.ENDING and scheduler.stats.num_preemptions == 0
    assert (batch.slots, batch.freed, len(batch.appends)) == ([a.slot], [last.slots[1]], 1)
    assert take(scheduler, last) == [a, b] and b.finished


@pytest.mark.parametrize("how", ["eos", "failure", "abort", "stop string"])
def test_its_last_token_is_dropped_when_an_earlier_one_ends_it(how: str) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, a := request("a", 5, max_tokens=3), other := request("other", 5))
    take(scheduler, scheduler.schedule())
    second, last = scheduler.schedule(), scheduler.schedule()
    after = scheduler.schedule()
    assert a.state is RequestState.ENDING and after.slots == [other.slot]
    if how == "eos":
        scheduler.update(second, StepOutput(slots=second.slots, token_ids=[[EOS], [7]]))
        expected = [7, EOS], "stop", None
    elif how == "failure":
        failure = SlotFailure("sampling", "a test")
        scheduler.update(
            second, StepOutput(slots=second.slots, token_ids=[[0], [7]], failures={second.slots[0]: failure})
        )
        assert a.failure == failure
        expected = [7], "abort", None
    else:
        take(scheduler, second)
        assert scheduler.finish("a", "abort") if how == "abort" else scheduler.finish("a", "stop", "END")
        expected = ([7, 7], "abort", None) if how == "abort" else ([7, 7], "stop", "END")
    check_scheduler(scheduler)
    assert not scheduler.abort("a")
    assert take(scheduler, last) == [other] and take(scheduler, after) == [other]
    assert (a.output_token_ids, a.finish_reason, a.stop_reason) == expected
    # Its slot came back once.
    add(scheduler, *(request(name) for name in "bc"))
    assert len(scheduler.schedule().slots) == 2
    check_scheduler(scheduler)


def test_an_id_may_be_used_again_while_the_token_is_in_flight() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, old := request("a", max_tokens=1))
    first = scheduler.schedule()
    assert scheduler.schedule() == ScheduledBatch() and old.state is RequestState.ENDING
    scheduler.abort("a")
    add(scheduler, again := request("a", max_tokens=1))
    second = scheduler.schedule()
    assert second.freed == [0] and second.slots == [0]
    assert take(scheduler, first) == [] and take(scheduler, second, 8) == [again]
    assert (old.output_token_ids, again.output_token_ids) == ([], [8])


def test_all_its_full_blocks_are_found_afterwards() -> None:
    scheduler = make_scheduler()
    add(scheduler, request("a", range(6), max_tokens=7))
    in_flight: deque[ScheduledBatch] = deque()
    while (batch := scheduler.schedule()).slots:
        in_flight.append(batch)
        if len(in_flight) > 1:
            take(scheduler, in_flight.popleft())
    assert scheduler.stats.blocks_used == 0, "given back before the last token came"
    add(scheduler, b := request("b", [*range(6), *[7] * 7, 1, 2]))
    scheduler.schedule()
    assert b.num_cached_tokens == 12


def test_a_reset_of_the_prefix_cache_between() -> None:
    for schedules in (1, 2):
        scheduler = make_scheduler()
        add(scheduler, request("a", range(12), max_tokens=1))
        first, *_ = [scheduler.schedule() for _ in range(schedules)]
        scheduler.reset_prefix_cache()
        add(scheduler, b := request("b", range(12), max_tokens=1))
        second = scheduler.schedule()
        assert b.num_cached_tokens == 0
        take(scheduler, first)
        take(scheduler, second)
        assert not scheduler.has_unfinished and scheduler.stats.blocks_used == 0


def test_logprobs_of_two_steps_with_one_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, *(ab := [request(name, 3, max_tokens=1, logprobs=0, prompt_logprobs=0) for name in "ab"]))
    entries = {name: TokenLogprobs(token_ids=[ord(name)], logprobs=[-1.0], ranks=[1]) for name in "abAB"}
    batches = [scheduler.schedule(), scheduler.schedule()]
    for name, batch in zip("ab", batches, strict=True):
        output = output_of(batch)
        output.logprobs[0] = [entries[name]]
        output.prompt_logprobs[0] = [entries[name.upper()]] * 2
        scheduler.update(batch, output)
    for name, one in zip("ab", ab, strict=True):
        assert one.logprobs == [entries[name]] and one.prompt_logprobs == [entries[name.upper()]] * 2
