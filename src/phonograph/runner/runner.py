"""Runs scheduled batches: persistent slots, static buffers, a decision, a graph or an eager step, sampled tokens.

The runner never meets a request, only slots. It owns everything with an address that a graph froze.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import torch

from phonograph.attention.cascade.shared_prefix import SharedPrefixes
from phonograph.attention.metadata import AnyBuilder, CommonMetadata
from phonograph.core.batch import NewSequence, ScheduledBatch, StepOutput
from phonograph.graphs.buffers import StaticBuffers
from phonograph.graphs.dispatch import BatchShape, Dispatcher
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import GraphRuntime
from phonograph.runner.captures import CapturedGraphs, CaptureProgress, CaptureReport
from phonograph.runner.cpu_inputs import SlotTable, fill_buffers
from phonograph.runner.step_program import StepProgram
from phonograph.runner.steps import CompletedStep, load_sequences, take_tokens
from phonograph.runner.synthetic_batches import SyntheticBatches
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.logprobs import step_prompt_logprobs
from phonograph.sampling.sampler import Sampler


class ModelRunner:
    """Runs steps, each at once when it is submitted. `counts` tells how many each kind of decision had.

    prefixes:    finds what a step may attend once, or None where no step cascades
    num_threads: threads of torch's operators while it works; None leaves torch's number
    """

    lookahead: int = 0

    def __init__(
        self,
        *,
        program: StepProgram,
        builder: AnyBuilder,
        buffers: StaticBuffers,
        slots: SlotTable,
        sampler: Sampler,
        dispatcher: Dispatcher,
        runtime: GraphRuntime,
        synthetic: SyntheticBatches,
        prefixes: SharedPrefixes | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.dispatcher = dispatcher
        self.runtime = runtime
        self._program = program
        self._builder = builder
        self._buffers = buffers
        self._slots = slots
        self._sampler = sampler
        self._synthetic = synthetic
        self._prefixes = prefixes
        self._num_threads = num_threads
        self._graphs = CapturedGraphs(runtime)
        self._live: dict[int, NewSequence] = {}

    def load_kernels(self) -> None:
        """There are none that would have to be compiled."""

    def capture(self, progress: CaptureProgress | None = None) -> CaptureReport:
        """Captures every graph of the capture list, largest first."""
        with operator_threads(self._num_threads):
            return self._graphs.capture(self.dispatcher.captures.largest_first(), self._capturable, progress)

    def _capturable(self, key: GraphKey) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        self._program.metadata = self._builder.build(self._synthetic.capture_batch(key), key=key)
        return functools.partial(self.run_shape, key)

    def submit(self, batch: ScheduledBatch) -> CompletedStep:
        """Runs one step; its result is what it sampled."""
        with torch.inference_mode(), operator_threads(self._num_threads):
            failures = SlotFailures()
            load_sequences(batch, self._live, self._sampler, failures)
            self._slots.apply(batch, failures)
            if self._prefixes is not None:
                self._prefixes.update(batch.appends)
            shape = shape_of(batch, self._prefixes)
            decision = self.dispatcher.decide(shape)
            self.counts[decision.label] += 1
            prefix_len = shape.prefix_len if decision.cascade else None
            common = fill_buffers(self._buffers, self._slots, batch, decision.key, prefix_len)
            self._program.metadata = self._builder.build(common, key=decision.key)
            hidden, logits = self._run_eager(common) if decision.key is None else self.replay(decision.key)
            return CompletedStep(self._sample(batch, hidden, logits, failures), decision)

    def replay(self, key: GraphKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Replays `key` on the buffers prepared for it; the next replay overwrites what it returns."""
        self._buffers.consume(key)
        hidden, logits = self._graphs.replay(key)
        return hidden, logits

    def run_shape(self, key: GraphKey) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the step at the padded shape of `key`: what is captured, and what a replay is compared with."""
        hidden, logits, _ = self._program.run(
            num_tokens=key.num_tokens,
            num_reqs=key.num_reqs,
            every_row=key.graphs is GraphSet.DECODE and key.query_len == 1,
            pieces=key.graphs is GraphSet.PIECEWISE,
        )
        return hidden, logits

    def draw(self, key: GraphKey, rng: np.random.Generator) -> CommonMetadata:
        """Writes a random batch that runs as `key`; for verification, as are the next two."""
        return self._synthetic.random_batch(key, rng)

    def replay_drawn(self, key: GraphKey, common: CommonMetadata) -> dict[str, torch.Tensor]:
        """Replays the graph on the batch drawn for it."""
        self._program.metadata = self._builder.build(common, key=key)
        self._buffers.prepared(key)
        with operator_threads(self._num_threads):
            hidden, logits = self.replay(key)
        return {"hidden": hidden, "logits": logits}

    def run_drawn(self, key: GraphKey, common: CommonMetadata) -> dict[str, torch.Tensor]:
        """Runs the batch drawn for `key` eagerly, at the same padded shape, on metadata built for it."""
        self._program.metadata = self._builder.build(common, key=key)
        with operator_threads(self._num_threads):
            hidden, logits = self.run_shape(key)
        return {"hidden": hidden, "logits": logits}

    def _run_eager(self, common: CommonMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits, _ = self._program.run(
            num_tokens=common.num_tokens,
            num_reqs=common.num_reqs,
            every_row=common.num_tokens == common.num_reqs,
            pieces=False,
        )
        return hidden, logits

    def _sample(
        self, batch: ScheduledBatch, hidden: torch.Tensor, logits: torch.Tensor, failures: SlotFailures
    ) -> StepOutput:
        logits_fn = self._program.model.prompt_logits
        scores = step_prompt_logprobs(batch, self._live, hidden, logits_fn, failures)
        output = StepOutput(prompt_logprobs=scores, failures=failures.by_slot)
        if all(batch.samples):
            slots, chosen = batch.slots, logits[: batch.num_reqs]
        else:
            rows = [row for row, samples in enumerate(batch.samples) if samples]
            if not rows:
                return output
            slots, chosen = [batch.slots[row] for row in rows], logits[rows]
        live, num_tokens = self._live, self._slots.num_tokens
        sampled = self._sampler.sample(chosen, slots, [num_tokens[slot] - live[slot].prompt_len for slot in slots])
        failures.by_slot.update(sampled.failures)
        take_tokens(output, slots, sampled.token_ids, self._sampler.vocab_size)
        self._slots.append_tokens(slots, output.token_ids)
        output.logprobs = sampled.logprobs
        return output


@contextmanager
def operator_threads(count: int | None) -> Generator[None]:
    """Gives torch's operators so many threads, and afterwards the number before. Setting it takes 0.1 us."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shape_of(batch: ScheduledBatch, prefixes: SharedPrefixes | None = None) -> BatchShape:
    """The facts of a batch that the dispatcher looks at; what its sequences share, only where `prefixes` finds it."""
    if batch.num_decodes == batch.num_reqs:
        uniform = 1
    else:
        first = batch.query_lens[0]
        uniform = first if all(length == first for length in batch.query_lens) else None
    # Mixed batches do not cascade, so nobody asks what they share.
    prefix_len = 0 if prefixes is None or uniform is None else prefixes.find(batch)
    return BatchShape(
        num_tokens=batch.num_tokens, num_reqs=batch.num_reqs, uniform_query_len=uniform, prefix_len=prefix_len
    )
