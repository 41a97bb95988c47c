"""A request for which work failed: it ends, and the blocks that it computed cannot be found any more."""

from __future__ import annotations

import pytest
from invariants import check_scheduler
from scheduling import add, make_scheduler, output_of, request, step

from phonograph.core.batch import ScheduledBatch, SlotFailure, StepOutput
from phonograph.core.request import Request, RequestState
from phonograph.scheduling.scheduler import Scheduler

FAILURE = SlotFailure("sampling", "a test")


def failed(batch: ScheduledBatch, *slots: int) -> StepOutput:
    output = output_of(batch)
    output.failures = dict.fromkeys(slots, FAILURE)
    return output


def num_found(scheduler: Scheduler, tokens: list[int]) -> int:
    """Tokens that a new request finds in the prefix cache."""
    add(scheduler, one := request("z", tokens, max_tokens=1))
    while not one.finished:
        step(scheduler)
    return one.num_cached_tokens


def test_blocks_of_a_failed_prefill_are_not_found_and_those_found_before_stay() -> None:
    scheduler, shared = make_scheduler(), list(range(9))
    add(scheduler, request("a", shared, max_tokens=1))
    step(scheduler)
    whole = [*shared, *range(20, 27)]
    add(scheduler, bad := request("b", whole), other := request("c"))
    batch = scheduler.schedule()
    assert bad.num_cached_tokens == 8
    assert scheduler.update(batch, failed(batch, bad.slot)) == [bad, other]
    check_scheduler(scheduler)
    assert bad.failure == FAILURE and bad.output_token_ids == [] and len(other.output_token_ids) == 1
    scheduler.abort("c")
    assert scheduler.stats.blocks_used == 0
    assert num_found(scheduler, whole) == 8


def test_blocks_of_a_failed_decode_are_not_found() -> None:
    scheduler, prompt = make_scheduler(), list(range(6))
    add(scheduler, bad := request("b", prompt))
    for _ in range(9):
        step(scheduler)
    batch = scheduler.schedule()
    scheduler.update(batch, failed(batch, bad.slot))
    check_scheduler(scheduler)
    assert bad.finished and scheduler.stats.blocks_used == 0
    assert num_found(scheduler, [*prompt, *bad.output_token_ids, 1, 2]) == 0


@pytest.mark.parametrize("samples", [True, False])
def test_with_a_step_in_flight(samples: bool) -> None:
    """The failed step may have computed the last chunk of the prompt, or not."""
    scheduler = make_scheduler()
    add(scheduler, bad := request("b", range(12 if samples else 40)), other := request("c", 4))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, failed(first, bad.slot))
    check_scheduler(scheduler)
    assert bad.finished and bad.failure == FAILURE
    assert scheduler.update(second, output_of(second)) == ([other] if other.slot in second.slots else [])
    check_scheduler(scheduler)
    scheduler.abort("c")
    assert num_found(scheduler, [*range(12), 1, 2]) == 0


def test_blocks_given_back_before_the_last_token_failed() -> None:
    scheduler, prompt = make_scheduler(), list(range(10))
    add(scheduler, bad := request("b", prompt, max_tokens=1))
    batch = scheduler.schedule()
    scheduler.schedule()
    assert bad.state is RequestState.ENDING
    scheduler.update(batch, failed(batch, batch.slots[0]))
    check_scheduler(scheduler)
    assert bad.finished and num_found(scheduler, [*prompt, 1, 2]) == 0


def test_a_failure_that_is_known_after_a_preemption() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2)
    add(scheduler, good := request("a", 8), bad := request("b", range(8), max_tokens=12))
    in_flight = [scheduler.schedule()]
    while bad.state is not RequestState.PREEMPTED:
        in_flight.append(scheduler.schedule())
        if len(in_flight) > 2:
            batch = in_flight.pop(0)
            scheduler.update(batch, output_of(batch))
    for place, batch in enumerate(in_flight):
        requests = [one for one in batch.slots if one != good.slot]
        scheduler.update(batch, failed(batch, *requests) if place == 0 else output_of(batch))
        check_scheduler(scheduler)
    assert bad.finished and bad.failure == FAILURE
    scheduler.abort("a")
    assert num_found(scheduler, [*range(8), 1, 2]) == 0


def test_a_failure_after_a_preempted_request_has_found_its_own_blocks_again() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2)
    add(scheduler, request("a", 8, max_tokens=8), bad := request("b", range(8), max_tokens=12))
    states: list[RequestState] = []
    while not states or states[-1] is not RequestState.RUNNING or RequestState.PREEMPTED not in states:
        step(scheduler)
        states.append(bad.state)
    batch = scheduler.schedule()
    scheduler.update(batch, failed(batch, bad.slot))
    assert bad.finished and not scheduler.has_unfinished
    assert num_found(scheduler, [*range(8), 1, 2]) == 0


def test_a_late_failure_does_not_end_another_request_of_the_same_id() -> None:
    scheduler = make_scheduler()
    add(scheduler, old := request("a"))
    batch = scheduler.schedule()
    scheduler.abort("a")
    add(scheduler, new := request("a"))
    assert scheduler.update(batch, failed(batch, *batch.slots)) == []
    assert (old.failure, new.failure, new.finished) == (None, None, False)
    step(scheduler)
    assert len(new.output_token_ids) == 1


def test_requests_that_share_a_failed_block_go_on() -> None:
    scheduler, prompt = make_scheduler(), list(range(8))
    add(scheduler, bad := request("b", [*prompt, 50]), other := request("c", [*prompt, 60], max_tokens=9))
    batch = scheduler.schedule()
    assert other.num_cached_tokens == 8
    scheduler.update(batch, failed(batch, bad.slot))
    while scheduler.has_unfinished:
        step(scheduler)
    assert len(other.output_token_ids) == 9 and scheduler.stats.blocks_used == 0
    assert num_found(scheduler, [*prompt, 1, 2]) == 0


def test_fail_ends_waiting_requests_too() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, *(waiting := [request(name) for name in "ab"]))
    step(scheduler)
    assert scheduler.fail("a") and scheduler.fail("b") and not scheduler.fail("b")
    check_scheduler(scheduler)
    assert all(one.finished for one in waiting) and not scheduler.has_unfinished


def test_failures_of_slots_that_have_other_requests_by_now_are_those_of_the_step() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, a := request("a", max_tokens=1), b := request("b", max_tokens=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.slots == second.slots
    ended: list[Request] = scheduler.update(first, failed(first, 0))
    assert ended == [a] and scheduler.update(second, output_of(second)) == [b]
    assert (a.failure, b.failure) == (FAILURE, None) and len(b.output_token_ids) == 1
