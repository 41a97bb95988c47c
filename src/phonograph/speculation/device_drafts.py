"""Drafts of a runner whose steps make and verify them on the device, before the host knows a step's tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from phonograph.core.batch import DraftCounts, ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.scheduling.draft_depths import DraftCounter
from phonograph.speculation.host_drafts import speculates


class DeviceDrafts:
    """Depth of the decodes of the next step; see `DraftDepths`.

    The host does not know how many drafts the device has found when it sends the step that verifies them. So it grants
    all of them rows. A row without a draft computes an arbitrary token, and its sample is dropped.

    Args:
        limits: most drafts of a decode, by the number of decodes in the step.
        max_num_logits: rows of logits of the largest step.

    Attributes:
        most: largest depth.
        max_num_logits: as above.
    """

    def __init__(self, limits: Sequence[int], *, max_num_logits: int) -> None:
        self.most = max(limits)
        self.max_num_logits = max_num_logits
        self._limits = limits
        self._counter = DraftCounter(self.most)

    @property
    def counts(self) -> DraftCounts:
        """Counts of the drafts so far."""
        return self._counter.counts

    def choose(self, decodes: Collection[Request]) -> Sequence[int]:
        """Return the depth of each decode, 0 where sampling keeps state by token."""
        depth = self._limits[len(decodes)]
        return [depth if speculates(one) else 0 for one in decodes]

    def learn(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Learn nothing: the depth does not depend on earlier steps."""

    def count(self, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Count the drafts of a step: for each decode those that the device had found, and those that were kept."""
        self._counter.add(verified, accepted)
