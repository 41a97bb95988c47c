"""Acceptance of drafts: a draft is kept if it is the token that sampling chooses there without drafts.

Each row of logits is sampled with the noise of its own draw, so the text is that of decoding without drafts, for every
filter and seed. This is the coupling of Daliri et al. 2024 ("Coupling without Communication and Drafter-Invariant
Speculative Decoding").
"""

from __future__ import annotations

import numpy as np


def accepted_runs(token_ids: list[int], owners: np.ndarray, drafts: np.ndarray) -> list[list[int]]:
    """Return the tokens that each sequence gets.

    A sequence gets the token of its first row. It gets that of each further row if the draft that the row was computed
    for is the token before.

    Args:
        token_ids: token of each row of logits, L.
        owners: sequence of each row, int64 [L], ascending.
        drafts: draft behind the token of each row, int64 [L]; the rest of a sequence's last row is not read.
    """
    runs: list[list[int]] = []
    before, accepts = -1, False
    for owner, token_id, draft in zip(owners.tolist(), token_ids, drafts.tolist(), strict=True):
        if owner != before:
            runs.append([token_id])
            before, accepts = owner, token_id == draft
        elif accepts:
            runs[-1].append(token_id)
            accepts = token_id == draft
    return runs
