"""Ranking and filters against a slow reference that sorts Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phonograph.kernels.torch.sampling import (
    Rows,
    draw_keys,
    filter_ranked,
    ranked,
    sample_full,
    sample_nucleus,
    sample_ranked,
    scale,
    stream_key,
)


def rows_of(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int = 0) -> Rows:
    count = logits.shape[0]

    def filled(value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.float64)

    return Rows(
        logits_NV=logits,
        max_N=logits.amax(dim=-1),
        keys_N=draw_keys(torch.full((count,), stream_key(seed, 0)), torch.arange(count)),
        temperature_N=filled(temperature),
        min_p_N=filled(min_p),
        top_p_N=filled(top_p),
        top_k_N=torch.full((count,), top_k),
    )


def slow_filter(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Kept token ids; rejects inputs where the decision hangs on rounding."""
    best = max(logits)
    weights = {i: math.exp((value - best) / temperature) for i, value in enumerate(logits) if value != -math.inf}
    assume(all(abs(weight - min_p) > 1e-9 for weight in weights.values()))
    kept = {i: weight for i, weight in weights.items() if weight >= min_p}
    order = sorted(kept, key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    total = math.fsum(kept[i] for i in order)
    result: set[int] = set()
    before = 0.0
    for place, i in enumerate(order):
        if top_p < 1.0 and place and before >= top_p * total:
            break
        before = math.fsum(kept[j] for j in order[: place + 1])
        assume(top_p == 1.0 or abs(before - top_p * total) > 1e-9)
        result.add(i)
    return result


# Quarters give many equal logits.
VALUES = st.one_of(st.integers(-20, 20).map(lambda i: i / 4), st.floats(-30, 30, width=32), st.just(-math.inf))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    logits=st.lists(VALUES, min_size=1, max_size=23).filter(lambda row: max(row) > -math.inf),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 25),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)
def test_kept_tokens(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    expected = slow_filter(logits, temperature, top_k, top_p, min_p)
    rows = rows_of(torch.tensor([logits]), temperature, top_k, top_p, min_p)
    width = min(top_k, len(logits)) or len(logits)
    values, ids = ranked(rows.logits_NV, width)
    scaled = filter_ranked(scale(values, rows, torch.float64), rows.top_k_N, rows.top_p_N)
    kept = scaled[0] > -math.inf
    assert set(ids[0][kept].tolist()) == expected
    exact = torch.tensor(logits, dtype=torch.float64)[ids[0][kept]] - max(logits)
    torch.testing.assert_close(scaled[0][kept], exact / temperature, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.75, [0, 1, 2]), (1.0, None)]
)
def test_top_p_takes_no_more_than_it_needs_of_equal_tokens(top_p: float, kept: list[int] | None) -> None:
    rows = rows_of(torch.full((1, 4), 1.5), 0.7, 0, top_p, 0.0)
    values, ids = ranked(rows.logits_NV, 4)
    scaled = filter_ranked(scale(values, rows, torch.float64), rows.top_k_N, rows.top_p_N)
    assert ids[0][scaled[0] == 0.0].tolist() == (kept or [0, 1, 2, 3])


def test_top_p_of_one_keeps_the_faintest_token() -> None:
    """The running sum reaches the total in float64 long before a token of probability e^-100."""
    rows = rows_of(torch.tensor([[0.0, -100.0, -101.0]]), 1.0, 0, 1.0, 0.0)
    values, _ = ranked(rows.logits_NV, 3)
    assert filter_ranked(scale(values, rows, torch.float64), rows.top_k_N, rows.top_p_N).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab_size", "k"), [(1, 1), (2, 1), (2, 2), (1000, 7), (1021, 400), (1021, 600), (1021, 1021)]
)
def test_ranked_is_a_stable_sort(dtype: torch.dtype, vocab_size: int, k: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size + k)
    logits = torch.randn(5, vocab_size, generator=generator).mul(20).round().div(8).to(dtype)
    logits[1, ::2] = -math.inf
    logits[2] = 0.0
    logits[2, ::3] = -0.0  # equal to 0.0, so ids decide
    logits[3, -1] = 3.0e4
    values, ids = ranked(logits, k)
    order = np.argsort(-logits.double().numpy(), axis=-1, kind="stable")[:, :k]
    assert ids.tolist() == order.tolist()
    assert values.dtype == dtype
    assert torch.equal(values, logits.gather(-1, ids))


def test_ranked_tells_neighbouring_floats_apart() -> None:
    """Neighbours of both signs and all magnitudes, the smallest included."""
    seeds = [0.0, 1e-40, 1e-7, 0.3, 1.0, 77.7, 3e38]
    steps: list[float] = []
    for start in [*seeds, *(-value for value in seeds)]:
        value = torch.tensor(start)
        for _ in range(4):
            steps.append(value.item())
            value = torch.nextafter(value, torch.tensor(math.inf))
    logits = torch.tensor(steps)[torch.randperm(len(steps), generator=torch.Generator().manual_seed(0))]
    for k in (20, len(steps)):
        values, _ = ranked(logits[None], k)
        assert values[0].tolist() == sorted(steps, reverse=True)[:k]


@pytest.mark.parametrize("spread", [0.3, 1.5, 6.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_nucleus_from_the_head_equals_the_whole_row(spread: float, min_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 501, generator=generator) * spread
    rows = rows_of(logits, 0.9, 0, 0.85, min_p)
    whole = sample_ranked(rows, 501)
    found, holds = sample_nucleus(rows, 60)
    probs = (logits.double() / 0.9).softmax(dim=-1)
    probs = probs.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    head = probs.topk(60).values.sum(dim=-1) / probs.sum(dim=-1)
    clear = (head - 0.85).abs() > 1e-5
    assert clear.sum() > 250
    assert torch.equal(holds[clear], head[clear] >= 0.85)
    assert torch.equal(found[holds], whole[holds])


@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_the_draw_does_not_depend_on_how_many_candidates_are_looked_at(min_p: float) -> None:
    logits = torch.randn(400, 203, generator=torch.Generator().manual_seed(5)) * 2
    rows = rows_of(logits, 1.3, 0, 1.0, min_p, seed=8)
    assert torch.equal(sample_full(rows), sample_ranked(rows, 203))
    narrow = rows._replace(top_k_N=torch.full((400,), 9))
    assert torch.equal(sample_ranked(narrow, 9), sample_ranked(narrow, 150))
