"""The first cases of the search that `scripts/fuzz-configs` runs at length."""

from __future__ import annotations

from collections import Counter

from config_search import run_case


def test_random_configurations_run_as_in_transformers_or_are_refused_by_field() -> None:
    outcomes = Counter(run_case(seed).split()[0] for seed in range(150))
    print(outcomes)
    # Most cases have to reach the logits, else the search would compare nothing.
    assert outcomes["equal"] >= 60 and outcomes["refused"] >= 10
