"""Inputs of one of several ranks, each on a GPU.

Rank 0 samples. At the head of each step, what its device knows of the sequences is sent to the others: last tokens,
lengths and drafts. They make their uploads from the arrays that rank 0 sends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.graphs.modes import GraphKey
from phonograph.kernels.ranks import Ranks
from phonograph.runner.cuda.cuda_inputs import CudaInputs
from phonograph.runner.step_inputs import KernelRows, StepRows
from phonograph.sampling.sampler import KernelParameters

_ALIGN = 4
"""Alignment of the parts of what is sent, in words: 16 bytes."""


class CudaRankInputs(CudaInputs):
    """Inputs of a rank; see `CudaInputs`.

    Args:
        ranks: connection with the others.
        settings: as of `CudaInputs`.
    """

    def __init__(self, ranks: Ranks, **settings: Any) -> None:
        super().__init__(**settings)
        self._ranks = ranks
        parts = len(self.tokens), len(self.counts), self.drafts.numel()
        num_seqs, num_results = len(self.state.last_token), -(-sum(parts) // _ALIGN) * _ALIGN
        stride = -(-num_seqs // _ALIGN) * _ALIGN
        # Drafts, last tokens and lengths are one after another, so that one broadcast sends them.
        words = torch.zeros(num_results + 2 * stride, dtype=torch.int32, device=self.results.device)
        self.results = words[: sum(parts)]
        self.tokens, self.counts, drafts = self.results.split(parts)
        last_token, num_computed = words[num_results:].view(2, stride)[:, :num_seqs]
        drafts = drafts.view(self.drafts.shape)
        self.state = self.state._replace(last_token=last_token, num_computed=num_computed, drafts=drafts)
        self._sent = words[sum(parts[:2]) :]

    def prepare(self, *, num_reqs: int, num_tokens: int) -> None:
        """Take over the state of rank 0, and launch the prepare kernel; see `CudaInputs`."""
        self._ranks.broadcast(self._sent)
        super().prepare(num_reqs=num_reqs, num_tokens=num_tokens)

    def host_tokens(self, rows: StepRows) -> np.ndarray:
        """Return the tokens that the host has; see `RankInputs`."""
        token_ids_T = np.full(rows.batch.num_tokens, -1, np.int32)
        firsts = (np.cumsum(rows.query_lens) - rows.query_lens).tolist()
        for row, tokens in self._known_tokens(rows).items():
            token_ids_T[firsts[row] : firsts[row] + len(tokens)] = tokens
        return token_ids_T

    def write_tokens(
        self, rows: StepRows, token_ids_T: np.ndarray, starts_S3: np.ndarray, key: GraphKey | None
    ) -> tuple[CommonMetadata, ...]:
        """Send a step of rank 0 to this GPU; see `RankInputs`."""
        ends = np.cumsum(rows.query_lens)
        firsts = ends - rows.query_lens
        (known,) = np.nonzero(token_ids_T[firsts] >= 0)
        tokens = {row: token_ids_T[firsts[row] : ends[row]] for row in known.tolist()}
        starts = {slot: (prompt_len, max_len) for slot, prompt_len, max_len in starts_S3.tolist()}
        sampling = KernelRows(rows.samples, KernelParameters.greedy(len(starts)))
        return self._send(rows, key, tokens, starts, sampling)
