"""Runs scheduled batches on a GPU, one step ahead of the host: a step is written, replayed, and read one step later.

`submit` sends one pinned buffer and replays one graph; nothing in it waits for the device. The sampled tokens feed the
next step where they are, and reach the host through a pinned buffer and an event. Two kinds of rows make `submit` wait
for the device, and only in steps that have them. Masks of rows with a grammar need the tokens of the step before, and
are filled while the device is in this one. Rows that no kernel can sample (penalties, bias, min_tokens,
log-probabilities) need this step's logits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from phonograph.attention.cascade.shared_prefix import SharedPrefixes
from phonograph.attention.metadata import AnyBuilder, CommonMetadata
from phonograph.core.batch import NewSequence, ScheduledBatch, StepOutput
from phonograph.errors import CaptureError
from phonograph.graphs.capture_list import CaptureRetry
from phonograph.graphs.cuda import CudaRuntime
from phonograph.graphs.dispatch import BatchShape, Decision, Dispatcher
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.launch.precompile import compile_only
from phonograph.kernels.triton.launch.preload import load_kernels
from phonograph.runner.captures import CapturedGraphs, CaptureProgress, CaptureReport
from phonograph.runner.cuda_inputs import DeviceInputs, StepRows
from phonograph.runner.masked_sampling import MaskedSampling
from phonograph.runner.model_runner import shape_of
from phonograph.runner.step_program import StepOutputs, StepProgram
from phonograph.runner.steps import load_sequences, take_tokens
from phonograph.runner.synthetic_batches import SyntheticBatches
from phonograph.runner.token_ring import TokenRing
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.logprobs import step_prompt_logprobs
from phonograph.sampling.sampler import Sampler

_PROMPT_ROWS = "log-probabilities of prompt tokens, whose rows graphs of so many tokens leave out of the last layer"


class CudaStep:
    """A step in flight. `output` has what was known when it was sent; `result` adds the tokens."""

    def __init__(
        self,
        ring: TokenRing,
        ticket: int,
        batch: ScheduledBatch,
        output: StepOutput,
        decision: Decision,
        vocab_size: int,
    ) -> None:
        self.decision = decision
        self._vocab_size = vocab_size
        self._ring = ring
        self._ticket = ticket
        self._batch = batch
        self._output = output

    def result(self) -> StepOutput:
        """Waits until the device has come to the end of the step."""
        output, batch = self._output, self._batch
        tokens: list[int] = self._ring.read(self._ticket)[: batch.num_reqs].tolist()
        slots = batch.slots
        if not all(batch.samples):
            rows = [row for row, samples in enumerate(batch.samples) if samples]
            slots, tokens = [slots[row] for row in rows], [tokens[row] for row in rows]
        take_tokens(output, slots, tokens, self._vocab_size)
        return output


class CudaRunner:
    """Executes steps. `counts` tells how many steps each kind of decision had.

    masked: samples the rows with a grammar, behind the step
    prefixes: finds what a step may attend once, or None where no step cascades
    """

    lookahead = 1

    def __init__(
        self,
        *,
        program: StepProgram,
        builder: AnyBuilder,
        inputs: DeviceInputs,
        sampler: Sampler,
        masked: MaskedSampling,
        dispatcher: Dispatcher,
        runtime: CudaRuntime,
        synthetic: SyntheticBatches,
        max_num_seqs: int,
        max_num_tokens: int,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.dispatcher = dispatcher
        self.runtime = runtime
        self._program = program
        self._builder = builder
        self._inputs = inputs
        self._sampler = sampler
        self._masked = masked
        self._synthetic = synthetic
        self._prefixes = prefixes
        self._max_num_tokens = max_num_tokens
        self._graphs = CapturedGraphs(runtime)
        self._live: dict[int, NewSequence] = {}
        self._tokens: dict[int, np.ndarray] = {}
        self._scored: set[int] = set()
        # By slot: tokens that the host knows, and tokens of the prompt.
        self._num_known = np.zeros(max_num_seqs, np.int64)
        self._prompt_lens = np.zeros(max_num_seqs, np.int64)
        self._ring = TokenRing(depth=self.lookahead + 2, max_rows=max_num_seqs)

    def load_kernels(self) -> None:
        """Compiles and loads the kernels of all steps; the weights need not be there."""
        # Kernels differ from graph to graph by kind and by magnitude of the step at most, with steps of a power of two
        # in the magnitude below it or above.
        keys = self.dispatcher.captures.largest_first()
        samples = {(key.kind, key.num_tokens.bit_length(), (key.num_tokens - 1).bit_length()): key for key in keys}
        with compile_only() as kernels, self._program.few_layers():
            for key in samples.values():
                self._prepared(key)()
            for key in self._eager_shapes():
                with torch.inference_mode(), self.runtime.scope():
                    common = self._synthetic.capture_batch(key)
                    self._program.metadata = self._builder.build(common, key=None)
                    self._run_eager(common)
            with torch.inference_mode(), self.runtime.scope():
                for size in self._masked.sizes:
                    self._masked.run(size)
        load_kernels(kernels)

    def capture(self, progress: CaptureProgress | None = None) -> CaptureReport:
        """Captures every graph of the capture list, largest first, with kernels that are loaded.

        A library may have something left to load, which a capture refuses. Its first run is eager then, and the graph
        is captured at a second try, which the report tells with the reason.

        Raises:
            CaptureError: the second try failed too.
        """
        keys = self.dispatcher.captures.largest_first()
        start = time.perf_counter()
        retries: list[CaptureRetry] = []
        for done, key in enumerate(keys):
            if progress is not None:
                progress(done, len(keys), key)
            try:
                self._graphs.capture((key,), self._captured)
            except CaptureError as error:
                retries.append(CaptureRetry(key, str(error)))
                self._prepared(key)()
                self._graphs.capture((key,), self._captured)
        num_masked = self._masked.capture(self.runtime) if keys else 0
        return CaptureReport(
            num_graphs=len(keys) + num_masked,
            seconds=time.perf_counter() - start,
            memory_bytes=self.runtime.memory_bytes,
            retries=tuple(retries),
        )

    def _eager_shapes(self) -> list[GraphKey]:
        """Steps that no graph holds, both ends of every octave: their kernels must not be compiled while serving."""
        slots = len(self._num_known)
        most = min(self._max_num_tokens, self._synthetic.most_tokens(slots))
        sizes = sorted({min(size, most) for bit in range(most.bit_length()) for size in (1 << bit, (2 << bit) - 1)})
        decodes = [
            GraphKey(GraphSet.DECODE, size, size, 1)
            for size in sizes
            if size <= slots
            and self.dispatcher.decide(BatchShape(num_tokens=size, num_reqs=size, uniform_query_len=1)).key is None
        ]
        others = [
            GraphKey(GraphSet.MIXED, size, slots)
            for size in sizes
            if self.dispatcher.decide(BatchShape(num_tokens=size, num_reqs=1, uniform_query_len=None)).key is None
        ]
        # The kernels around a cascade are the same for every size.
        cascades = decodes[-1:] if self.dispatcher.cascade is not None else []
        return decodes + [replace(key, cascade=True) for key in cascades] + others

    def _captured(self, key: GraphKey) -> Callable[[], StepOutputs]:
        run = self._prepared(key)
        if key.graphs is GraphSet.PIECEWISE:
            # Attention between the pieces runs during the capture, on what this makes.
            run()
        return run

    def _prepared(self, key: GraphKey) -> Callable[[], StepOutputs]:
        """Writes the batch that `key` is captured with; what it returns runs it."""

        def run() -> StepOutputs:
            with torch.inference_mode(), self.runtime.scope():
                return self.run_shape(key)

        with torch.inference_mode(), self.runtime.scope():
            self._program.metadata = self._builder.build(self._synthetic.capture_batch(key), key=key)
        return run

    def submit(self, batch: ScheduledBatch) -> CudaStep:
        """Sends one step to the device and returns at once, unless it has rows that the host has a part in."""
        with torch.inference_mode(), self.runtime.scope():
            failures = SlotFailures()
            self._take_over(batch, failures)
            shape = shape_of(batch, self._prefixes)
            scores_prompts = self._scores_prompts(batch)
            decision = self.dispatcher.decide(shape)
            if scores_prompts and decision.key is not None and self._leaves_rows_out(decision.key):
                decision = decision.eagerly(shape.num_tokens, _PROMPT_ROWS)
            self.counts[decision.label] += 1
            rows, on_host, ruled = self._rows(batch, shape.prefix_len if decision.cascade else None)
            common = self._inputs.write(rows, decision.key)
            self._program.metadata = self._builder.build(common, key=decision.key)
            if decision.key is None:
                hidden, logits, tokens = self._run_eager(common, all_hidden=scores_prompts)
            else:
                hidden, logits, tokens = self.replay(decision.key)
            self._masked.follow(self._ring, failures)
            if ruled is not None:
                decision = self._masked.sample(ruled, [batch.slots[row] for row in ruled], decision, failures)
            output = StepOutput(failures=failures.by_slot)
            if scores_prompts:
                logits_fn = self._program.model.prompt_logits
                output.prompt_logprobs = step_prompt_logprobs(batch, self._live, hidden, logits_fn, failures)
            if on_host is not None:
                self._sample_on_host(batch, on_host, logits, tokens, output)
            ticket = self._ring.send(tokens)
            return CudaStep(self._ring, ticket, batch, output, decision, self._sampler.vocab_size)

    def replay(self, key: GraphKey) -> StepOutputs:
        """Replays `key` on the inputs written for it; the next step overwrites what it returns."""
        self._inputs.consume(key)
        return StepOutputs(*self._graphs.replay(key))

    def run_shape(self, key: GraphKey) -> StepOutputs:
        """Runs the step at the padded shape of `key`: what is captured, and what a replay is compared with."""
        return self._program.run(
            num_tokens=key.num_tokens,
            num_reqs=key.num_reqs,
            every_row=key.graphs is GraphSet.DECODE and key.query_len == 1,
            pieces=key.graphs is GraphSet.PIECEWISE,
        )

    def draw(self, key: GraphKey, rng: np.random.Generator) -> CommonMetadata:
        """Writes a random batch that runs as `key`; for verification, as are the next two."""
        return self._synthetic.random_batch(key, rng)

    def replay_drawn(self, key: GraphKey, common: CommonMetadata) -> dict[str, torch.Tensor]:
        """Replays the graph on the batch drawn for it."""
        self._program.metadata = self._builder.build(common, key=key)
        self._inputs.written(key)
        return _by_name(self.replay(key))

    def run_drawn(self, key: GraphKey, common: CommonMetadata) -> dict[str, torch.Tensor]:
        """Runs the batch drawn for `key` eagerly, at the same padded shape, on metadata built for it."""
        self._program.metadata = self._builder.build(common, key=key)
        return _by_name(self.run_shape(key))

    def _run_eager(self, common: CommonMetadata, *, all_hidden: bool = False) -> StepOutputs:
        return self._program.run(
            num_tokens=common.num_tokens,
            num_reqs=common.num_reqs,
            every_row=common.num_tokens == common.num_reqs,
            pieces=False,
            all_hidden=all_hidden,
        )

    def _take_over(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        if self._prefixes is not None:
            self._prefixes.update(batch.appends)
        load_sequences(batch, self._live, self._sampler, failures)
        self._scored.difference_update(batch.freed)
        for new in batch.new:
            slot = new.slot
            if new.params.prompt_logprobs is not None:
                self._scored.add(slot)
            self._num_known[slot] = len(new.token_ids)
            self._prompt_lens[slot] = new.prompt_len
            if not failures.run(slot, "token ids", self._keep_tokens, slot, new.token_ids):
                self._tokens[slot] = np.zeros(len(new.token_ids), np.int32)

    def _keep_tokens(self, slot: int, token_ids: list[int]) -> None:
        self._tokens[slot] = np.array(token_ids, np.int32)

    def _rows(
        self, batch: ScheduledBatch, prefix_len: int | None
    ) -> tuple[StepRows, np.ndarray | None, list[int] | None]:
        """The step as arrays; the numbers of the rows that the host samples, and of those that get a mask on the
        device (None for none)."""
        slots = np.array(batch.slots, np.int64)
        context_lens = np.array(batch.context_lens, np.int64)
        query_lens = np.array(batch.query_lens, np.int64)
        samples = np.array(batch.samples, bool)
        draws = context_lens + query_lens - self._prompt_lens[slots]
        given = {
            int(row): self._tokens[batch.slots[row]][context_lens[row] : context_lens[row] + query_lens[row]]
            for row in np.flatnonzero(context_lens < self._num_known[slots])
        }
        needs_host = self._sampler.needs_logits(slots, draws) & samples
        on_host, ruled = np.flatnonzero(needs_host) if needs_host.any() else None, None
        samples = samples & ~needs_host
        grammars = self._sampler.grammars
        if grammars.in_use:
            constrained = grammars.constrained[slots] & samples
            ruled = np.flatnonzero(constrained).tolist() or None
            samples = samples & ~constrained
        rows = StepRows(
            slots=slots,
            context_lens=context_lens,
            query_lens=query_lens,
            num_decodes=batch.num_decodes,
            given=given,
            appends=batch.appends,
            samples=samples,
            parameters=self._sampler.kernel_parameters(slots, draws),
            prefix_len=prefix_len,
        )
        return rows, on_host, ruled

    def _sample_on_host(
        self,
        batch: ScheduledBatch,
        rows: np.ndarray,
        logits_NV: torch.Tensor,
        tokens_N: torch.Tensor,
        output: StepOutput,
    ) -> None:
        device = logits_NV.device
        numbers: list[int] = rows.tolist()
        slots = [batch.slots[row] for row in numbers]
        draws = [
            batch.context_lens[row] + batch.query_lens[row] - self._live[slot].prompt_len
            for row, slot in zip(numbers, slots, strict=True)
        ]
        rows_P = torch.from_numpy(rows).to(device)
        sampled = self._sampler.sample(logits_NV[rows_P], slots, draws)
        output.failures.update(sampled.failures)
        output.logprobs = sampled.logprobs
        token_ids = torch.tensor(sampled.token_ids, dtype=torch.int32, device=device)
        self._inputs.last_token[torch.tensor(slots, device=device)] = token_ids.clamp(min=0)
        tokens_N[rows_P] = token_ids

    def _scores_prompts(self, batch: ScheduledBatch) -> bool:
        """Whether prompt tokens' log-probabilities are wanted of this step."""
        if self._scored.isdisjoint(batch.slots):
            return False
        return any(
            slot in self._scored and context_len + 1 < self._live[slot].prompt_len
            for slot, context_len in zip(batch.slots, batch.context_lens, strict=True)
        )

    def _leaves_rows_out(self, key: GraphKey) -> bool:
        every_row = key.graphs is GraphSet.DECODE and key.query_len == 1
        return not every_row and self._program.model.kernels.leaves_rows_out(key.num_tokens)


def _by_name(outputs: StepOutputs) -> dict[str, torch.Tensor]:
    return dict(zip(("hidden", "logits", "tokens"), outputs, strict=True))
