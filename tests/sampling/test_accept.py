"""Acceptance of drafts by the host's sampler, with state that each token changes."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.torch.sampling import penalize
from phonograph.sampling.accept import sample_runs
from phonograph.sampling.sampler import Sampler

VOCAB, SAMPLES = 6, 4000
FIRST = torch.tensor([0.9, 0.1, 0.6, -0.4, 0.0, 0.3])
SECOND = 0.4 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
"""Logits behind the first token, by this token."""
PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.4}


def distribution(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
    """Return the probabilities behind an output, with the token 0 in the prompt and a bias of token 2."""
    in_prompt = torch.arange(VOCAB)[None] == 0
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)[None]
    biased = logits + torch.tensor([0, 0, 0.7, 0, 0, 0])
    factors = (torch.tensor([value]) for value in PENALTIES.values())
    return penalize(biased[None], in_prompt, counts, *factors).double().softmax(-1)[0]


def test_penalized_draws_of_two_positions_are_distributed_as_without_drafts() -> None:
    """Chi-square of pairs of tokens; a fifth of the drafts is right."""
    sampler = Sampler(max_num_seqs=SAMPLES, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
    for slot in range(SAMPLES):
        sampler.load(slot, SamplingParams(seed=slot, logit_bias={2: 0.7}, **PENALTIES), [0], [], [], 0)
    slots, drafts = [*range(SAMPLES)], np.random.default_rng(1).integers(0, VOCAB, SAMPLES)
    logits = torch.stack((FIRST.expand(SAMPLES, VOCAB), SECOND[drafts]), 1).flatten(0, 1)
    firsts, twos = np.arange(SAMPLES) * 2, np.full(SAMPLES, 2)
    runs = sample_runs(sampler, logits, firsts, twos, slots, np.zeros(SAMPLES, np.int64), np.repeat(drafts, 2))
    rejected = [slot for slot, run in enumerate(runs.token_ids) if len(run) == 1]
    assert [run[0] != draft for run, draft in zip(runs.token_ids, drafts, strict=True)] == [
        len(run) == 1 for run in runs.token_ids
    ]
    assert 0.7 * SAMPLES < len(rejected) < 0.9 * SAMPLES
    rest = SECOND[[runs.token_ids[slot][0] for slot in rejected]]
    ones = np.ones(len(rejected), np.int64)
    more = sample_runs(sampler, rest, np.arange(len(rejected)), ones, rejected, ones, np.zeros(len(rejected)))
    for slot, run in zip(rejected, more.token_ids, strict=True):
        runs.token_ids[slot] += run
    found = np.zeros((VOCAB, VOCAB))
    np.add.at(found, tuple(np.array(runs.token_ids).T), 1)
    first = distribution(FIRST, [])
    expected = SAMPLES * torch.stack([first[token] * distribution(SECOND[token], [token]) for token in range(VOCAB)])
    assert expected.min() > 5
    assert ((found - expected.numpy()) ** 2 / expected.numpy()).sum() < 66.6  # p = 0.001, 35 degrees
