"""Sampling on the CPU: the host samples the logits as soon as the step has run."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.core.batch import StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.draft_runner import DraftRunner
from phonograph.runner.step_inputs import StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.runner.steps import CompletedStep, SamplingPlan, take_tokens
from phonograph.sampling.accept import accepted_runs
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
    """

    def __init__(
        self,
        sampler: Sampler,
        inputs: CpuInputs,
        drafts: HostDrafts | None = None,
        draft_runner: DraftRunner | None = None,
    ) -> None:
        self.lookahead = 0
        self._sampler = sampler
        self._inputs = inputs
        self.drafts = drafts
        self._draft_runner = draft_runner

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Leave all rows to `finish`."""
        return _ALL_ON_HOST

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> CompletedStep:
        """Sample the rows that need a next token."""
        output, batch = StepOutput(failures=failures.by_slot), rows.batch
        slots, draws, owners = batch.slots, rows.draws, rows.owners
        has_drafts = rows.num_logits > batch.num_reqs
        if has_drafts:
            draws = rows.draws_of_logits()
        if rows.samples.all():
            logits_NV = outputs.logits[: rows.num_logits]
        else:
            chosen = np.flatnonzero(rows.samples[owners])
            logits_NV, draws, owners = outputs.logits[torch.from_numpy(chosen)], draws[chosen], owners[chosen]
            slots = [slot for slot, samples in zip(slots, batch.samples, strict=True) if samples]
        of_rows = rows.slots[owners].tolist() if has_drafts else slots
        sampled = self._sampler.sample(logits_NV, of_rows, draws)
        failures.by_slot.update(sampled.failures)
        runs = [[token_id] for token_id in sampled.token_ids]
        if has_drafts:
            # Rows of decodes are tokens of the step, and come first.
            runs = accepted_runs(sampled.token_ids, owners, self._inputs.drafts_behind(len(owners)))
        last = take_tokens(output, slots, [run[-1] for run in runs], self._sampler.vocab_size)
        output.token_ids = [[*run[:-1], token_id] for run, token_id in zip(runs, last, strict=True)]
        self._inputs.append_tokens(slots, output.token_ids)
        if self.drafts is not None and self._draft_runner is not None:
            self.drafts.start(batch.new)
            lengths = {slot: len(self._inputs.tokens_of(slot)) for slot in slots}
            self.drafts.found(self._draft_runner.draft(batch, lengths, self.drafts.wants), slots)
        elif isinstance(self.drafts, SuffixDrafts):
            self.drafts.begin(batch)
            for slot, made in zip(slots, self.drafts.follow(output), strict=True):
                self._inputs.write_drafts(slot, np.array(made, np.int32))
        elif self.drafts is not None:
            for slot in slots:
                self._inputs.write_drafts(slot, self.drafts.draft(slot, self._inputs.tokens_of(slot)))
        output.logprobs = {slot: [entry] for slot, entry in sampled.logprobs.items()}
        return CompletedStep(output, decision)

    def launch(self) -> None:
        """Do nothing: there is no kernel to compile."""

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs of a draft model; the host samples."""
        return 0 if self._draft_runner is None else self._draft_runner.runner.capture().num_graphs
