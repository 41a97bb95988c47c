"""How the engine hands steps to a runner: submitted one after another, their results taken later and in that order.

On a device a step takes longer than the host needs to prepare the next one, so a runner may allow steps to be in
flight while their tokens are not known yet. Whoever drives it needs no more than what is here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from phonograph.batch import ScheduledBatch, StepOutput
from phonograph.graphs.dispatch import Decision


class PendingStep(Protocol):
    """A step that was submitted."""

    @property
    def decision(self) -> Decision:
        """The graph that runs it, and why."""
        ...

    def result(self) -> StepOutput:
        """What it brought, waited for if need be. Called once, after the results of all earlier steps were taken."""
        ...


class StepRunner(Protocol):
    """Runs steps in the order in which they are submitted.

    A later step must not take anything from an earlier one that its result needs: two steps in flight may use one slot
    for two requests, the second freeing it before it loads it.

    counts: how many steps each kind of decision had, counted when they are submitted
    """

    counts: Counter[str]

    @property
    def lookahead(self) -> int:
        """How many steps may be in flight beside the one whose result is waited for; 0: a step is taken at once."""
        ...

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Starts a step. At most `lookahead` + 1 are in flight."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that had run when it was submitted."""

    output: StepOutput
    decision: Decision

    def result(self) -> StepOutput:
        return self.output
