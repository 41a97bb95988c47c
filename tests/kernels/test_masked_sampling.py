"""The kernel that masks logits, and masked sampling as a graph would hold it, against the host's sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phonograph.kernels.sampling import mask_tokens
from phonograph.kernels.triton.bitmask import mask_logits
from phonograph.kernels.triton.sampling import make_sample_scratch
from phonograph.runner.masked_sampling import MaskedSampling, RowParameters
from phonograph.runner.sampler import Sampler
from phonograph.sampling_params import SamplingParams


class Allowed:
    """A grammar that always allows these words of bits."""

    ended = False

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def matcher(self) -> Allowed:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        bitmask_RW[row] = self.words


def words_for(rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    return rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=np.int64).astype(np.int32)


@pytest.mark.parametrize("vocab", [1, 31, 33, 2048, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_masks_rows_with_a_slot_only(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    around = torch.randn(4, vocab + 9, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    words = torch.from_numpy(words_for(4, vocab)).to(device)
    slots = torch.tensor([3, -1, 0, -1], dtype=torch.int32, device=device)
    expected = around.clone()
    expected[:, :vocab] = torch.where(slots[:, None] >= 0, mask_tokens(around[:, :vocab], words), around[:, :vocab])
    mask_logits(around[:, :vocab], slots, words)
    assert torch.equal(around, expected)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 5}])
def test_tokens_are_those_of_the_host(settings: dict[str, Any], device: torch.device) -> None:
    rows, vocab, ruled = 5, 700, [1, 2, 4]
    slots = [rows - row for row in range(rows)]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(device)
    words = words_for(rows, vocab)
    sampler = Sampler(max_num_seqs=rows + 1, vocab_size=vocab, device=torch.device("cpu"), seed=1)
    for row, slot in enumerate(slots):
        grammar = Allowed(words[row]) if row in ruled else None
        sampler.load(slot, SamplingParams(seed=row, **settings), [], [], [], 0, grammar)
    given = sampler.kernel_parameters(np.array(slots), np.zeros(rows, np.int64))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    parameters = RowParameters(
        *(torch.from_numpy(array).to(device, dtype) for array, dtype in zip(given, dtypes, strict=True))
    )
    expected = sampler.sample(logits.cpu(), slots, [0] * rows).token_ids

    masked = MaskedSampling(max_rows=rows + 3, vocab_size=vocab, device=device)
    masked.bitmask_np[ruled] = words[ruled]
    masked.upload(np.array(ruled), np.array(slots)[ruled])
    tokens = torch.full((rows,), -5, dtype=torch.int32, device=device)
    last_token = torch.full((rows + 2,), -7, dtype=torch.int32, device=device)
    masked.run(logits, parameters, make_sample_scratch(rows, vocab, device), tokens, last_token)
    assert tokens.tolist() == [expected[row] if row in ruled else -5 for row in range(rows)]
    wanted = [-7] * (rows + 2)
    for row in ruled:
        wanted[slots[row]] = expected[row]
    assert last_token.tolist() == wanted
