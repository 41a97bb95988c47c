"""Prompt lookup against the definition, and against transformers' generator of candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from phonograph.speculation.ngram import NgramProposer


def by_definition(token_ids: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - length):
            if token_ids[start : start + length] == token_ids[-length:]:
                return token_ids[start + length : start + length + most]
    return []


@pytest.mark.parametrize("seed", range(300))
def test_random_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, int(rng.integers(1, 6)), int(rng.integers(1, 60))).astype(np.int32)
    shortest = int(rng.integers(1, 5))
    longest, most = shortest + int(rng.integers(0, 4)), int(rng.integers(1, 8))
    found = NgramProposer(shortest=shortest, longest=longest).propose(token_ids, most)
    assert found.tolist() == by_definition(token_ids.tolist(), shortest, longest, most)


@pytest.mark.parametrize("seed", range(30))
def test_drafts_are_those_of_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(5, 9, int(rng.integers(8, 60)))
    theirs = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([1]),
        num_output_tokens=4,
        max_matching_ngram_size=3,
        max_length=1000,
        logits_processor=None,
        vocab_size=20,
    )
    candidates, _ = theirs.get_candidates(torch.from_numpy(token_ids)[None])
    found = NgramProposer(shortest=1, longest=3).propose(token_ids.astype(np.int32), 4)
    assert found.tolist() == candidates[0, len(token_ids) :].tolist()
