"""Cost of a step on the host: the whole loop of the engine for running decodes, without a model.

    python benchmarks/host_cost.py                        # 256 decodes, contexts of about 1,000 tokens
    python benchmarks/host_cost.py --output benchmarks/results/host_cost.json

Session, core and scheduler are the engine's; the runner does what the host does around a model, and makes its tokens
up. Requests are of token ids, so no text is decoded.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from bench.result_files import output_file, write_result
from phonograph.bench.records.record import provenance
from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.core.blocks import blocks_for
from phonograph.core.kv_group import KVGroup
from phonograph.core.limits import Limits
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.core import EngineCore
from phonograph.engine.session import Session
from phonograph.graphs.capture_list import make_capture_list
from phonograph.graphs.dispatch import Dispatcher
from phonograph.graphs.modes import GraphMode, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.runner import shape_of
from phonograph.runner.sequences import Sequences
from phonograph.runner.steps import CompletedStep
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler
from phonograph.scheduling.scheduler import Scheduler
from phonograph.structured.compiler import GrammarCompiler

T = TypeVar("T")

BEFORE_THE_MODEL = ("schedule", "load", "apply", "decide", "rows", "write")
"""Parts that run before the model. The others run after it, where a device hides them."""

MAX_MODEL_LEN = 8192
MAX_NUM_TOKENS = 8192
BLOCK_SIZE = 16
VOCAB_SIZE = 100_000


class Clock:
    """Collects the seconds of each part of a step."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def timed(self, name: str, part: Callable[..., T], *arguments: Any) -> T:
        start = time.perf_counter()
        result = part(*arguments)
        self.times[name] = time.perf_counter() - start
        return result


class TimedScheduler(Scheduler):
    def __init__(self, limits: Limits, num_blocks: int, clock: Clock) -> None:
        super().__init__(limits, groups=[KVGroup(layers=(0,), block_size=BLOCK_SIZE)], num_blocks=num_blocks)
        self._clock = clock

    def schedule(self) -> ScheduledBatch:
        return self._clock.timed("schedule", super().schedule)

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[Request]:
        return self._clock.timed("update", super().update, batch, output)


class HostRunner:
    """The host side of the CPU's runner."""

    lookahead = 0

    def __init__(self, num_seqs: int, clock: Clock) -> None:
        mode = resolve_mode(GraphMode.FULL, Support(GraphSupport.ALWAYS, "benchmark"), Pieces(True, "benchmark"))
        captures = make_capture_list(
            mode.mode, max_num_seqs=num_seqs, max_num_batched_tokens=MAX_NUM_TOKENS, max_capture_tokens=2048
        )
        self.counts: Counter[str] = Counter()
        self.dispatcher = Dispatcher(mode, captures, max_num_tokens=MAX_NUM_TOKENS)
        sampler = Sampler(max_num_seqs=num_seqs, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), seed=0)
        self.sequences = Sequences(sampler, max_num_seqs=num_seqs)
        self.inputs = CpuInputs(
            max_num_seqs=num_seqs,
            max_num_tokens=MAX_NUM_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            block_sizes=(BLOCK_SIZE,),
        )
        self.batch = ScheduledBatch()
        self._clock = clock

    def submit(self, batch: ScheduledBatch) -> CompletedStep:
        timed = self._clock.timed
        self.batch = batch
        failures = SlotFailures()
        timed("load", self.sequences.take_over, batch, failures)
        timed("apply", self.inputs.take_over, batch, failures)
        decision = timed("decide", lambda: self.dispatcher.decide(shape_of(batch)))
        rows = timed("rows", self.sequences.rows, batch)
        timed("write", lambda: self.inputs.write(rows, decision.key, sampling=None))
        output = StepOutput(slots=[slot for slot, ends in zip(batch.slots, batch.samples, strict=True) if ends])
        output.token_ids = [[7 + slot] for slot in output.slots]
        timed("append", self.inputs.append_tokens, output.slots, output.token_ids)
        return CompletedStep(output, decision)


class Host:
    """An engine without a model, full of running decodes."""

    def __init__(self, num_seqs: int, context_len: int, num_steps: int) -> None:
        longest = context_len + context_len // 8 + num_steps
        self._clock = Clock()
        self._runner = HostRunner(num_seqs, self._clock)
        scheduler = TimedScheduler(
            Limits(max_num_seqs=num_seqs, max_num_batched_tokens=MAX_NUM_TOKENS, max_model_len=MAX_MODEL_LEN),
            num_seqs * (blocks_for(longest, BLOCK_SIZE) + 1),
            self._clock,
        )
        model: Any = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,), pooler=None, encoder=None)
        grammars = GrammarCompiler(lambda: None, model.eos_token_ids)
        session = Session(EngineCore(scheduler, self._runner), model, None, 0, grammars)
        rng = np.random.default_rng(0)
        # Unlike lengths, so that block borders spread over the steps as they do in service.
        for length in rng.integers(context_len * 7 // 8, context_len * 9 // 8, num_seqs).tolist():
            session.add(rng.integers(0, 2000, length).tolist(), SamplingParams(max_tokens=None))
        self._session = session

    @property
    def inputs(self) -> CpuInputs:
        return self._runner.inputs

    def step(self, times: dict[str, float]) -> ScheduledBatch:
        """Run one step, return its batch, and add the seconds of each part; "session" is the rest."""
        self._clock.times = times
        start = time.perf_counter()
        self._session.step()
        whole = time.perf_counter() - start
        times["session"] = whole - sum(times.values())
        times["whole step"] = whole
        return self._runner.batch


def measure(*, num_seqs: int, context_len: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Microseconds of each part over `num_steps` steps of `num_seqs` decodes; "before the model" is a sum."""
    host = Host(num_seqs, context_len, num_steps)
    steps: list[dict[str, float]] = []
    while len(steps) < num_steps:
        times: dict[str, float] = {}
        if host.step(times).num_decodes == num_seqs:
            steps.append({**times, "before the model": sum(times[name] for name in BEFORE_THE_MODEL)})
    return {name: _summary([times[name] for times in steps]) for name in steps[0]}


def _summary(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {
        "median_us": round(p50 * 1e6, 1),
        "p99_us": round(p99 * 1e6, 1),
        "mean_us": round(np.mean(seconds) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in ("num_seqs", "context_len", "num_steps")}
    origin = provenance()
    parts = measure(**asked)
    for name, summary in parts.items():
        print(f"{name:17s} median {summary['median_us']:7.1f} us   P99 {summary['p99_us']:7.1f} us")
    if arguments.output is not None:
        write_result(arguments.output, origin, {**asked, "parts": parts})


if __name__ == "__main__":
    main()
