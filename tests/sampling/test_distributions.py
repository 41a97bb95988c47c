"""Sampled tokens against exact float64 probabilities, by chi-square. All seeds are fixed: the verdicts are stable."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from phonograph.core.sampling_params import SamplingParams
from phonograph.sampling.sampler import Sampler

ROWS = 500
CALLS = 30
PROMPT = [0, 3, 3, 6]
OUTPUT = [3, 5, 5, 5, 1]


def exact_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of all tokens after PROMPT and OUTPUT, in float64, from the documentation of the parameters."""
    x = logits.astype(np.float64)
    for token_id, bias in params.logit_bias.items():
        x[token_id] += bias
    for token_id in set(PROMPT) | set(OUTPUT):
        x[token_id] = (
            x[token_id] / params.repetition_penalty if x[token_id] > 0 else x[token_id] * params.repetition_penalty
        )
    for token_id in set(OUTPUT):
        x[token_id] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token_id)
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0.0
    order = np.argsort(-x, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        reached = int(np.searchsorted(np.cumsum(p[order]), params.top_p))
        p[order[reached + 1 :]] = 0.0
    return p / p.sum()


def random_logits(vocab_size: int, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread


def sample_many(
    logits: torch.Tensor, params: Sequence[SamplingParams], sample_indices: Sequence[int], calls: int = CALLS
) -> np.ndarray:
    """Tokens [calls, rows]: call c of row r is the draw with index len(OUTPUT) + c of the request params[r]."""
    rows = len(params)
    sampler = Sampler(max_num_seqs=rows, vocab_size=len(logits), device=torch.device("cpu"), seed=7)
    tokens = np.empty((calls, rows), dtype=np.int64)
    for call in range(calls):
        # Loaded again for every call: counts of penalties must stay those of OUTPUT.
        for slot, (request, index) in enumerate(zip(params, sample_indices, strict=True)):
            if call == 0 or request.has_penalties:
                sampler.load(slot, request, PROMPT, OUTPUT, [], index)
        sampled = sampler.sample(logits.expand(rows, -1), range(rows), [len(OUTPUT) + call] * rows)
        tokens[call] = sampled.token_ids
    return tokens


def p_value(tokens: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of the counts, rare tokens pooled with equally rare ones; impossible ones must not occur at all."""
    counts = np.bincount(tokens.ravel(), minlength=len(probs))
    assert not counts[probs == 0.0].any()
    order = [i for i in np.argsort(probs) if probs[i] > 0.0]
    bins = (np.cumsum(probs[order]) * tokens.size // 20).astype(int)
    bins[bins == bins[-1]] = bins[-2]  # the last one may be a rest
    _, bins = np.unique(bins, return_inverse=True)
    expected = np.bincount(bins, probs[order]) * tokens.size
    assert len(expected) > 1
    return float(stats.chisquare(np.bincount(bins, counts[order]), expected).pvalue)


CASES: dict[str, tuple[int, float, dict[str, object]]] = {
    "plain": (13, 1.5, {}),
    "cold": (13, 1.5, {"temperature": 0.4}),
    "hot": (13, 1.5, {"temperature": 2.5}),
    "top_k": (13, 1.5, {"top_k": 5, "temperature": 1.2}),
    "top_p": (13, 1.5, {"top_p": 0.8}),
    "min_p": (13, 1.5, {"min_p": 0.1, "temperature": 0.9}),
    "all filters": (50, 1.5, {"top_k": 12, "top_p": 0.9, "min_p": 0.08, "temperature": 1.4}),
    "bias": (13, 1.5, {"logit_bias": {1: 2.0, 4: -1.0, 6: -math.inf}}),
    "repetition": (13, 1.5, {"repetition_penalty": 1.7}),
    "presence": (13, 1.5, {"presence_penalty": 1.2}),
    "frequency": (13, 1.5, {"frequency_penalty": -0.5}),
    "all penalties": (
        13,
        1.5,
        {"repetition_penalty": 0.7, "presence_penalty": -0.8, "frequency_penalty": 0.6, "logit_bias": {3: 2.5}},
    ),
    "odd vocabulary": (1021, 2.5, {"temperature": 0.8}),
    "top_k of many": (1000, 2.5, {"top_k": 300}),
    "top_p sorted": (1021, 2.5, {"top_p": 0.7}),
    "top_p from the head": (1500, 3.0, {"top_p": 0.7}),
    "top_p beyond the head": (1200, 0.5, {"top_p": 0.97, "temperature": 1.5}),
    "top_k beyond the head": (1200, 2.5, {"top_k": 1100, "min_p": 0.002}),
}


@pytest.mark.parametrize("case", CASES)
def test_distribution_over_draws(case: str) -> None:
    """As in use: the draw index counts up; here for ROWS samples of one seeded request."""
    vocab_size, spread, settings = CASES[case]
    params = SamplingParams(seed=11, **settings)
    logits = random_logits(vocab_size, spread)
    tokens = sample_many(
        logits, [params] * ROWS, range(ROWS), calls=CALLS if vocab_size < 1000 and not params.has_penalties else 8
    )
    assert p_value(tokens, exact_probs(logits.numpy(), params)) > 1e-3


@pytest.mark.parametrize("case", ["plain", "top_k", "top_p", "min_p", "all filters", "bias", "all penalties"])
@pytest.mark.parametrize("seeded", [True, False])
def test_distribution_over_seeds(case: str, seeded: bool) -> None:
    """The first draw of many requests: with neighbouring seeds of their own, and with the engine's."""
    vocab_size, spread, settings = CASES[case]
    params = [SamplingParams(seed=seed - 2000 if seeded else None, **settings) for seed in range(4000)]
    logits = random_logits(vocab_size, spread)
    tokens = sample_many(logits, params, [0] * len(params), calls=1)
    assert p_value(tokens, exact_probs(logits.numpy(), params[0])) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tenth_of_temperature_would_be_noticed(settings: dict[str, object]) -> None:
    """The chi-square tests above are worth something: they fail for a distribution that is slightly off."""
    logits = random_logits(13)
    tokens = sample_many(logits, [SamplingParams(seed=11, **settings)] * ROWS, range(ROWS), calls=100)
    kept = exact_probs(logits.numpy(), SamplingParams(**settings)) > 0
    for temperature in (0.9, 1.1):
        off = exact_probs(logits.numpy(), SamplingParams(temperature=temperature)) * kept
        assert p_value(tokens, off / off.sum()) < 1e-6


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}], ids=["full", "ranked"])
def test_consecutive_draws_are_independent(lag: int, settings: dict[str, object]) -> None:
    """Pairs of draws of one request, of its samples side by side, and of neighbouring seeds: product probabilities."""
    logits = random_logits(7)
    params = SamplingParams(seed=3, **settings)
    probs = exact_probs(logits.numpy(), params)
    pairs = np.outer(probs, probs).ravel()
    by_sample = sample_many(logits, [params] * ROWS, range(ROWS))
    by_seed = sample_many(logits, [SamplingParams(seed=seed, **settings) for seed in range(ROWS)], [0] * ROWS)
    for first, second in (
        (by_sample[:-lag], by_sample[lag:]),
        (by_sample[:, :-lag], by_sample[:, lag:]),
        (by_seed[:, :-lag], by_seed[:, lag:]),
    ):
        # Every pair once at most in each half, so that pairs do not overlap.
        for half in (0, lag):
            joint = (first * 7 + second)[half :: 2 * lag, half :: 2 * lag]
            assert p_value(joint, pairs) > 1e-3


def test_one_long_request() -> None:
    """A single row over 4000 draws: no other sample or seed lends it randomness."""
    logits = random_logits(9)
    params = SamplingParams(seed=0)
    tokens = sample_many(logits, [params], [0], calls=4000)
    assert p_value(tokens, exact_probs(logits.numpy(), params)) > 1e-3
