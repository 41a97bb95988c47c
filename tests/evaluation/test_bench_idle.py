"""Idle time between steps, from traces made by hand."""

from __future__ import annotations

import pytest

from bench.idle_trace import idle_between_steps


def test_only_gaps_between_steps_count() -> None:
    trace = [
        (0.0, 2.0, "_prepare_kernel"),
        (3.0, 10.0, "product"),  # a gap of 1 inside the step: the graph's own
        (14.0, 15.0, "Memcpy DtoH (Device -> Pinned)"),  # 4 idle before the copy
        (16.0, 17.0, "Memcpy HtoD (Pinned -> Device)"),  # 1 between the copies
        (20.0, 21.0, "_prepare_kernel"),  # 3 before the next step
        (21.0, 30.0, "product"),
        (35.0, 36.0, "_prepare_kernel"),  # 5
    ]
    report = idle_between_steps(list(reversed(trace)))
    assert (report.num_steps, report.wall_us, report.idle_us) == (2, 35.0, 13.0)
    assert report.share == pytest.approx(13 / 35)


def test_overlapping_work_is_not_idle() -> None:
    trace = [
        (0.0, 1.0, "_prepare_kernel"),
        (1.0, 9.0, "long kernel"),
        (2.0, 3.0, "Memcpy DtoH"),
        (8.0, 10.0, "_prepare_kernel"),
    ]
    assert idle_between_steps(trace).idle_us == 0.0


def test_a_trace_without_two_steps_has_no_idle_time() -> None:
    report = idle_between_steps([(0.0, 1.0, "product")])
    assert (report.num_steps, report.share) == (0, 0.0)
