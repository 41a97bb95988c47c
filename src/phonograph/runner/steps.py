"""How the engine hands steps to a runner: submitted one after another, their results taken later and in that order.

On a device a step takes longer than the host needs to prepare the next one, so a runner may allow steps to be in
flight while their tokens are not known yet. Whoever drives it needs no more than what is here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from phonograph.core.batch import NewSequence, ScheduledBatch, SlotFailure, StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler

NO_TOKEN = "the model's logits are not finite"


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


def load_sequences(
    batch: ScheduledBatch, live: dict[int, NewSequence], sampler: Sampler, failures: SlotFailures
) -> None:
    """Takes over which slots a step frees and loads.

    live:     the sequence of each slot, updated
    failures: receives the slots that cannot be loaded; they are sampled as greedy ones, and their tokens dropped
    """
    for slot in batch.freed:
        sampler.clear(slot)
        live.pop(slot, None)
    for new in batch.new:
        live[new.slot] = new
        prompt, output = new.token_ids[: new.prompt_len], new.token_ids[new.prompt_len :]
        ends, index, grammar = new.end_token_ids, new.sample_index, new.grammar
        if not failures.run(
            new.slot, "sampling parameters", sampler.load, new.slot, new.params, prompt, output, ends, index, grammar
        ):
            sampler.clear(new.slot)


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
