"""Rows that are not finite, filters beside each other and small batches of the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.sampling.sampler import Sampler
from phonograph.sampling.slot_edits import SlotEdits

CPU = torch.device("cpu")


def make_sampler(vocab_size: int, max_num_seqs: int = 32, seed: int | None = 0, **more: bool) -> Sampler:
    return Sampler(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=CPU, seed=seed, **more)


def test_min_tokens_alone_masks_a_greedy_row() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 7], logits[0, 9] = 5.0, 4.0
    sampler = make_sampler(50, 1)
    sampler.load(0, SamplingParams(temperature=0, min_tokens=2), [1], [], [7], 0)
    assert [sampler.sample(logits, [0], [length]).token_ids for length in range(3)] == [[9], [9], [7]]


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_greedy_batch_too_says_which_row_has_no_token(fault: float) -> None:
    logits = torch.randn(3, 50)
    logits[1] = fault
    sampler = make_sampler(50, 3)
    for slot in range(3):
        sampler.load(slot, SamplingParams(temperature=0), [1], [], [], 0)
    sampled = sampler.sample(logits, range(3), [0] * 3)
    assert sampled.token_ids[1] == -1
    assert sampled.token_ids[::2] == logits[::2].argmax(dim=-1).tolist()


def test_top_p_after_a_wide_top_k_counts_what_top_k_left() -> None:
    """2000 equal logits: top_k leaves 1100, of which top_p keeps half."""
    logits = torch.zeros(500, 2000)
    sampler = make_sampler(2000, 500)
    for slot in range(500):
        sampler.load(slot, SamplingParams(top_k=1100, top_p=0.5), [], [], [], 0)
    assert 500 < max(sampler.sample(logits, range(500), [0] * 500).token_ids) < 550


def test_a_vocabulary_larger_than_a_chunk_is_sampled() -> None:
    size = 2**17 + 5
    logits = torch.full((2, size), -5.0)
    logits[:, size - 1] = 40.0
    sampler = make_sampler(size, 2)
    for slot, settings in enumerate(({"temperature": 1.0}, {"top_p": 0.9, "logprobs": 1})):
        sampler.load(slot, SamplingParams(**settings), [], [], [], 0)
    assert sampler.sample(logits, [0, 1], [0, 0]).token_ids == [size - 1] * 2


@pytest.mark.parametrize("rows", [2, 3])
def test_batch_invariant_rows_are_worked_on_one_by_one(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(50, rows, batch_invariant=True)
    for slot in range(rows):
        sampler.load(slot, SamplingParams(top_p=0.9), [], [], [], 0)
    seen: list[int] = []
    edit = sampler._edit
    monkeypatch.setattr(sampler, "_edit", lambda logits, *rest: seen.append(len(logits)) or edit(logits, *rest))
    sampler.sample(torch.randn(rows, 50), range(rows), [0] * rows)
    assert seen == [1] * rows


def test_kernels_learn_which_slots_have_edits() -> None:
    """The host's sampler keeps nothing of them then."""
    kinds = [{}, {"min_tokens": 3}, {"logprobs": 0}, {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"top_k": 3}]
    sampler = make_sampler(50, 6)
    sampler.edits = SlotEdits(max_num_seqs=6, vocab_size=50, device=torch.device("cpu"))
    for slot, settings in enumerate(kinds):
        sampler.load(slot, SamplingParams(**settings), [], [], [7], 0)
    parameters = sampler.kernel_parameters(np.arange(6))
    assert parameters.edits_N.tolist() == [False, True, False, True, True, False]
    assert parameters.min_tokens_N.tolist() == [0, 3, 0, 0, 0, 0]
    assert not (sampler._penalized | sampler._biased).any() and "_tensors" not in vars(sampler._penalties)
