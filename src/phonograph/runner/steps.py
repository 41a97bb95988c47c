"""Protocol between engine and runner: steps are submitted in order, and their results are taken later in that order.

A step on a device takes longer than the host needs to schedule the next one. A runner may therefore have several steps
in flight whose tokens are not known yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from phonograph.core.batch import ScheduledBatch, SlotFailure, StepOutput
from phonograph.core.pooling_params import TOKEN_TASKS, PoolingParams
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.models.heads.pooler_spec import Pooler
from phonograph.models.modules.step_model import StepModel
from phonograph.runner.step_inputs import KernelRows, StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.pooled_rows import finish_prompts
from phonograph.sampling.sampler import KernelParameters
from phonograph.speculation.device_drafts import DeviceDrafts
from phonograph.speculation.host_drafts import HostDrafts

NO_TOKEN = "the model's logits are not finite"


class PendingStep(Protocol):
    """A step that was submitted.

    decision: the graph that runs it, with the reason
    output:   the part of the result that is known so far
    """

    decision: Decision
    output: StepOutput

    def result(self) -> StepOutput:
        """Wait for the step and return its result. Call it once, after the results of all earlier steps were taken."""
        ...


class StepRunner(Protocol):
    """Runs steps in the order of submission.

    A later step must not change what the result of an earlier one needs: two steps in flight may use one slot for two
    requests, as the second frees the slot before it loads it.

    counts:    number of steps by kind of decision, counted at submission
    lookahead: steps that may be in flight beside the one whose result is awaited; 0 means that none are
    """

    counts: Counter[str]
    lookahead: int

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step. At most `lookahead` + 1 are in flight."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Assignment of a step's rows to samplers.

    in_step: rows that the step's own kernels sample, or None if the host samples all rows
    masked:  numbers of the rows with a grammar that are masked and sampled on the device behind the step
    """

    in_step: KernelRows | None = None
    masked: Sequence[int] = ()


class Sampling(Protocol):
    """Sampling of a runner's steps.

    lookahead: as in `StepRunner`
    drafts:    drafts that the steps verify, or None without speculation
    shared_tiles: tiles of keys of shared prefixes, in a layer of the latest step whose tokens were read
    """

    lookahead: int

    @property
    def drafts(self) -> HostDrafts | DeviceDrafts | None: ...

    @property
    def shared_tiles(self) -> int: ...

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Decide which sampler takes each row, before the step is written."""
        ...

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> PendingStep:
        """Sample what the step did not sample itself, and return the pending step.

        Args:
            rows: the step, which was sent to the device.
            plan: result of `plan` for it.
            outputs: tensors that the step leaves.
            decision: the graph that runs it. The pending step's decision adds the sampling behind it.
            failures: receives the slots whose work raises.
        """
        ...

    def launch(self) -> None:
        """Launch each kernel that `finish` may need, on arbitrary inputs."""
        ...

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs that `finish` replays; return their number."""
        ...


@dataclass(slots=True)
class CompletedStep:
    """A step that was complete when it was submitted."""

    output: StepOutput
    decision: Decision

    def result(self) -> StepOutput:
        return self.output


def take_tokens(output: StepOutput, slots: list[int], token_ids: list[int], vocab_size: int) -> list[int]:
    """Store the tokens of a step in its output, one for each slot. Slots whose token is outside the vocabulary fail.

    Args:
        output: receives them.
        slots: as in `StepOutput`.
        token_ids: token of each slot; -1 if there was none to choose.
        vocab_size: token ids are below it.

    Returns:
        The token of each slot, 0 in place of those outside the vocabulary.
    """
    stored = token_ids
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        stored = [token_id if 0 <= token_id < vocab_size else 0 for token_id in token_ids]
        for slot, token_id in zip(slots, token_ids, strict=True):
            if token_id == -1:
                failure = SlotFailure("sampling", NO_TOKEN, no_token=True)
            elif not 0 <= token_id < vocab_size:
                problem = f"the device returned {token_id}; token ids are 0 to {vocab_size - 1}"
                failure = SlotFailure("sampling", problem)
            else:
                continue
            output.failures.setdefault(slot, failure)
    output.slots = slots
    output.token_ids = [[token_id] for token_id in stored]
    return stored


@dataclass(slots=True)
class RowsInFlight:
    """A step of a model that generates nothing, whose rows are on their way to the host.

    rows:     of the prompts, or of all tokens, on the host
    of_tokens: rows of all tokens, for requests that ask for them; None if there are none
    arrived:  event after the copies, or None if they are complete
    """

    batch: ScheduledBatch
    decision: Decision
    output: StepOutput
    pooler: Pooler
    params: dict[int, PoolingParams]
    rows: torch.Tensor
    of_tokens: torch.Tensor | None
    arrived: torch.cuda.Event | None

    def result(self) -> StepOutput:
        """Wait for the rows, and return the results of the prompts that end with the step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        output, batch, pooler = self.output, self.batch, self.pooler
        rows, tokens = self.rows.numpy(), None if self.of_tokens is None else self.of_tokens.numpy()
        tokens = rows if pooler.pooling == "all" else tokens
        prompts: dict[int, np.ndarray] = {}
        end = 0
        for row, (slot, length) in enumerate(zip(batch.slots, batch.query_lens, strict=True)):
            end += length
            if not batch.samples[row]:
                continue
            if tokens is not None and (pooler.pooling == "all" or self.params[slot].task in TOKEN_TASKS):
                prompts[slot] = tokens[end - length : end]
            else:
                prompts[slot] = rows[row]
        failures = SlotFailures()
        failures.by_slot = output.failures
        output.slots, output.token_ids = [*prompts], [[] for _ in prompts]
        output.pooled = finish_prompts(
            prompts, self.params, pooler.activation, activates=pooler.activates, failures=failures
        )
        return output


class Pooling:
    """Takes the rows of each step of a model that generates nothing; see `Sampling`.

    A rank that does not sample has one too. It finishes no step.

    Args:
        model: the model.
        lookahead: as in `StepRunner`.
    """

    drafts = None
    shared_tiles = 0

    def __init__(self, model: StepModel, *, lookahead: int = 0) -> None:
        self.lookahead = lookahead
        self._model = model
        self._params: dict[int, PoolingParams] = {}

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Sample nothing. Sequences that start are loaded all the same."""
        starts = KernelParameters.greedy(len(rows.batch.new))
        return SamplingPlan(KernelRows(np.zeros_like(rows.samples), starts))

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> RowsInFlight:
        """Start to copy the rows to the host."""
        batch, pooler = rows.batch, self._model.spec.pooler
        assert pooler is not None
        self._params.update((new.slot, new.pooling) for new in batch.new if new.pooling is not None)
        params = {slot: self._params[slot] for slot in batch.slots}
        of_tokens = None
        if pooler.pooling != "all" and any(one.task in TOKEN_TASKS for one in params.values()):
            of_tokens = _to_host(self._model.token_rows(outputs.hidden))
        host = _to_host(outputs.logits)
        arrived = None
        if outputs.logits.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        output = StepOutput(failures=failures.by_slot)
        return RowsInFlight(batch, decision, output, pooler, params, host, of_tokens, arrived)

    def launch(self) -> None:
        """Do nothing: the step has all kernels."""

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture nothing: rows are finished on the host."""
        return 0


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which the device may still be writing."""
    return rows.to("cpu", non_blocking=True) if rows.is_cuda else rows.clone()
