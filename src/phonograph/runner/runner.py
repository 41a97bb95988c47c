"""Runner of scheduled batches, one for all devices, made of inputs, sampling and a graph runtime.

`submit` writes a step, replays its graph or runs it eagerly, and samples. Where `lookahead` allows it, the tokens are
read after the next step has been sent: on a GPU `submit` sends one pinned buffer and replays one graph, and waits for
the device only for rows that the host samples or masks. The runner knows slots, not requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import ScheduledBatch
from phonograph.errors import CaptureError, RankError, ReplayError
from phonograph.graphs.capture_list import CaptureRetry
from phonograph.graphs.dispatch import Decision, Dispatcher, StepShape
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import CapturedGraph, GraphRuntime
from phonograph.kernels.attention_scratch import PREFIX_TILES_FROM, PREFIX_TILES_WORK
from phonograph.kernels.ranks import Ranks
from phonograph.runner.group_builder import GroupBuilder
from phonograph.runner.kernel_shapes import eager_shapes, graph_shapes
from phonograph.runner.pools.encoder_keys import EncoderKeys
from phonograph.runner.sequences import Sequences
from phonograph.runner.step_inputs import Inputs, StepRows
from phonograph.runner.step_program import StepOutputs, StepProgram
from phonograph.runner.steps import PendingStep, Sampling
from phonograph.runner.synthetic_batches import SyntheticBatches
from phonograph.sampling.failures import SlotFailures

_PROMPT_ROWS = "log-probabilities of prompt tokens need rows that graphs of this size leave out of the last layer"


_TIMED_REPLAYS = 2

CaptureProgress = Callable[[int, int, GraphKey], None]
"""Called before each capture with the number of graphs captured so far, the number of all graphs, and the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """Result of the capture phase: number of graphs, cost, and graphs that needed a second attempt."""

    num_graphs: int
    seconds: float
    memory_bytes: int
    retries: tuple[CaptureRetry, ...] = ()


class Runner:
    """Executes steps, and owns every tensor whose address a graph froze.

    counts:    number of steps by kind of decision
    lookahead: steps that may be in flight beside the one whose result is awaited
    drafts:    drafts that the steps verify, or None without speculation
    encoder_keys: writer of an encoder's keys, or None without one
    """

    def __init__(
        self,
        *,
        program: StepProgram,
        builder: GroupBuilder,
        inputs: Inputs,
        sampling: Sampling,
        sequences: Sequences,
        dispatcher: Dispatcher,
        runtime: GraphRuntime,
        synthetic: SyntheticBatches,
        ranks: Ranks | None = None,
        encoder_keys: EncoderKeys | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.lookahead = sampling.lookahead
        self.drafts = sampling.drafts
        self.dispatcher = dispatcher
        self.runtime = runtime
        self.synthetic = synthetic
        self._program = program
        self._builder = builder
        self._inputs = inputs
        self._sampling = sampling
        self._sequences = sequences
        self._ranks = ranks
        self.encoder_keys = encoder_keys
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._prepared_for: GraphKey | None = None

    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step. At most `lookahead` + 1 steps are in flight."""
        with torch.inference_mode(), self.runtime.scope():
            failures = SlotFailures()
            self._sequences.take_over(batch, failures)
            self._inputs.take_over(batch, failures)
            if self.encoder_keys is not None:
                self.encoder_keys.write(batch, failures)
            if batch.copies:
                self._program.attention.copy_pages(batch.copies)
            scores_prompts = self._sequences.scores_prompts(batch)
            rows = self._sequences.rows(batch)
            decision = self._decide(rows, scores_prompts)
            plan = self._sampling.plan(rows)
            commons = self._inputs.write(rows, decision.key, sampling=plan.in_step)
            self.prepare(commons, decision.key)
            if decision.key is None:
                outputs = self._run_eager(
                    commons[0], rows.num_logits, all_hidden=scores_prompts, makes_drafts=batch.makes_drafts
                )
            else:
                outputs = self.replay(decision.key)
            step = self._sampling.finish(rows, plan, outputs, decision, failures)
            if scores_prompts:
                logits_fn = self._scorer(outputs.hidden)
                scores = self._sequences.prompt_logprobs(batch, outputs.hidden, logits_fn, failures)
                step.output.prompt_logprobs = scores
            return step

    def prepare(self, commons: Sequence[CommonMetadata], key: GraphKey | None) -> None:
        """Build the attention metadata of inputs written for `key` (None for an eager step), by KV group."""
        self._program.build(self._builder, commons, key)
        self._prepared_for = key

    def step_drafts(self) -> torch.Tensor:
        """Return the drafts that the last step left in the slots of its synthetic batch, int32 [N, K]."""
        return self._inputs.drafts[: len(self.synthetic.latest.query_lens)]

    def block_table(self, layer: int) -> torch.Tensor:
        """Return the block table that a layer reads in the step that was prepared."""
        return self._program.attention.block_table(layer)

    def replay(self, key: GraphKey) -> StepOutputs:
        """Replay the graph of `key` on inputs prepared for it. The next step overwrites the outputs.

        Raises:
            ReplayError: the inputs and metadata were prepared for another key, or were already replayed. Kernels can
                loop forever on the schedule of another batch.
        """
        if self._prepared_for != key:
            raise ReplayError(f"{key} was to replay, but the inputs are those of {self._prepared_for}")
        self._prepared_for = None
        graph = self._graphs[key]
        graph.replay()
        return StepOutputs(*graph.outputs)

    def run_shape(self, key: GraphKey) -> StepOutputs:
        """Run the step at the padded shape of `key`: this is captured, and `verify` compares replays with it."""
        return self._program.run(
            num_tokens=key.num_tokens,
            num_reqs=key.num_reqs,
            num_logits=key.logits,
            every_row=_every_row(key),
            pieces=key.graphs is GraphSet.PIECEWISE,
            makes_drafts=key.makes_drafts,
        )

    def launch_kernels(self) -> None:
        """Launch the kernels of all steps with few layers, so that they are compiled. Weights need not be loaded."""
        num_slots = self._sequences.max_num_seqs
        with torch.inference_mode(), self.runtime.scope(), self._program.few_layers():
            for key in graph_shapes(self.dispatcher.captures):
                self.prepare(self.synthetic.capture_batch(key), key)
                self.run_shape(key)
            most = self.synthetic.most_tokens(num_slots)
            for key in eager_shapes(self.dispatcher, num_slots=num_slots, most_tokens=most):
                commons = self.synthetic.capture_batch(key)
                self.prepare(commons, None)
                for makes_drafts in {False, self._program.varies_with_drafts}:
                    self._run_eager(commons[0], commons[0].num_reqs, makes_drafts=makes_drafts)
            self._sampling.launch()

    def capture(self, progress: CaptureProgress | None = None) -> CaptureReport:
        """Capture every graph of the capture list, largest first, with kernels that are loaded.

        A capture fails if a library still has something to load. The step then runs eagerly once, and is captured
        again.

        Raises:
            CaptureError: a second attempt failed too.
        """
        keys = self.dispatcher.captures.largest_first()
        start = time.perf_counter()
        retries: list[CaptureRetry] = []
        self._graphs.clear()
        for done, key in enumerate(keys):
            if progress is not None:
                progress(done, len(keys), key)
            try:
                self._capture(key)
            except CaptureError as error:
                retries.append(CaptureRetry(key, str(error)))
                self._capturable(key)()
                self._capture(key)
        num_others = self._sampling.capture(self.runtime) if keys else 0
        if keys and self.encoder_keys is not None:
            num_others += self.encoder_keys.capture(self.runtime)
        return CaptureReport(
            num_graphs=len(keys) + num_others,
            seconds=time.perf_counter() - start,
            memory_bytes=self.runtime.memory_bytes,
            retries=tuple(retries),
        )

    def time_drafting(self, learn: Callable[[int, int, float], None]) -> None:
        """Time decode graphs with all drafts and without any, where steps that make no drafts take less time.

        Args:
            learn: takes requests, drafts and seconds of a step.
        """
        captures = self.dispatcher.captures
        whole = [
            key for key in captures.drafting if key.makes_drafts and key.num_tokens == key.num_reqs * key.query_len
        ]
        # One in each power of four, and the largest.
        timed = {(key.num_reqs.bit_length() - 1) // 2: key for key in reversed(whole)}
        # In an order that is the same on all ranks.
        for drafting in dict.fromkeys([*timed.values(), *whole[-1:]]):
            plain = next((key for key in captures.decode if key.num_reqs >= drafting.num_reqs), None)
            for key in (plain, drafting) if plain is not None else ():
                run = self._replayed(key)
                run()
                for _ in range(_TIMED_REPLAYS):
                    learn(drafting.num_reqs, key.num_tokens - key.num_reqs, run())

    def _replayed(self, key: GraphKey) -> Callable[[], float]:
        """Return a function that replays a graph and returns the seconds."""

        def run() -> float:
            with torch.inference_mode(), self.runtime.scope():
                self.prepare(self.synthetic.capture_batch(key), key)
                self.runtime.synchronize()
                began = time.perf_counter()
                self.replay(key)
                self.runtime.synchronize()
                return time.perf_counter() - began

        return run

    def _capture(self, key: GraphKey) -> None:
        run = self._capturable(key)
        if key.graphs is GraphSet.PIECEWISE and not self.runtime.runs_captured:
            # Attention between the pieces runs during the capture and reads the results of this run.
            run()
        if self._ranks is None:
            self._graphs[key] = self.runtime.capture(run)
        else:
            self._graphs[key] = capture_on_ranks(self._ranks, key, lambda: self.runtime.capture(run))

    def _scorer(self, hidden_TE: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function from rows of a step to their logits."""
        return self._program.model.prompt_logits

    def _decide(self, rows: StepRows, scores_prompts: bool) -> Decision:
        shape = shape_of(rows.batch, self._sampling.shared_tiles)
        decision = self.dispatcher.decide(shape)
        if decision.key is not None and scores_prompts and self._leaves_rows_out(decision.key):
            decision = decision.eagerly(shape.num_tokens, _PROMPT_ROWS)
        self.counts[decision.label] += 1
        return decision

    def _leaves_rows_out(self, key: GraphKey) -> bool:
        num_kept = max(key.logits, self._sequences.max_num_seqs)
        return not _every_row(key) and self._program.model.leaves_rows_out(key.num_tokens, num_kept)

    def _run_eager(
        self, common: CommonMetadata, num_logits: int, *, all_hidden: bool = False, makes_drafts: bool
    ) -> StepOutputs:
        return self._program.run(
            num_tokens=common.num_tokens,
            num_reqs=common.num_reqs,
            num_logits=num_logits,
            every_row=common.num_tokens == num_logits,
            pieces=False,
            all_hidden=all_hidden,
            makes_drafts=makes_drafts,
        )

    def _capturable(self, key: GraphKey) -> Callable[[], StepOutputs]:
        """Write the batch that `key` is captured with; return a function that runs it."""

        def run() -> StepOutputs:
            with torch.inference_mode(), self.runtime.scope():
                return self.run_shape(key)

        with torch.inference_mode(), self.runtime.scope():
            self.prepare(self.synthetic.capture_batch(key), key)
        return run


def capture_on_ranks(ranks: Ranks, key: GraphKey, capture: Callable[[], CapturedGraph]) -> CapturedGraph:
    """Capture a graph on each rank. If it fails on one, it has failed on all: else the others would wait for a sum.

    Raises:
        CaptureError: it failed here or on another rank.
        RankError: another rank captures another graph.
    """
    graph, problem = None, ""
    try:
        with ranks.recording():
            graph = capture()
    except CaptureError as error:
        problem = str(error)
    keys, problems = zip(*(text.split("\n", 1) for text in ranks.agree(f"{key}\n{problem}")), strict=True)
    for rank, other in enumerate(keys):
        if other != str(key):
            raise RankError(f"rank {ranks.rank} captures {key}, and rank {rank} captures {other}")
    failed = next((rank for rank, text in enumerate(problems) if text), None)
    if failed is not None or graph is None:
        raise CaptureError(f"rank {failed}: {problem if failed == ranks.rank else problems[failed or 0]}")
    return graph


def shape_of(batch: ScheduledBatch, shared_tiles: int = 0) -> StepShape:
    """Return the shape that the dispatcher decides by, after a step with `shared_tiles` (`Sampling`)."""
    if batch.num_tokens == batch.num_reqs:
        longest = 1
    else:
        longest = max(batch.query_lens) if batch.num_decodes == batch.num_reqs else None
    return StepShape(
        num_tokens=batch.num_tokens,
        num_reqs=batch.num_reqs,
        decode_query_len=longest,
        num_logits=batch.num_logits,
        makes_drafts=batch.makes_drafts,
        shares=batch.num_reqs >= PREFIX_TILES_FROM and shared_tiles >= PREFIX_TILES_WORK,
    )


def _every_row(key: GraphKey) -> bool:
    """Return True if each token of the graph has logits. Of a mixed graph, a batch may have fewer rows with logits."""
    return key.graphs is GraphSet.DECODE and key.logits == key.num_tokens
