"""Sampling of rows with a grammar on the device: mask, sample and merge, in a small graph of their own.

The step's own graph leaves these rows out. Their masks need the tokens of the step before, which the host has once that
is over; by then the device is in this step's forward pass, beside which the host makes the masks, and this graph
follows.

Not run on a GPU yet, so CudaRunner still samples these rows by the host's sampler; in Triton's interpreter the tokens
are the same (tests/kernels/test_masked_sampling.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from phonograph.kernels.triton.bitmask import mask_logits
from phonograph.kernels.triton.sampling import SampleScratch, sample
from phonograph.runner.grammar_masks import bitmask_words


class RowParameters(NamedTuple):
    """By row, as the step's own sampling reads them: float32, int32, float32, float32, int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draw_keys: torch.Tensor


class MaskedSampling:
    """Static buffers for up to `max_rows` rows of logits, and what a graph captures of them.

    bitmask_np: int32 [rows, words], pinned on a GPU; the caller writes the rows that it names in `upload`
    """

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        words = bitmask_words(vocab_size)
        self._host_bitmask = torch.full((max_rows, words), -1, dtype=torch.int32, pin_memory=pinned)
        self._host_slots = torch.full((max_rows,), -1, dtype=torch.int32, pin_memory=pinned)
        self._bitmask = torch.full((max_rows, words), -1, dtype=torch.int32, device=device)
        self._slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.bitmask_np = self._host_bitmask.numpy()
        self._slots_np = self._host_slots.numpy()

    def upload(self, rows: np.ndarray, slots: np.ndarray) -> None:
        """Starts the copies of what was written for these rows; all others are left out.

        The copies of the step before must be over, as they are once its tokens have been read.
        """
        self._slots_np.fill(-1)
        self._slots_np[rows] = slots
        last = int(rows.max()) + 1
        self._bitmask[:last].copy_(self._host_bitmask[:last], non_blocking=True)
        self._slots.copy_(self._host_slots, non_blocking=True)

    def run(
        self,
        logits_NV: torch.Tensor,
        parameters: RowParameters,
        scratch: SampleScratch,
        tokens_N: torch.Tensor,
        last_token_R: torch.Tensor,
    ) -> None:
        """Masks and samples the rows uploaded, into `tokens_N` and their slots' last tokens; others stay.

        What is captured, once for each number of rows of logits. The logits of the rows are overwritten.
        """
        num_rows = logits_NV.shape[0]
        slots_N, drawn_N = self._slots[:num_rows], self._tokens[:num_rows]
        mask_logits(logits_NV, slots_N, self._bitmask[:num_rows])
        sample(
            logits_NV,
            slots_N,
            parameters.temperature[:num_rows],
            parameters.top_k[:num_rows],
            parameters.top_p[:num_rows],
            parameters.min_p[:num_rows],
            parameters.draw_keys[:num_rows],
            scratch,
            drawn_N,
            last_token_R,
        )
        torch.where(slots_N >= 0, drawn_N, tokens_N, out=tokens_N)
