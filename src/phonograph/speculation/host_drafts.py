"""Drafts of a runner whose host samples: they are made when a step's tokens are known, and verified by the next one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from phonograph.core.batch import DraftCounts
from phonograph.core.request import Request


class Proposer(Protocol):
    """Guesses the next tokens of a sequence."""

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return up to `most` tokens that may follow.

        Args:
            token_ids: the sequence, int32 [T].
            most: largest number of tokens.
        """
        ...


class HostDrafts:
    """Number of drafts that each slot holds, which is the depth of its sequence in the next step.

    Args:
        proposer: makes the drafts.
        most: most drafts of a sequence.
        max_num_seqs: slots.

    Attributes:
        most: as above.
        counts: of the drafts so far.
    """

    def __init__(self, proposer: Proposer, *, most: int, max_num_seqs: int) -> None:
        self.most = most
        self.counts = DraftCounts()
        self._proposer = proposer
        self._depths = [0] * max_num_seqs

    def choose(self, decodes: Collection[Request]) -> Sequence[int]:
        """Return the depth of each decode: the number of its drafts, or 0 where sampling keeps state by token."""
        return [self._depths[one.slot] if speculates(one) else 0 for one in decodes]

    def draft(self, slot: int, token_ids: np.ndarray) -> np.ndarray:
        """Return drafts for a sequence, which its next step may verify."""
        drafts = self._proposer.propose(token_ids, self.most)
        self._depths[slot] = len(drafts)
        return drafts

    def count(self, decodes: int, verified: int, accepted: int) -> None:
        """Count the drafts of a step, and the decodes that had any."""
        before = self.counts
        self.counts = DraftCounts(before.decodes + decodes, before.verified + verified, before.accepted + accepted)


def speculates(request: Request) -> bool:
    """Return True if a request's tokens can be sampled side by side: no draw changes what the next one reads."""
    params = request.params
    return request.grammar is None and not (
        params.has_penalties or params.logit_bias or params.min_tokens or params.logprobs is not None
    )
