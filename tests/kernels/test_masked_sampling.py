"""The kernel that masks logits, and the sampling of some rows behind it, against the host's sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.torch.sampling import draw_keys as draw_keys_of
from phonograph.kernels.torch.sampling import mask_tokens
from phonograph.kernels.triton.sampling.bitmask import mask_logits
from phonograph.kernels.triton.sampling.sample import make_sample_scratch, sample
from phonograph.sampling.sampler import Sampler


class Allowed:
    """A grammar that always allows these words of bits."""

    ended = False

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def matcher(self) -> Allowed:
        return self

    def accept(self, token_id: int) -> None:
        pass

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        bitmask_RW[row] = self.words


def words_for(rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    return rng.integers(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=np.int64).astype(np.int32)


@pytest.mark.parametrize("vocab", [1, 31, 33, 2048, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_masks_the_rows_listed_only(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    around = torch.randn(5, vocab + 9, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    words = torch.from_numpy(words_for(4, vocab)).to(device)
    rows = torch.tensor([3, -1, 1, -1], dtype=torch.int32, device=device)
    expected = around.clone()
    for entry, row in ((0, 3), (2, 1)):
        expected[row, :vocab] = mask_tokens(around[row : row + 1, :vocab], words[entry : entry + 1])[0]
    mask_logits(around[:, :vocab], rows, words)
    assert torch.equal(around, expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 5}, {"top_p": 0.8}]
)
def test_rows_listed_get_the_tokens_of_the_host(
    settings: dict[str, Any], batch_invariant: bool, device: torch.device
) -> None:
    rows, vocab, ruled = 5, 2700, [4, 1, 2]
    slots = [rows - row for row in range(rows)]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(device)
    words = words_for(rows, vocab)
    sampler = Sampler(max_num_seqs=rows + 1, vocab_size=vocab, device=torch.device("cpu"), seed=1)
    for row, slot in enumerate(slots):
        grammar = Allowed(words[row]) if row in ruled else None
        sampler.load(slot, SamplingParams(seed=row, **settings), [], [], [], 0, grammar)
    given = sampler.kernel_parameters(np.array(slots))
    draw_keys = draw_keys_of(torch.from_numpy(given.stream_keys_N), torch.zeros(rows, dtype=torch.int64))
    expected = sampler.sample(logits.cpu(), slots, [0] * rows).token_ids

    def to_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype)

    listed = to_device(np.array([4, -1, 1, 2]), torch.int32)
    tokens = torch.full((rows,), -5, dtype=torch.int32, device=device)
    last_token = torch.full((rows + 2,), -7, dtype=torch.int32, device=device)
    num_computed = torch.full_like(last_token, -9)
    # Room for more rows than are listed, or fewer than the logits have.
    scratch = make_sample_scratch(9 if batch_invariant else 4, vocab, device)
    mask_logits(logits, listed, to_device(words[[4, 0, 1, 2]], torch.int32))
    sample(
        logits,
        to_device(np.array(slots), torch.int32),
        to_device(given.temperature_N, torch.float32),
        to_device(given.top_k_N, torch.int32),
        to_device(given.top_p_N, torch.float32),
        to_device(given.min_p_N, torch.float32),
        draw_keys.to(device),
        scratch,
        tokens,
        last_token,
        num_computed,
        torch.arange(rows, dtype=torch.int32, device=device) + 50,
        rows_G=listed,
        batch_invariant=batch_invariant,
    )
    assert tokens.tolist() == [expected[row] if row in ruled else -5 for row in range(rows)]
    wanted, lengths = [-7] * (rows + 2), [-9] * (rows + 2)
    for row in ruled:
        wanted[slots[row]], lengths[slots[row]] = expected[row], row + 50
    assert last_token.tolist() == wanted and num_computed.tolist() == lengths
    assert not scratch.counters.any(), "the next launch finds them as this one did"
