"""Drafts of a runner whose host samples: they are made when a step's tokens are known, and verified by the next one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from phonograph.core.batch import DraftCounts, NewSequence, ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.scheduling.draft_budget import DraftBudget
from phonograph.scheduling.draft_caches import DraftCaches


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
    """Number of drafts that each slot holds, and the budget that chooses how many of them the next step verifies.

    Args:
        proposer: makes the drafts; None where a draft model does.
        budget: chooses the depths.
        max_num_seqs: slots.

    Attributes:
        budget: as above.
        most: most drafts of a sequence.
    """

    def __init__(self, proposer: Proposer | None, budget: DraftBudget, *, max_num_seqs: int) -> None:
        self.budget = budget
        self.most = budget.most
        self.caches: DraftCaches | None = None  # A draft model on the host computes what it lacks.
        self._proposer = proposer
        self._num_found = [0] * max_num_seqs
        self._plain: set[int] = set()

    @property
    def counts(self) -> DraftCounts:
        """Counts of the drafts so far."""
        return self.budget.counts

    @property
    def waits(self) -> bool:
        """False: the runner has no steps in flight; see `DraftDepths`."""
        return False

    def choose(self, decodes: Collection[Request]) -> Sequence[int]:
        """Return the depth of each decode: 0 to the number of its drafts."""
        return self.budget.choose(decodes, self._available(decodes)).depths

    def _available(self, decodes: Collection[Request]) -> list[int]:
        return [self._num_found[one.slot] if one.params.speculate else 0 for one in decodes]

    def learn(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Take the result of a step, and its duration."""
        self.budget.learn(batch, output, seconds)

    def draft(self, slot: int, token_ids: np.ndarray, num_allowed: Callable[[list[int]], int]) -> np.ndarray:
        """Return drafts for a sequence, which its next step may verify. While it rests there are none.

        Args:
            slot: of the sequence.
            token_ids: its tokens, int32 [T].
            num_allowed: returns how many of some drafts its grammar allows one after another; the rest is left out.
        """
        assert self._proposer is not None
        drafts = self._proposer.propose(token_ids, self.most) if self.budget.wants_drafts(slot) else token_ids[:0]
        drafts = drafts[: num_allowed(drafts.tolist())]
        self._num_found[slot] = len(drafts)
        return drafts

    def start(self, new: Iterable[NewSequence]) -> None:
        """Note which of the sequences that start can have drafts."""
        for one in new:
            (self._plain.discard if one.params.speculate else self._plain.add)(one.slot)

    def wants(self, slot: int) -> bool:
        """Return True if the next step may verify drafts of a sequence."""
        return slot not in self._plain and self.budget.wants_drafts(slot)

    def found(self, counts: Mapping[int, int], slots: Iterable[int]) -> None:
        """Note the number of drafts that a draft model made for each of the slots that a step sampled."""
        for slot in slots:
            self._num_found[slot] = counts.get(slot, 0)
