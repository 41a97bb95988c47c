"""Counts of the drafts of steps."""

from __future__ import annotations

import numpy as np

from phonograph.core.batch import DraftCounts


class DraftCounter:
    """Adds up the drafts of steps.

    Args:
        most: largest depth.
    """

    def __init__(self, most: int) -> None:
        self._decodes = self._verified = 0
        self._positions = np.arange(most)
        self._accepted = np.zeros(most, np.int64)

    def add(self, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Add the decodes of a step.

        Args:
            verified: drafts of each decode, int [N].
            accepted: those that were kept, int [N].
        """
        self._decodes += int(np.count_nonzero(verified))
        self._verified += int(verified.sum())
        self._accepted += (self._positions < accepted[:, None]).sum(0)

    @property
    def counts(self) -> DraftCounts:
        """Counts since the start."""
        by_position = tuple(self._accepted.tolist())
        return DraftCounts(self._decodes, self._verified, sum(by_position), by_position)
