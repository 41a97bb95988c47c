"""Drafts of a runner whose steps make and verify them on the device, before the host knows a step's tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phonograph.core.batch import DraftCounts
from phonograph.core.request import Request
from phonograph.speculation.host_drafts import speculates


class DeviceDrafts:
    """Depth of the decodes of the next step; see `DraftDepths`.

    The host does not know how many drafts the device has found when it sends the step that verifies them. So it grants
    all of them rows. A row without a draft computes an arbitrary token, and its sample is dropped.

    Args:
        most: most drafts of a sequence.
        max_num_logits: rows of logits of the largest step.
    """

    def __init__(self, *, most: int, max_num_logits: int) -> None:
        self.most = most
        self.max_num_logits = max_num_logits
        self.counts = DraftCounts()

    def choose(self, decodes: Collection[Request]) -> Sequence[int]:
        """Return the depth of each decode, 0 where sampling keeps state by token."""
        return [self.most if speculates(one) else 0 for one in decodes]

    def count(self, decodes: int, verified: int, accepted: int) -> None:
        """Count the drafts of a step, and the decodes that had any."""
        before = self.counts
        self.counts = DraftCounts(before.decodes + decodes, before.verified + verified, before.accepted + accepted)
