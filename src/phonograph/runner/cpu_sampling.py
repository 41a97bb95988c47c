"""Sampling on the CPU: the host samples the logits as soon as the step has run."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.core.batch import StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.step_inputs import StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.runner.steps import CompletedStep, SamplingPlan, take_tokens
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler

_ALL_ON_HOST = SamplingPlan()


class CpuSampling:
    """Samples each step when it is submitted, and appends the tokens to their sequences."""

    def __init__(self, sampler: Sampler, inputs: CpuInputs) -> None:
        self.lookahead = 0
        self._sampler = sampler
        self._inputs = inputs

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Leave all rows to `finish`."""
        return _ALL_ON_HOST

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> CompletedStep:
        """Sample the rows that need a next token."""
        output, batch = StepOutput(failures=failures.by_slot), rows.batch
        if rows.samples.all():
            slots, logits_NV, draws = batch.slots, outputs.logits[: batch.num_reqs], rows.draws
        else:
            chosen = np.flatnonzero(rows.samples)
            slots = [batch.slots[row] for row in chosen.tolist()]
            logits_NV, draws = outputs.logits[torch.from_numpy(chosen)], rows.draws[chosen]
        sampled = self._sampler.sample(logits_NV, slots, draws)
        failures.by_slot.update(sampled.failures)
        token_ids = take_tokens(output, slots, sampled.token_ids, self._sampler.vocab_size)
        self._inputs.append_tokens(slots, token_ids)
        output.logprobs = {slot: [entry] for slot, entry in sampled.logprobs.items()}
        return CompletedStep(output, decision)

    def launch(self) -> None:
        """Do nothing: there is no kernel to compile."""

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture nothing: the host samples."""
        return 0
