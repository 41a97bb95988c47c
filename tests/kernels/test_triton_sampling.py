"""Sampling kernels against the host's sampler, with the same parameters and seeds: the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.torch.sampling import draw_keys as draw_keys_of
from phonograph.kernels.triton.sampling.sample import SampleScratch, make_sample_scratch, sample
from phonograph.sampling.sampler import Sampler

POISON = -77
FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 700, "top_p": 0.5, "min_p": 0.001},
    {"top_p": 0.999, "min_p": 1e-4},
    {"top_k": 10**9},
]


def _scratch(max_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
    scratch = make_sample_scratch(max_rows, vocab_size, device)
    for name, tensor in scratch._asdict().items():
        if name != "counters":
            tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)
    return scratch


def _logits(rows: int, vocab: int, *, spread: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a strided view of rows among NaN."""
    generator = torch.Generator().manual_seed(rows * vocab)
    around = torch.full((rows, vocab + 24), float("nan"), dtype=dtype)
    around[:, :vocab] = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    return around.to(device)[:, :vocab]


def _both(
    logits: torch.Tensor, params: Sequence[SamplingParams], *, draw: int = 0, scratch: SampleScratch | None = None
) -> tuple[list[int], list[int]]:
    """Tokens of the kernel and of the host's sampler, -1 where a row has none; row i has params[i], in another slot."""
    rows, vocab = logits.shape
    device = logits.device
    slots = [rows - row for row in range(rows)]
    sampler = Sampler(max_num_seqs=rows + 1, vocab_size=vocab, device=torch.device("cpu"), seed=1)
    for slot, each in zip(slots, params, strict=True):
        sampler.load(slot, each, [], [], [], 0)
    parameters = sampler.kernel_parameters(np.array(slots))
    draw_keys = draw_keys_of(torch.from_numpy(parameters.stream_keys_N), torch.full((rows,), draw))
    tokens = torch.full((rows + 1,), POISON, dtype=torch.int32, device=device)
    last_token = torch.full((rows + 2,), POISON, dtype=torch.int32, device=device)
    num_computed = torch.full_like(last_token, POISON)

    def to_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype)

    scratch = scratch or _scratch(rows, vocab, device)
    sample(
        logits,
        torch.tensor(slots, dtype=torch.int32, device=device),
        to_device(parameters.temperature_N, torch.float32),
        to_device(parameters.top_k_N, torch.int32),
        to_device(parameters.top_p_N, torch.float32),
        to_device(parameters.min_p_N, torch.float32),
        draw_keys.to(device),
        scratch,
        tokens[:rows],
        last_token,
        num_computed,
        torch.arange(rows, dtype=torch.int32, device=device) + 3,
    )
    lengths = num_computed.tolist()
    assert [lengths[slot] for slot in slots] == [*range(3, rows + 3)] and lengths[0] == lengths[-1] == POISON
    host = sampler.sample(logits.cpu(), slots, [draw] * rows).token_ids
    got = tokens.tolist()
    last = last_token.tolist()
    assert got[rows] == last[0] == last[rows + 1] == POISON
    assert [last[slot] for slot in slots] == [max(token, 0) for token in got[:rows]]
    assert not scratch.counters.any()
    return got[:rows], host


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_and_temperature(device: torch.device, dtype: torch.dtype) -> None:
    params = [SamplingParams(temperature=temperature, seed=7) for temperature in (0.0, 0.3, 1.0, 5.0, 1e-4)]
    for vocab in (1, 37, 2500):
        logits = _logits(len(params), vocab, spread=3.0, dtype=dtype, device=device)
        got, host = _both(logits, params)
        assert got == host


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spread", [4.0, 0.01])
def test_filters(device: torch.device, dtype: torch.dtype, spread: float) -> None:
    params = [SamplingParams(temperature=0.8, seed=row, **each) for row, each in enumerate(FILTERS)]
    logits = _logits(len(params), 2500, spread=spread, dtype=dtype, device=device)
    scratch = _scratch(len(params), 2500, device)
    for draw in range(2):
        got, host = _both(logits, params, draw=draw, scratch=scratch)
        assert got == host


def test_a_top_p_that_float32_cannot_hold_keeps_the_best(device: torch.device) -> None:
    """A top_p that the sampler's parameters round, and 0, keep the best token."""
    logits = _logits(6, 2500, spread=0.01, dtype=torch.float32, device=device)
    tiny = [SamplingParams(top_p=top_p, seed=1) for top_p in (7e-46, 5e-324, 1e-38, 1e-20, 2**-32, 1e-9)]
    got, host = _both(logits, tiny)
    assert got == host == logits.argmax(-1).tolist()
    for params in tiny:
        object.__setattr__(params, "top_p", 0.0)
    assert _both(logits, tiny)[0] == host


def test_rows_that_a_grammar_has_masked_are_searched_among_candidates(device: torch.device) -> None:
    """Whole parts of a row, and all but a few of its tokens, are -inf."""
    vocab = 6000
    allowed = [range(5), range(1030, 1034), range(100, 5900, 145), range(0, vocab, 2), range(4000)]
    logits = _logits(len(allowed), vocab, spread=2.0, dtype=torch.float32, device=device)
    for row, tokens in zip(logits, allowed, strict=True):
        banned = torch.ones(vocab, dtype=torch.bool, device=device)
        banned[list(tokens)] = False
        row[banned] = -torch.inf
    for top_k in (3, 60):
        params = [SamplingParams(top_k=top_k, seed=row) for row in range(len(allowed))]
        scratch = _scratch(len(allowed), vocab, device)
        got, host = _both(logits, params, scratch=scratch)
        assert got == host
        searched = (scratch.candidates != POISON).sum(1).tolist()
        assert all(min(top_k, len(tokens)) <= count <= 4096 for count, tokens in zip(searched, allowed, strict=True))


def test_row_that_no_level_helps(device: torch.device) -> None:
    """More tokens pass than there is room for candidates."""
    params = [
        SamplingParams(temperature=1.0, seed=1, top_p=0.99),
        SamplingParams(temperature=1.0, seed=2, top_k=4500),
        SamplingParams(temperature=1.0, seed=3, top_k=4500, top_p=0.9),
    ]
    logits = _logits(len(params), 5000, spread=0.3, dtype=torch.float16, device=device)
    got, host = _both(logits, params)
    assert got == host


@pytest.mark.parametrize("allowed", [4096, 4097])
def test_as_many_candidates_as_there_is_room_for(allowed: int, device: torch.device) -> None:
    """The last candidate is the one that is drawn."""
    logits = torch.full((4, 5000), -100.0, device=device)
    logits[:, :allowed] = 0.0
    logits[:, allowed - 1] = 16.0
    params = [SamplingParams(top_k=allowed, seed=seed) for seed in range(len(logits))]
    got, host = _both(logits, params)
    assert got == host
    assert got.count(allowed - 1) >= 3


@pytest.mark.parametrize("settings", [{}, {"top_k": 90}, {"top_p": 0.999}])
def test_min_p_of_tokens_just_below_it(settings: dict[str, Any], device: torch.device) -> None:
    """They are candidates, because the bound of candidates is a little lower, and together more probable."""
    logits = torch.full((6, 100), math.log(0.05) * 1.0005, device=device)
    logits[:, 70] = 0.0
    params = [SamplingParams(min_p=0.05, seed=seed, **settings) for seed in range(len(logits))]
    got, host = _both(logits, params)
    assert got == host == [70] * len(logits)


def test_equal_logits_go_by_token_id(device: torch.device) -> None:
    logits = torch.zeros(4, 3000, device=device)
    logits[:, ::2] = -0.0
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-5),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.35, seed=3),
    ]
    got, host = _both(logits, params)
    assert got == host
    assert got[:3] == [0, 0, 0]
    assert got[3] in (0, 1)


def test_rows_without_a_token(device: torch.device) -> None:
    bad = [(5, math.nan), (2400, math.nan), (1030, math.inf)]
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=4, top_p=0.9),
    ]
    logits = _logits(len(kinds) * (len(bad) + 1), 2500, spread=2.0, dtype=torch.float32, device=device)
    for row, (place, value) in enumerate(bad * len(kinds)):
        logits[row, place] = value
    logits[-len(kinds) :] = -math.inf
    params = [kind for kind in kinds for _ in bad] + kinds
    got, host = _both(logits, params)
    assert got == host == [-1] * len(params)
    logits = torch.full((3, 2500), -math.inf, device=device)
    logits[:, 1999] = -5.0
    got, host = _both(logits, kinds)
    assert got == host == [1999] * 3


def test_rows_that_do_not_sample(device: torch.device) -> None:
    logits = torch.full((3, 100), float("nan"), device=device)
    tokens = torch.full((3,), POISON, dtype=torch.int32, device=device)
    last_token = torch.full((3,), POISON, dtype=torch.int32, device=device)
    floats = torch.full((3,), 0.5, device=device)
    sample(
        logits,
        torch.full((3,), -1, dtype=torch.int32, device=device),
        floats,
        torch.ones(3, dtype=torch.int32, device=device),
        floats,
        floats,
        torch.zeros(3, dtype=torch.int64, device=device),
        _scratch(3, 100, device),
        tokens,
        last_token,
        last_token,
        torch.zeros(3, dtype=torch.int32, device=device),
    )
    assert tokens.tolist() == [-2] * 3
    assert last_token.tolist() == [POISON] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [2048, 128256, 151936, 262144 - 7])
@pytest.mark.parametrize("spread", [3.0, 0.5])
def test_large_vocabularies(device: torch.device, dtype: torch.dtype, vocab: int, spread: float) -> None:
    kinds: list[dict[str, Any]] = [{}, *FILTERS]
    params = [SamplingParams(temperature=0.0)]
    params += [SamplingParams(temperature=(0.6, 1.0)[row % 2], seed=row, **kinds[row % 11]) for row in range(43)]
    logits = _logits(len(params), vocab, spread=spread, dtype=dtype, device=device)
    scratch = _scratch(len(params), vocab, device)
    wrong = 0
    for draw in range(4):
        got, host = _both(logits, params, draw=draw, scratch=scratch)
        assert got[0] == host[0]
        wrong += sum(a != b for a, b in zip(got, host, strict=True))
    assert wrong <= 1  # sums are rounded otherwise, and two tokens may be as good as equal


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 31, 256])
def test_all_numbers_of_rows(device: torch.device, rows: int) -> None:
    params = [SamplingParams(temperature=0.0), *(SamplingParams(temperature=1.0, seed=1, **each) for each in FILTERS)]
    params = [params[row % len(params)] for row in range(rows)]
    logits = _logits(rows, 128256, spread=2.0, dtype=torch.bfloat16, device=device)
    got, host = _both(logits, params)
    assert sum(a != b for a, b in zip(got, host, strict=True)) <= 1


@pytest.mark.gpu
def test_draws_follow_the_distribution(device: torch.device) -> None:
    """Chi-square of draws from what top-k keeps of a fixed row, with a key for each row."""
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    rows = 2000
    logits = torch.full((rows, 40), -20.0, device=device)
    logits[:, [3, 9, 17, 39]] = torch.from_numpy(np.log(probabilities)).to(device, torch.float32)
    params = [SamplingParams(temperature=1.0, seed=seed, top_k=4) for seed in range(rows)]
    got, host = _both(logits, params)
    assert got == host
    counts = np.array([got.count(token) for token in (3, 9, 17, 39)])
    assert counts.sum() == rows
    assert ((counts - rows * probabilities) ** 2 / (rows * probabilities)).sum() < 16.3  # p = 0.001, 3 degrees
