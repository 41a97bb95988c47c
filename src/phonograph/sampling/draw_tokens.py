"""Random draws of tokens, with rows grouped by their parameters.

Top-k ranks k candidates and draws noise for those only. Top-p ranks the most likely tokens first and sorts a whole row
only if these do not reach p. Plain temperature sampling draws noise for the whole vocabulary, without sorting. The
group of a row depends only on its own parameters and logits, so other rows cannot change its draws.
"""

from __future__ import annotations

import numpy as np
import torch

from phonograph.kernels.torch import sampling

_HEAD = 1024
"""Candidates to rank before a whole row is sorted."""


def draw_tokens(
    batch: sampling.Rows, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, tokens_N: torch.Tensor
) -> None:
    """Draw tokens for the rows that are not greedy, into `tokens_N`.

    Args:
        batch: the rows; those of greedy rows are not read.
        temperature: float64 [N] on the host, as are the others; 0 is greedy.
        top_k: int64; 0 keeps all.
        top_p: 1 keeps all.
        tokens_N: int64.
    """
    vocab_size = batch.logits_NV.shape[-1]

    def by_top_k(rows: sampling.Rows) -> torch.Tensor:
        return sampling.sample_ranked(rows, int(top_k[narrow].max()))

    def by_head(rows: sampling.Rows) -> torch.Tensor:
        tokens_C, holds_C = sampling.sample_nucleus(rows, _HEAD)
        if not holds_C.all():
            tokens_C[~holds_C] = sampling.sample_ranked(rows.take(~holds_C), vocab_size)
        return tokens_C

    def by_all(rows: sampling.Rows) -> torch.Tensor:
        return sampling.sample_ranked(rows, vocab_size)

    drawn = temperature > 0.0
    nucleus = drawn & (top_k == 0) & (top_p < 1.0) & (vocab_size > _HEAD)
    full = drawn & (top_k == 0) & (top_p == 1.0)
    narrow = drawn & (top_k > 0) & (top_k <= _HEAD)
    groups = (full, narrow, nucleus, drawn & ~nucleus & ~full & ~narrow)
    for group, draw in zip(groups, (sampling.sample_full, by_top_k, by_head, by_all), strict=True):
        if group.any():
            rows_G = torch.from_numpy(np.flatnonzero(group)).to(batch.logits_NV.device)
            tokens_N[rows_G] = draw(batch.take(rows_G))
