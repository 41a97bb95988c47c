"""Number of draft tokens of each request in a step: the wish of a proposer, and the limits of the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from phonograph.core.batch import DraftCounts, ScheduledBatch, StepOutput
from phonograph.core.limits import Limits
from phonograph.core.request import Request
from phonograph.scheduling.draft_caches import DraftCaches


class DraftDepths(Protocol):
    """Chooses how many draft tokens each decode verifies in the next step.

    A decode with d drafts has 1 + d tokens in the step, which accepts 1 to 1 + d of them.

    Attributes:
        most: largest depth.
        caches: what a draft model lacks that runs inside the steps; None without one.
        counts: of the drafts so far.
    """

    most: int
    caches: DraftCaches | None

    @property
    def counts(self) -> DraftCounts: ...

    @property
    def waits(self) -> bool:
        """True if the next step must not be scheduled before the results of all steps are taken."""
        ...

    def choose(self, decodes: Collection[Request]) -> Sequence[int]:
        """Return the depth of each decode, 0 to `most`."""
        ...

    def learn(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        """Take the result of a step.

        Steps come in their order. Later ones may have been chosen meanwhile.

        Args:
            batch: the step.
            output: its result.
            seconds: its duration, without the time in which an earlier step had the device.
        """
        ...


def granted_depths(depths: Sequence[int], decodes: Collection[Request], limits: Limits) -> list[int]:
    """Return the depths that a step can have.

    - The budget of tokens has one for each sequence, decode or not, and so has that of rows of logits. Drafts share
      what is left.
    - Tokens at and after the last position of a request are of no use, even if all steps in flight accept only one.
    - The tokens between both bounds of a request are at most a chunk, so that a sliding group has blocks for them.

    Args:
        depths: depth of each decode as chosen.
        decodes: running requests past their prompts, in the order of the step.
        limits: what runs at once.
    """
    room = min(limits.max_num_batched_tokens, limits.max_num_logits) - limits.max_num_seqs
    granted: list[int] = []
    for depth, request in zip(depths, decodes, strict=True):
        useful = request.max_len - 2 - request.min_computed
        between = request.max_computed - request.min_computed
        granted.append(max(0, min(depth, room, useful, limits.max_num_batched_tokens - 1 - between)))
        room -= granted[-1]
    return granted
