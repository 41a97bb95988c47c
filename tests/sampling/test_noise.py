"""The counter-based noise: the integers against Python's, the floats against the Gumbel distribution."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from phonograph.kernels.torch.sampling import draw_keys, gumbel_noise, mix64, stream_key

MASK = 2**64 - 1


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def python_mix(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def python_bits(seed: int, *path: int) -> int:
    key = python_mix(seed)
    for index in path:
        key = python_mix(key + (index + 1) * 0x9E3779B97F4A7C15)
    return key


def test_mix64_equals_unsigned_arithmetic() -> None:
    values = [*np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500).tolist(), 1, -1, 2**63 - 1, -(2**63)]
    assert mix64(torch.tensor(values)).tolist() == [signed(python_mix(value)) for value in values]


def test_noise_is_the_documented_function_of_seed_and_indices() -> None:
    rng = np.random.default_rng(1)
    for seed, sample, draw in ((0, 0, 0), (-1, 3, 17), (2**63 - 1, 1023, 10**6), (-(2**63), 0, 1), (12345, 1, 2)):
        ids = rng.integers(0, 200_000, 50)
        key = draw_keys(torch.tensor([stream_key(seed, sample)]), torch.tensor([draw]))
        found = gumbel_noise(key, torch.from_numpy(ids))[0].tolist()
        for token_id, noise in zip(ids.tolist(), found, strict=True):
            u = (python_bits(seed, sample, draw, token_id) & (2**63 - 1)) / 2**63
            assert math.isclose(noise, -math.log(-math.log1p(-u)), rel_tol=2e-5, abs_tol=2e-6)


def test_noise_is_gumbel_and_finite() -> None:
    keys = draw_keys(torch.full((20,), stream_key(0, 0)), torch.arange(20))
    noise = gumbel_noise(keys, torch.arange(50_000))
    assert noise.isfinite().all()
    for row in noise[:5].double().numpy():
        assert stats.kstest(row, "gumbel_r").pvalue > 1e-3
    # The upper tail decides large vocabularies: maxima of 50000 are Gumbel again, shifted by log(50000).
    maxima = gumbel_noise(draw_keys(torch.full((400,), stream_key(1, 0)), torch.arange(400)), torch.arange(50_000))
    shifted = maxima.amax(dim=-1).double().numpy() - math.log(50_000)
    assert stats.kstest(shifted, "gumbel_r").pvalue > 1e-3


def undo_xorshift(value: int, shift: int) -> int:
    result = value
    for _ in range(64 // shift):
        result = value ^ (result >> shift)
    return result


def test_noise_is_finite_at_both_ends() -> None:
    """Keys for u = 0 and u = 1, which no search would find, come from running the mix backwards."""
    for bits in (0, 2**63 - 1, 2**63, 2**64 - 1):
        value = undo_xorshift(bits, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
        value = undo_xorshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
        value = undo_xorshift(value, 30)
        assert python_mix(value) == bits
        key = signed((value - 0x9E3779B97F4A7C15) & MASK)
        noise = gumbel_noise(torch.tensor([key]), torch.tensor([0])).item()
        assert 43 < noise < 44 if bits in (0, 2**63) else -3 < noise < -2


def test_neighbouring_counters_are_uncorrelated() -> None:
    """Adjacent tokens, draws, samples and seeds, where a weak mix shows first."""
    tokens = torch.arange(20_000)

    def noise(seed: int, sample: int, draw: int) -> np.ndarray:
        key = draw_keys(torch.tensor([stream_key(seed, sample)]), torch.tensor([draw]))
        return gumbel_noise(key, tokens)[0].double().numpy()

    base = noise(0, 0, 0)
    neighbours = [noise(0, 0, 1), noise(0, 1, 0), noise(1, 0, 0), noise(-1, 0, 0), np.roll(base, 1), np.roll(base, 2)]
    for other in neighbours:
        assert abs(stats.pearsonr(base, other).statistic) < 4 / math.sqrt(len(tokens))


def test_no_two_streams_share_noise() -> None:
    keys = {
        int(draw_keys(torch.tensor([stream_key(seed, sample)]), torch.tensor([draw])).item())
        for seed in range(-5, 6)
        for sample in range(6)
        for draw in range(6)
    }
    assert len(keys) == 11 * 6 * 6
