"""Sampling on a GPU: in the step, or behind it for rows with a grammar.

Kernels of the step sample most rows, and their tokens are read after the next step has been sent. Only rows with a
grammar make the host wait for the device: their masks need the tokens of the step before, and are filled while the
device runs this step. Log-probabilities are computed behind the step, and read with its tokens. If nothing is computed
behind a step with the passes of a draft model, its tokens are read before these have run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.triton.step.accept_drafts import DRAFTS_SHIFT, LENGTH_MASK
from phonograph.runner.cuda.cuda_inputs import CudaInputs, StepResults
from phonograph.runner.cuda.listed_drafts import ListedDrafts
from phonograph.runner.cuda.masked_sampling import MaskedSampling, MaskedSequence
from phonograph.runner.cuda.token_ring import TokenRing
from phonograph.runner.cuda.token_scores import TokenScores
from phonograph.runner.step_inputs import KernelRows, StepRows
from phonograph.runner.step_program import StepOutputs
from phonograph.runner.steps import SamplingPlan, take_tokens
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler
from phonograph.speculation.device_drafts import DeviceDrafts
from phonograph.speculation.suffix_drafts import SuffixDrafts
from phonograph.speculation.suffix_index import SuffixIndex

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
    scores: TokenScores | None
    inputs: CudaInputs
    owners: dict[int, SuffixIndex]
    early: bool

    def result(self) -> StepOutput:
        """Wait for the tokens of the step, and return its output. Its passes may still run."""
        output = self._sampled() if self.drafts is None else self._accepted(self.drafts)
        output.attention_units = self.ring.units(self.ticket)
        if self.scores is not None:
            self.scores.take(output)
        return output

    def _sampled(self) -> StepOutput:
        """Return the output of a step of an engine without drafts: a token of each sequence that it sampled."""
        output, batch = self.output, self.batch
        tokens: list[int] = self.ring.read(self.ticket)[: batch.num_reqs].tolist()
        slots = batch.slots
        if not all(batch.samples):
            rows = [row for row, samples in enumerate(batch.samples) if samples]
            slots, tokens = [slots[row] for row in rows], [tokens[row] for row in rows]
        take_tokens(output, slots, tokens, self.vocab_size)
        return output

    def _accepted(self, drafts: DeviceDrafts | SuffixDrafts) -> StepOutput:
        """Return the output of a step of an engine with drafts: runs of tokens, as `accept` counted them."""
        output, batch, ring = self.output, self.batch, self.ring
        results = ring.read_early(self.ticket) if self.early else ring.read(self.ticket)
        num_logits = batch.num_logits
        tokens: list[int] = results[:num_logits].tolist()
        counts = results[drafts.max_num_logits :][: batch.num_reqs]
        lengths = counts & LENGTH_MASK
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
            several = drafts.follow(output, self.owners, is_last=self.ring.latest == self.ticket)
            for slot, run, made in zip(slots, output.token_ids, several, strict=True):
                self.inputs.write_drafts(slot, run[-1], made)
        else:
            drafts.count((counts >> DRAFTS_SHIFT)[: batch.num_decodes], lengths[: batch.num_decodes] - 1)
        return output


class CudaSampling:
    """Assigns rows to the step's kernels where these can sample them, and returns steps in flight.

    Args:
        sampler: state of the slots.
        inputs: of the step.
        masked: samples rows with a grammar behind the step.
        ring: copies the step's results to the host; of RING_DEPTH steps.
        drafts: drafts that the step verifies, and makes if the host does not; None for none.
        listed: passes of a draft model for rows with a grammar; None without one.
    """

    def __init__(
        self,
        sampler: Sampler,
        inputs: CudaInputs,
        masked: MaskedSampling,
        ring: TokenRing,
        drafts: DeviceDrafts | SuffixDrafts | None = None,
        listed: ListedDrafts | None = None,
    ) -> None:
        self.lookahead = LOOKAHEAD
        self.drafts = drafts
        self._sampler = sampler
        self._inputs = inputs
        self._masked = masked
        self._ring = ring
        self._listed = listed

    @property
    def shared_tiles(self) -> int:
        return self._ring.shared_tiles

    def plan(self, rows: StepRows) -> SamplingPlan:
        """Divide the rows among the step's kernels and those behind it."""
        masked: list[int] = []
        in_step, grammars = rows.samples, self._sampler.grammars
        if grammars.in_use:
            constrained = grammars.constrained[rows.slots] & in_step
            masked = np.flatnonzero(constrained).tolist()
            in_step = in_step & ~constrained
        starts = self._sampler.kernel_parameters(np.array([new.slot for new in rows.batch.new], np.int64))
        return SamplingPlan(KernelRows(in_step, starts, self._ring.early_row), masked)

    def finish(
        self, rows: StepRows, plan: SamplingPlan, outputs: StepOutputs, decision: Decision, failures: SlotFailures
    ) -> StepInFlight:
        """Sample behind the step, and start the copy of its tokens to the host."""
        batch, sampler, scores = rows.batch, self._sampler, None
        self._masked.follow(self._latest, failures)
        if (sampler.logprobs[rows.slots] >= 0).any():
            scores = TokenScores(sampler, rows, self._inputs, outputs.logits, plan.masked)
        if plan.masked:
            firsts, counts = rows.logits_spans()
            sequences = [
                MaskedSequence(row, batch.slots[row], int(firsts[row]), int(counts[row])) for row in plan.masked
            ]
            decision = self._masked.sample(sequences, self._latest, decision, failures)
            if self._listed is not None and batch.makes_drafts:
                self._listed.draft(plan.masked)
        if scores is not None:
            scores.start(outputs.logits, outputs.tokens, failures)
        ticket = self._ring.send(outputs.tokens if self.drafts is None else self._inputs.results)
        owners = self.drafts.begin(batch) if isinstance(self.drafts, SuffixDrafts) else {}
        output = StepOutput(failures=failures.by_slot)
        of_step = output, decision, batch, self._ring, ticket, sampler.vocab_size
        early = self._listed is not None and batch.makes_drafts and not plan.masked and scores is None
        return StepInFlight(*of_step, self.drafts, scores, self._inputs, owners, early)

    def _latest(self) -> StepResults:
        """Wait for the step before the one that was sent last, and return its results."""
        return self._inputs.results_of(self._ring.read(self._ring.latest))

    def launch(self) -> None:
        """Launch masked sampling, and the passes behind it, for each size that has a graph."""
        for size in self._masked.sizes:
            self._masked.run(size)
        if self._listed is not None:
            self._listed.launch()

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs of masked sampling, and of the passes behind it."""
        return self._masked.capture(runtime) + (0 if self._listed is None else self._listed.capture(runtime))
