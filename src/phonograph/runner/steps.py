"""How the engine hands steps to a runner: submitted one after another, their results taken later and in that order.

On a device a step takes longer than the host needs to prepare the next one, so a runner may allow steps to be in
flight while their tokens are not known yet. Whoever drives it needs no more than what is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phonograph.core.batch import ScheduledBatch, SlotFailure, StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.runner.step_inputs import KernelRows, StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.sampling.failures import SlotFailures

NO_TOKEN = "the model's logits are not finite"


class PendingStep(Protocol):
    """A step that was submitted.

    decision: the graph that runs it, and why
    output:   what is known of its result so far
    """

    decision: Decision
    output: StepOutput

    def result(self) -> StepOutput:
        """What it brought, waited for if need be. Called once, after the results of all earlier steps were taken."""
        ...


class StepRunner(Protocol):
    """Runs steps in the order in which they are submitted.

    A later step must not take anything from an earlier one that its result needs: two steps in flight may use one slot
    for two requests, the second freeing it before it loads it.

    counts:    how many steps each kind of decision had, counted when they are submitted
    lookahead: how many steps may be in flight beside the one whose result is waited for; 0: a step is taken at once
    """

    counts: Counter[str]
    lookahead: int

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Starts a step. At most `lookahead` + 1 are in flight."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The part of a runner that samples each row of a step. Rows of the host are in none.

    in_step: rows that the step's own kernels sample, or None where the host samples all
    masked:  numbers of the rows with a grammar that are masked and sampled on the device behind the step
    on_host: numbers of the rows whose logits the host needs, beside kernels that sample the others
    """

    in_step: KernelRows | None = None
    masked: Sequence[int] = ()
    on_host: Sequence[int] = ()


class Sampling(Protocol):
    """Sampling of a runner's steps.

    lookahead: as in `StepRunner`
    """

    lookahead: int

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Decide what samples each row, before the step is written."""
        ...

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> PendingStep:
        """Sample what the step did not sample itself, and hand out the step.

        Args:
            rows: the step, which has been sent to the device.
            plan: made for it.
            outputs: what the step leaves.
            decision: the graph that runs it; the step's own decision adds how rows are sampled behind it.
            failures: receives the slots for which the work raises.
        """
        ...

    def launch(self) -> None:
        """Launch each kernel that `finish` may need, on whatever its inputs hold."""
        ...

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs that `finish` replays; returns how many."""
        ...


@dataclass(slots=True)
class CompletedStep:
    """A step that had run when it was submitted."""

    output: StepOutput
    decision: Decision

    def result(self) -> StepOutput:
        return self.output


def take_tokens(output: StepOutput, slots: list[int], token_ids: list[int], vocab_size: int) -> None:
    """Puts the tokens of a step into its output; slots whose token is none of the vocabulary fail.

    slots, token_ids: as in `StepOutput`; -1 where there was no token to choose
    """
    output.slots, output.token_ids = slots, token_ids
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        output.token_ids = [token_id if 0 <= token_id < vocab_size else 0 for token_id in token_ids]
        for slot, token_id in zip(slots, token_ids, strict=True):
            if token_id == -1:
                failure = SlotFailure("sampling", NO_TOKEN, no_token=True)
            elif not 0 <= token_id < vocab_size:
                problem = f"the device returned {token_id}, which is no token id (0 to {vocab_size - 1})"
                failure = SlotFailure("sampling", problem)
            else:
                continue
            output.failures.setdefault(slot, failure)
