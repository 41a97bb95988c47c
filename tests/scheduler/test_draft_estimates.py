"""Estimates that the depth of speculation goes by: durations of steps, and acceptance by position."""

from __future__ import annotations

import numpy as np
import pytest

from phonograph.scheduling.draft_acceptance import DraftAcceptance
from phonograph.scheduling.step_costs import StepCosts, size_of

SLOTS, MOST = 3, 4


def costs_of(*shapes: tuple[int, int, float], times: int = 10) -> StepCosts:
    """Return costs that learnt each (requests, drafts, seconds) some times."""
    costs = StepCosts()
    for _ in range(times):
        for shape in shapes:
            costs.learn(*shape)
    return costs


def test_times_between_known_numbers_of_drafts_lie_on_a_line() -> None:
    costs = costs_of((2, 0, 1.0), (2, 4, 3.0))
    assert costs.estimate(2, np.array([0, 1, 2, 4, 6])) == pytest.approx([1.0, 1.5, 2.0, 3.0, 3.0])
    assert costs.num_plain_steps(2) == 10 and costs.num_plain_steps(3) == 0


def test_an_unknown_number_of_requests_has_the_times_of_the_nearest() -> None:
    costs = costs_of((2, 0, 1.0), (64, 0, 5.0))
    for number, seconds in ((1, 1.0), (3, 1.0), (40, 5.0), (200, 5.0)):
        assert costs.estimate(number, np.zeros(1)) == pytest.approx([seconds]), number


def test_without_a_plain_step_it_takes_its_share_at_the_nearest_number_of_requests() -> None:
    costs = costs_of((4, 0, 1.0), (4, 12, 1.5), (32, 0, 2.0), (32, 96, 5.0), (8, 24, 1.8), (2, 3, 1.0))
    plain, half, whole = costs.estimate(8, np.array([0, 12, 24]))
    assert (plain, whole) == pytest.approx((1.2, 1.8)) and plain < half < whole
    # Three of six drafts cost a part of what all of them do.
    assert 1 / 1.5 < costs.estimate(2, np.zeros(1))[0] < 1.0
    assert costs_of((8, 24, 1.8)).estimate(4, np.zeros(1)) == pytest.approx([1.8]), "nothing is known of plain steps"


def test_without_times_all_steps_last_alike() -> None:
    assert StepCosts().estimate(4, np.arange(3)).tolist() == [1.0, 1.0, 1.0]


def test_more_drafts_never_take_less_time() -> None:
    """Times that fall are noise: they share their mean by weight."""
    costs = costs_of((1, 0, 1.0), (1, 2, 4.0), (1, 4, 2.0))
    plain, two, three, four = costs.estimate(1, np.array([0, 2, 3, 4]))
    assert plain == pytest.approx(1.0) and two == three == four == pytest.approx(8**0.5)


def test_a_slower_machine_raises_the_times_of_all_shapes() -> None:
    costs = costs_of((1, 0, 1.0), (1, 3, 2.0), times=50)
    for _ in range(100):
        costs.learn(1, 0, 1.5)
    plain, deep = costs.estimate(1, np.array([0, 3]))
    assert plain == pytest.approx(1.5, rel=0.05)
    assert deep > 2.5, "it did not run meanwhile"


def test_a_pause_of_the_machine_hardly_counts() -> None:
    costs = costs_of((1, 0, 1.0), times=50)
    costs.learn(1, 0, 1000.0)
    assert costs.estimate(1, np.zeros(1))[0] < 1.1


@pytest.mark.parametrize("steps", [4, 8])
def test_sizes_are_exact_where_small_and_near_where_large(steps: int) -> None:
    sizes = [size_of(number, steps) for number in range(300)]
    assert sizes[: 2 * steps] == [*range(2 * steps)]
    assert sizes == sorted(sizes) and all(size_of(size, steps) == size for size in sizes)
    assert all(size <= number < size * (1 + 1 / steps) for number, size in enumerate(sizes) if number)
    assert len({*sizes[64:128]}) == steps


def learn(acceptance: DraftAcceptance, slot: int, depth: int, kept: int, times: int = 1) -> None:
    for _ in range(times):
        acceptance.learn(np.array([slot]), np.array([depth]), np.array([kept]))


def gains(acceptance: DraftAcceptance, slot: int, hopeful: bool = False) -> np.ndarray:
    return acceptance.gains(np.array([slot]), hopeful=hopeful)[0]


def test_gains_are_those_of_each_position() -> None:
    """Half of the first drafts are accepted, and all of the others behind them, of which there are two."""
    acceptance, rng = DraftAcceptance(SLOTS, MOST), np.random.default_rng(0)
    for _ in range(400):
        learn(acceptance, 1, 3, 3 * int(rng.random() < 0.5))
    found = gains(acceptance, 1)
    assert found[0] == pytest.approx(0.5, abs=0.12)
    assert found[1:3] == pytest.approx(found[:1].repeat(2), rel=0.05)
    assert found[3] < 0.9 * found[2], "no step had a fourth draft"


def test_a_rejected_draft_tells_nothing_of_those_behind_it() -> None:
    acceptance = DraftAcceptance(SLOTS, MOST)
    before = gains(acceptance, 0)
    learn(acceptance, 0, MOST, 0)
    after = gains(acceptance, 0)
    assert after[0] < before[0]
    assert after[1:] / after[:-1] == pytest.approx(before[1:] / before[:-1])


def test_a_new_request_begins_with_the_mean_of_others() -> None:
    acceptance = DraftAcceptance(SLOTS, MOST)
    guess = gains(acceptance, 1)
    for _ in range(10):
        acceptance.start(0)
        learn(acceptance, 0, MOST, MOST, times=8)
    assert (gains(acceptance, 1) > guess + 0.2).all()
    learn(acceptance, 1, MOST, 0, times=3)
    rejected = gains(acceptance, 1)
    acceptance.start(1)
    assert gains(acceptance, 1)[0] > rejected[0] + 0.2, "the slot's last request does not count"


def test_long_requests_do_not_outweigh_others() -> None:
    acceptance = DraftAcceptance(SLOTS, MOST)
    for kept in (1, 1, 0) * 4:
        learn(acceptance, 0, 1, kept)
    mean = gains(acceptance, 1)
    for kept in (1, 0, 0) * 200:
        learn(acceptance, 0, 1, kept)
    assert gains(acceptance, 0)[0] < 0.45 < mean[0]
    assert gains(acceptance, 1) == pytest.approx(mean)


def test_hope_is_large_where_little_is_known() -> None:
    acceptance = DraftAcceptance(SLOTS, MOST)
    hope = gains(acceptance, 0, hopeful=True) - gains(acceptance, 0)
    for kept in (0, 1) * 40:
        learn(acceptance, 1, MOST, kept * MOST)
    later = gains(acceptance, 1, hopeful=True) - gains(acceptance, 1)
    assert 0 < later[0] < hope[0] / 3
    assert (gains(acceptance, 1, hopeful=True) <= 1).all()


@pytest.mark.parametrize(("first", "then"), [(MOST, 0), (0, MOST)])
def test_a_change_of_the_text_is_noticed(first: int, then: int) -> None:
    """A mean of 100 drafts would take about 70 to pass the half."""
    acceptance = DraftAcceptance(SLOTS, MOST)
    learn(acceptance, 0, MOST, first, times=300)
    learn(acceptance, 0, MOST, then, times=8)
    assert (gains(acceptance, 0)[0] > 0.5) == (then > 0)


def test_drafts_of_long_ago_count_less() -> None:
    acceptance = DraftAcceptance(SLOTS, MOST)
    learn(acceptance, 0, MOST, 0, times=20)
    for _ in range(9):
        acceptance.start(1)
        learn(acceptance, 1, MOST, MOST, times=8)
    before = gains(acceptance, 0)[0]
    acceptance.fade(0, 5000)
    assert gains(acceptance, 0)[0] > before + 0.1
