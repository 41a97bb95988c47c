"""Sampling on a GPU: in the step, behind the step, or on the host.

Kernels of the step sample most rows, and their tokens are read after the next step has been sent. Two kinds of rows
make the host wait for the device. The mask of a row with a grammar needs the token of the step before; it is filled
while the device runs this step. A row that no kernel can sample (penalties, bias, min_tokens, log-probabilities) needs
this step's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.triton.step.accept_drafts import DRAFTS_SHIFT
from phonograph.runner.cuda.cuda_inputs import CudaInputs
from phonograph.runner.cuda.masked_sampling import MaskedSampling
from phonograph.runner.cuda.token_ring import TokenRing
from phonograph.runner.step_inputs import KernelRows, StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.runner.steps import SamplingPlan, take_tokens
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler
from phonograph.speculation.device_drafts import DeviceDrafts
from phonograph.speculation.suffix_drafts import SuffixDrafts

LOOKAHEAD = 1
RING_DEPTH = LOOKAHEAD + 2
"""Steps whose tokens the ring holds: those in flight, and the one being sent."""


@dataclass(slots=True)
class StepInFlight:
    """A step on the device. `output` has what is known at submission; `result` adds the tokens."""

    output: StepOutput
    decision: Decision
    batch: ScheduledBatch
    ring: TokenRing
    ticket: int
    vocab_size: int
    drafts: DeviceDrafts | SuffixDrafts | None
    inputs: CudaInputs

    def result(self) -> StepOutput:
        """Wait until the device has finished the step, and return its output."""
        output, batch = self.output, self.batch
        if self.drafts is not None:
            return self._accepted(self.drafts)
        tokens: list[int] = self.ring.read(self.ticket)[: batch.num_reqs].tolist()
        slots = batch.slots
        if not all(batch.samples):
            rows = [row for row, samples in enumerate(batch.samples) if samples]
            slots, tokens = [slots[row] for row in rows], [tokens[row] for row in rows]
        take_tokens(output, slots, tokens, self.vocab_size)
        return output

    def _accepted(self, drafts: DeviceDrafts | SuffixDrafts) -> StepOutput:
        """Return the output of a step of an engine with drafts: runs of tokens, as `accept` counted them."""
        output, batch, results = self.output, self.batch, self.ring.read(self.ticket)
        num_logits = batch.num_logits
        tokens: list[int] = results[:num_logits].tolist()
        counts = results[drafts.max_num_logits :][: batch.num_reqs]
        lengths = counts & (1 << DRAFTS_SHIFT) - 1
        rows = [*batch.query_lens[: batch.num_decodes], *[1] * (batch.num_reqs - batch.num_decodes)]
        starts = [*accumulate(rows, initial=0)]
        runs = [
            (slot, tokens[start : start + length])
            for slot, samples, start, length in zip(batch.slots, batch.samples, starts, lengths.tolist(), strict=False)
            if samples
        ]
        slots = [slot for slot, _ in runs]
        last = take_tokens(output, slots, [run[-1] for _, run in runs], self.vocab_size)
        output.token_ids = [[*run[:-1], token_id] for (_, run), token_id in zip(runs, last, strict=True)]
        if isinstance(drafts, SuffixDrafts):
            for slot, run, made in zip(slots, output.token_ids, drafts.follow(output), strict=True):
                self.inputs.write_drafts(slot, run[-1], made)
        else:
            drafts.count((counts >> DRAFTS_SHIFT)[: batch.num_decodes], lengths[: batch.num_decodes] - 1)
        return output


class CudaSampling:
    """Assigns rows to the step's kernels where these can sample them, and returns steps in flight.

    Args:
        sampler: of the rows that no kernel can sample.
        inputs: of the step.
        masked: samples rows with a grammar behind the step.
        ring: copies the step's results to the host; of RING_DEPTH steps.
        drafts: drafts that the step verifies, and makes if the host does not; None for none.
        lookahead: as in `StepRunner`, at most LOOKAHEAD.
    """

    def __init__(
        self,
        sampler: Sampler,
        inputs: CudaInputs,
        masked: MaskedSampling,
        ring: TokenRing,
        drafts: DeviceDrafts | SuffixDrafts | None = None,
        lookahead: int = LOOKAHEAD,
    ) -> None:
        self.lookahead = lookahead
        self.drafts = drafts
        self._sampler = sampler
        self._inputs = inputs
        self._masked = masked
        self._ring = ring

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Divide the rows among the step's kernels, the kernels behind it, and the host."""
        slots, draws = rows.slots, rows.draws
        needs_host = self._sampler.needs_logits(slots, draws) & rows.samples
        on_host: list[int] = np.flatnonzero(needs_host).tolist() if needs_host.any() else []
        masked: list[int] = []
        in_step = rows.samples & ~needs_host
        grammars = self._sampler.grammars
        if grammars.in_use:
            constrained = grammars.constrained[slots] & in_step
            masked = np.flatnonzero(constrained).tolist()
            in_step = in_step & ~constrained
        starts = self._sampler.kernel_parameters(np.array([new.slot for new in rows.batch.new], np.int64))
        return SamplingPlan(KernelRows(in_step, starts), masked, on_host)

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> StepInFlight:
        """Sample behind the step, and start the copy of its tokens to the host."""
        batch, last_logits = rows.batch, rows.last_logits()
        self._masked.follow(self._ring, failures)
        if plan.masked:
            slots = [batch.slots[row] for row in plan.masked]
            decision = self._masked.sample(last_logits[plan.masked].tolist(), slots, decision, failures)
        output = StepOutput(failures=failures.by_slot)
        if plan.on_host:
            self._sample_on_host(rows, plan.on_host, last_logits, outputs, output)
        ticket = self._ring.send(outputs.tokens if self.drafts is None else self._inputs.results)
        if isinstance(self.drafts, SuffixDrafts):
            self.drafts.begin(batch)
        vocab_size = self._sampler.vocab_size
        return StepInFlight(output, decision, batch, self._ring, ticket, vocab_size, self.drafts, self._inputs)

    def launch(self) -> None:
        """Launch masked sampling for each size that has a graph."""
        for size in self._masked.sizes:
            self._masked.run(size)

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs of masked sampling."""
        return self._masked.capture(runtime)

    def _sample_on_host(
        self,
        rows: StepRows,
        numbers: Sequence[int],
        last_logits: np.ndarray,
        outputs: StepOutputs,
        output: StepOutput,
    ) -> None:
        logits_NV, device = outputs.logits, outputs.logits.device
        slots = [rows.batch.slots[row] for row in numbers]
        chosen = np.array(numbers)
        rows_P = torch.from_numpy(last_logits[chosen]).to(device)
        sampled = self._sampler.sample(logits_NV[rows_P], slots, rows.draws[chosen])
        output.failures.update(sampled.failures)
        output.logprobs = {slot: [entry] for slot, entry in sampled.logprobs.items()}
        token_ids = torch.tensor(sampled.token_ids, dtype=torch.int32, device=device)
        state, slots_P = self._inputs.state, torch.tensor(slots, device=device)
        state.last_token[slots_P] = token_ids.clamp(min=0)
        state.num_computed[slots_P] = self._inputs.sampling.lengths[rows_P]
        outputs.tokens[rows_P] = token_ids
