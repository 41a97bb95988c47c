"""Sampling on the CPU: the host samples the logits as soon as the step has run."""

from __future__ import annotations

from functools import partial

import numpy as np

from phonograph.core.batch import StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.draft_runner import DraftRunner, HeadFeatures
from phonograph.runner.step_inputs import StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.runner.steps import CompletedStep, SamplingPlan, take_tokens
from phonograph.sampling.accept import sample_runs
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler
from phonograph.speculation.host_drafts import HostDrafts
from phonograph.speculation.suffix_drafts import SuffixDrafts

_ALL_ON_HOST = SamplingPlan()


class CpuSampling:
    """Samples each step when it is submitted, and appends the tokens to their sequences.

    Args:
        sampler: of all rows.
        inputs: of the step.
        drafts: drafts that the steps verify; None for none.
        draft_runner: draft model that makes them; None where `drafts` has a proposer.
        head: features of the draft head that this samples; None for models.
    """

    shared_tiles = 0

    def __init__(
        self,
        sampler: Sampler,
        inputs: CpuInputs,
        drafts: HostDrafts | None = None,
        draft_runner: DraftRunner | None = None,
        head: HeadFeatures | None = None,
    ) -> None:
        self.lookahead = 0
        self._sampler = sampler
        self._inputs = inputs
        self.drafts = drafts
        self._draft_runner = draft_runner
        self._head = head

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Leave all rows to `finish`."""
        return _ALL_ON_HOST

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> CompletedStep:
        """Sample the rows that need a next token."""
        if self._head is not None:
            outputs = self._head.take(rows, outputs)
        output, batch = StepOutput(failures=failures.by_slot), rows.batch
        first_rows, num_rows = rows.logits_spans()
        draws, slots = rows.draws - (num_rows - 1), batch.slots
        if not rows.samples.all():
            first_rows, num_rows, draws = first_rows[rows.samples], num_rows[rows.samples], draws[rows.samples]
            slots = [slot for slot, samples in zip(slots, batch.samples, strict=True) if samples]
        drafts = self._inputs.drafts_behind(rows.num_logits)
        runs = sample_runs(self._sampler, outputs.logits, first_rows, num_rows, slots, draws, drafts)
        failures.by_slot.update(runs.failures)
        last = take_tokens(output, slots, [run[-1] for run in runs.token_ids], self._sampler.vocab_size)
        output.token_ids = [[*run[:-1], token_id] for run, token_id in zip(runs.token_ids, last, strict=True)]
        output.logprobs = runs.logprobs
        self._inputs.append_tokens(slots, output.token_ids)
        if self.drafts is not None and self._draft_runner is not None:
            self.drafts.start(batch.new)
            lengths = {slot: len(self._inputs.tokens_of(slot)) for slot in slots}
            self.drafts.found(self._draft_runner.draft(batch, lengths, self.drafts.wants), slots)
        elif isinstance(self.drafts, SuffixDrafts):
            for slot, made in zip(slots, self.drafts.follow(output, self.drafts.begin(batch)), strict=True):
                self._inputs.write_drafts(slot, np.array(made, np.int32))
        elif self.drafts is not None:
            for slot in slots:
                allows = partial(self._sampler.grammars.num_allowed, slot, failures=failures)
                self._inputs.write_drafts(slot, self.drafts.draft(slot, self._inputs.tokens_of(slot), allows))
        return CompletedStep(output, decision)

    def launch(self) -> None:
        """Do nothing: there is no kernel to compile."""

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs of a draft model; the host samples."""
        return 0 if self._draft_runner is None else self._draft_runner.runner.capture().num_graphs
