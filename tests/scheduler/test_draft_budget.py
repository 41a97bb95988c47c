"""The depth of speculation: near the best fixed one where drafts are accepted, and never much slower than none."""

from __future__ import annotations

import numpy as np
import pytest
from speculating import Accepts, Cost, Simulation, Work, adaptive, decoding, fixed, limits

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.scheduling import draft_budget
from phonograph.scheduling.draft_budget import DraftBudget
from phonograph.scheduling.draft_counter import DraftCounter

K = 4


def reads_weights(tokens: int, requests: int) -> float:
    """Return seconds of a device that reads all weights in each step, and computes in less time up to 150 tokens."""
    return 4.0 + 0.01 * tokens + 0.02 * max(0, tokens - 150)


def computes(tokens: int, requests: int) -> float:
    """Return seconds of a device whose steps last by their tokens."""
    return 0.4 + 0.6 * tokens


ACCEPTS: dict[str, Accepts] = {
    "none": lambda slot, step: 0.0,
    "few": lambda slot, step: 0.3,
    "many": lambda slot, step: 0.6,
    "all": lambda slot, step: 1.0,
    "of every second request": lambda slot, step: 0.9 if slot % 2 else 0.0,
    "for a while": lambda slot, step: 0.9 if step // 300 % 2 else 0.0,
}


@pytest.mark.parametrize("cost", [reads_weights, computes])
@pytest.mark.parametrize("kind", ACCEPTS)
@pytest.mark.parametrize(("number", "steps", "delay"), [(1, 1800, 0), (8, 1200, 1), (64, 300, 0)])
def test_speed(number: int, steps: int, delay: int, kind: str, cost: Cost) -> None:
    """Durations are measured with errors of a tenth."""
    accepts, plain = ACCEPTS[kind], number / cost(number, number)
    deep = Simulation(accepts, cost, number=number, most=K).run(fixed(K, number), steps).rate
    ours = Simulation(accepts, cost, number=number, most=K, noise=0.1, delay=delay)
    rate = ours.run(adaptive(K, number), steps).rate
    assert rate >= 0.94 * plain
    if kind != "for a while":
        assert rate >= 0.93 * deep
    if cost is reads_weights and number == 64 and kind in ("few", "of every second request"):
        assert rate > 1.05 * max(plain, deep), "fewer drafts than all, or those of some requests, gain the most"


def test_resting_costs_a_hundredth() -> None:
    """Without noise, and once the durations are known, only probes are left."""
    simulation, budget = Simulation(ACCEPTS["none"], computes, number=4, most=K), adaptive(K, 4)
    simulation.run(budget, 1000)
    rested = simulation.run(budget, 3000)
    assert rested.rate > 0.989 * 4 / computes(4, 4)
    assert 0 < sum(simulation.depths[-3000:]) < 300
    counts = dict(budget.counts.choices)
    assert counts[draft_budget.NO_DRAFTS] > 2000 and counts[draft_budget.PROBE] > 2


@pytest.mark.parametrize("number", [1, 4])
def test_short_requests_try_few_drafts(number: int) -> None:
    """Requests of 64 steps that find few drafts and accept none, at once and after others that accepted all."""
    share = [0.0]
    simulation = Simulation(lambda slot, step: share[0], computes, number=number, most=K, found=0.2)
    budget, plain = adaptive(K, number), number / computes(number, number)
    rates: list[float] = []
    for accepted in (0.0, 1.0, 0.0):
        share[0], works = accepted, list[Work]()
        for _ in range(16):
            for request in simulation.requests:
                request.request_id += "'"
            works.append(simulation.run(budget, 64))
        rates.append(sum(work.tokens for work in works) / sum(work.seconds for work in works) / plain)
    assert min(rates[0], rates[2]) > 0.97 and rates[1] > 1.03


def test_a_request_that_rests_wakes_when_its_drafts_are_accepted() -> None:
    def accepts(slot: int, step: int) -> float:
        return 1.0 if slot == 2 and step >= 600 else 0.0

    simulation, budget = Simulation(accepts, reads_weights, number=4, most=K), adaptive(K, 4)
    simulation.run(budget, 600)
    assert not any(budget.wants_drafts(slot) for slot in range(4))
    simulation.run(budget, 600)
    assert sum(simulation.depths[-50:]) >= 40 * K, "the drafts of one request"
    assert [budget.wants_drafts(slot) for slot in range(4)] == [False, False, True, False]


def test_a_new_request_in_a_resting_slot_is_awake() -> None:
    simulation, budget = Simulation(ACCEPTS["none"], computes, number=2, most=K), adaptive(K, 2)
    simulation.run(budget, 300)
    while budget.wants_drafts(0) or budget.wants_drafts(1):
        simulation.run(budget, 1)
    requests = decoding(2)
    requests[0].request_id = "new"
    budget.choose(requests, [0, 0])
    assert budget.wants_drafts(0) and not budget.wants_drafts(1)


def test_few_drafts_are_found() -> None:
    """Requests without drafts have none, whatever the others gain."""
    simulation = Simulation(ACCEPTS["all"], reads_weights, number=8, most=K, found=0.2)
    work = simulation.run(adaptive(K, 8), 1500)
    deep = Simulation(ACCEPTS["all"], reads_weights, number=8, most=K, found=0.2).run(fixed(K, 8), 1500)
    assert work.rate > 0.97 * deep.rate
    assert draft_budget.NO_DRAFTS in simulation.reasons


def test_fixed_depth_takes_all_drafts_within_the_batch_size() -> None:
    budget = DraftBudget([K, K, 2, 0, 1], max_num_seqs=4, adaptive=False)
    requests = decoding(4)
    assert budget.choose(requests[:1], [3]) == ([3], draft_budget.FIXED)
    assert budget.choose(requests[:2], [4, 1]) == ([2, 1], draft_budget.FIXED)
    assert budget.choose(requests[:3], [4, 4, 4]) == ([0, 0, 0], draft_budget.BATCH_SIZE)
    assert budget.choose(requests, [4, 0, 4, 4]) == ([1, 0, 1, 1], draft_budget.FIXED)
    assert budget.choose(requests, [0, 0, 0, 0]) == ([0, 0, 0, 0], draft_budget.NO_DRAFTS)
    assert dict(budget.counts.choices) == {"fixed": 3, "batch size": 1, "no drafts": 1}


def test_batch_sizes_bound_the_adaptive_depth() -> None:
    budget = DraftBudget([K, K, 1], max_num_seqs=2)
    for number, most in ((2, 1), (1, K)):
        simulation = Simulation(ACCEPTS["all"], reads_weights, number=number, most=K)
        simulation.run(budget, 100)
        assert max(simulation.depths) == number * most


def test_steps_with_prefills_teach_acceptance_and_no_durations() -> None:
    budget = adaptive(K, 2)
    batch = ScheduledBatch(
        slots=[0, 1], query_lens=[3, 20], samples=[True, True], num_decodes=1, num_decode_tokens=3, num_tokens=23
    )
    budget.learn(batch, StepOutput(slots=[0, 1], token_ids=[[7, 7], [7]]), 99.0)
    assert budget.counts == (1, 2, 1, (1, 0, 0, 0), ())
    assert budget.costs.num_plain_steps(1) == 0 and budget.costs.estimate(1, np.zeros(1)).tolist() == [1.0]


def test_counts_are_of_decodes_with_drafts() -> None:
    budget = DraftBudget(limits(3, 3), max_num_seqs=3, adaptive=False)
    batch = ScheduledBatch(
        slots=[2, 0, 1],
        query_lens=[4, 1, 2],
        samples=[True] * 3,
        num_decodes=3,
        num_decode_tokens=7,
        num_tokens=7,
    )
    budget.learn(batch, StepOutput(slots=[2, 0, 1], token_ids=[[7, 7, 7], [7], [7]]), 1.0)
    budget.learn(batch, StepOutput(slots=[2, 0, 1], token_ids=[[7, 7, 7, 7], [7], [7, 7]]), 1.0)
    assert budget.counts == (4, 8, 6, (3, 2, 1), ())


def test_a_decode_whose_device_found_no_draft_is_not_counted() -> None:
    counter = DraftCounter(2)
    counter.add(np.array([2, 0, 1]), np.array([1, 0, 1]))
    assert counter.counts == (2, 3, 2, (2, 0), ())
