"""Probability that drafts are accepted, by request and position: exponential means of what steps accepted."""

from __future__ import annotations

import numpy as np

_MEMORY = 100.0
"""Drafts at a position that a mean goes by, at most."""
_HALF_LIFE = 512
"""Steps without drafts after which earlier ones count half."""
_PRIOR_WEIGHT = 2.0
"""Drafts that the mean of other requests counts as."""
_PRIOR_MEMORY = 50.0
_FRESH = 8.0
"""Drafts of a request that change the mean of other requests: its first ones, so that each request counts alike."""
_FIRST_GUESS = 0.6
"""Probability at each position before any draft was verified."""
_DEVIATIONS = 0.5
"""Standard errors by which a mean may be too low in the hopeful probability."""
_SURPRISE = 1e-3
"""Probability of a run of equal outcomes below which the mean no longer holds, so that it starts anew."""


class DraftAcceptance:
    """Acceptance of the drafts of each slot. Position 0 is the first draft.

    A mean is the probability that a draft is accepted if those before it are. It begins with that of the first drafts
    of other requests. The first drafts of many steps may all be accepted, or all be rejected, against the mean: then
    the text has changed, and earlier drafts no longer count.

    Args:
        max_num_seqs: slots.
        most: positions.
    """

    def __init__(self, max_num_seqs: int, most: int) -> None:
        self._positions = np.arange(most)
        self._tried = np.zeros((max_num_seqs, most))
        self._kept = np.zeros((max_num_seqs, most))
        self._prior_tried = np.full(most, _PRIOR_WEIGHT)
        self._prior_kept = _FIRST_GUESS * self._prior_tried
        # The latest outcomes of first drafts that are equal, negative if they were rejections.
        self._run = np.zeros(max_num_seqs)

    def start(self, slot: int) -> None:
        """Forget what the slot's last request had accepted."""
        self._tried[slot] = self._kept[slot] = 0.0
        self._run[slot] = 0.0

    def fade(self, slot: int, steps: int) -> None:
        """Let earlier drafts of a slot count less after steps in which it had none."""
        weight = 0.5 ** (steps / _HALF_LIFE)
        self._tried[slot] *= weight
        self._kept[slot] *= weight

    def has_accepted(self, slots: np.ndarray) -> np.ndarray:
        """Return True for each slot that has accepted a draft lately, bool [N].

        Args:
            slots: int [N].
        """
        return self._kept[slots, 0] > 0

    def gains(self, slots: np.ndarray, *, hopeful: bool = False) -> np.ndarray:
        """Return the probability that a draft and all before it are accepted, float [N, most].

        Args:
            slots: int [N].
            hopeful: add a fraction of the standard error to each mean, which is large where few drafts were tried.
        """
        weight = self._tried[slots] + _PRIOR_WEIGHT
        means = (self._kept[slots] + _PRIOR_WEIGHT * self._prior_kept / self._prior_tried) / weight
        if hopeful:
            means = np.minimum(means + _DEVIATIONS * np.sqrt(means * (1 - means) / weight), 1.0)
        return np.cumprod(means, axis=1)

    def learn(self, slots: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Take the result of a step.

        Args:
            slots: int [N], each with drafts.
            depths: drafts of each.
            accepted: accepted drafts of each.
        """
        self._restart_where_changed(slots, accepted > 0)
        kept = self._positions < accepted[:, None]
        tried = self._positions < np.minimum(accepted + 1, depths)[:, None]
        fresh = tried & (self._tried[slots] < _FRESH)
        count = fresh.sum(0)
        weight = (1 - 1 / _PRIOR_MEMORY) ** count
        self._prior_tried = self._prior_tried * weight + count
        self._prior_kept = self._prior_kept * weight + (fresh & kept).sum(0)
        weight = np.where(tried, 1 - 1 / _MEMORY, 1.0)
        self._tried[slots] = self._tried[slots] * weight + tried
        self._kept[slots] = self._kept[slots] * weight + kept

    def _restart_where_changed(self, slots: np.ndarray, kept: np.ndarray) -> None:
        """Extend the runs of equal outcomes at the first position, and forget the means that these contradict."""
        run = self._run[slots]
        run = np.where(kept, np.maximum(run, 0) + 1, np.minimum(run, 0) - 1)
        mean = np.clip(self.gains(slots)[:, 0], 0.02, 0.98)
        changed = np.where(kept, mean, 1 - mean) ** np.abs(run) < _SURPRISE
        self._run[slots] = np.where(changed, 0, run)
        # The run but for its newest outcome, which `learn` adds, is what remains known.
        first = self._positions == 0
        self._tried[slots[changed]] = (np.abs(run[changed]) - 1)[:, None] * first
        self._kept[slots[changed]] = np.maximum(run[changed] - 1, 0)[:, None] * first
