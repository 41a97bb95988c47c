"""The first cases of the search that `scripts/fuzz-configs` runs at length."""

from __future__ import annotations

from collections import Counter

from checkpoints import EXPERT_FAMILIES
from config_search import draw_case, run_case
from encoder_search import run_encoder_case


def test_random_configurations_run_as_in_transformers_or_are_refused_by_field() -> None:
    outcomes: Counter[str] = Counter()
    families: set[str] = set()
    for seed in range(90):
        outcome = run_case(seed).split()[0]
        outcomes[outcome] += 1
        if outcome == "equal":
            families.add(draw_case(seed).family)
    print(outcomes, families)
    # Many cases of most families have to reach the logits, else the search would compare nothing.
    assert outcomes["equal"] >= 30 and outcomes["refused"] >= 6
    assert len(families) >= 15 and len(families & EXPERT_FAMILIES.keys()) >= 4


def test_random_encoders() -> None:
    outcomes = Counter(run_encoder_case(seed).split()[0] for seed in range(36))
    print(outcomes)
    assert outcomes["equal"] >= 12 and outcomes["refused"] >= 2
