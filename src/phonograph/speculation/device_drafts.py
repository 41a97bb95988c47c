"""Drafts of a runner whose steps make and verify them on the device, before the host knows a step's tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from phonograph.core.batch import DraftCounts, ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.scheduling.draft_budget import DraftBudget
from phonograph.scheduling.draft_caches import DraftCaches
from phonograph.scheduling.draft_counter import DraftCounter
from phonograph.speculation.masked_depths import bound_masked


class DeviceDrafts:
    """Depth of the decodes of the next step; see `DraftDepths`.

    The host does not know how many drafts the device has found when it sends the step that verifies them. So each
    decode may have all. A row without a draft computes an arbitrary token, and its sample is dropped. The budget takes
    it for a draft that was wrong, since it costs as much.

    Args:
        budget: chooses the depths.
        max_num_logits: rows of logits of the largest step.
        in_steps: a draft model makes the drafts.
        slow_masks: see `bound_masked`.
        waits_for_lengths: lengths must be exact on the host, so that nothing follows a step with drafts before its
            result.

    Attributes:
        budget: as above.
        caches: what the draft model lacks; None without one.
        most: largest depth.
        max_num_logits: as above.
    """

    def __init__(
        self,
        budget: DraftBudget,
        *,
        max_num_logits: int,
        slow_masks: np.ndarray,
        in_steps: bool = False,
        waits_for_lengths: bool = False,
    ) -> None:
        self.budget = budget
        self.caches = DraftCaches(budget) if in_steps else None
        self.most = budget.most
        self.max_num_logits = max_num_logits
        self._slow_masks = slow_masks
        self._waits_for_lengths = waits_for_lengths
        self._has_drafts = False  # the step that was chosen last
        self._counter = DraftCounter(self.most)

    @property
    def counts(self) -> DraftCounts:
        """Counts of the drafts that the device has found so far."""
        return self._counter.counts._replace(choices=self.budget.counts.choices)

    @property
    def waits(self) -> bool:
        """True if the host must know how many drafts of the last step are accepted; see `DraftDepths`."""
        return self._waits_for_lengths and self._has_drafts

    def choose(self, decodes: Collection[Request]) -> Sequence[int]:
        """Return the depth of each decode."""
        wants = self.budget.wants_drafts
        available = [
            self.most if one.whole_drafts and one.params.speculate and wants(one.slot) else 0 for one in decodes
        ]
        depths = self.budget.choose(decodes, bound_masked(available, decodes, self._slow_masks)).depths
        self._has_drafts = any(depths)
        return depths

    def learn(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Take the result of a step, and its duration."""
        self.budget.learn(batch, output, seconds)

    def count(self, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Count the drafts of a step: for each decode those that the device had found, and those that were kept."""
        self._counter.add(verified, accepted)
