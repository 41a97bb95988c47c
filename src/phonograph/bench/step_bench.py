"""Times of steps by graph and work, for `phonograph simulate`."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from phonograph.bench.engine import greedy, random_prompt
from phonograph.bench.records.results import BenchProgress
from phonograph.bench.run_requests import run_requests
from phonograph.core.batch import ScheduledBatch
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.core import EngineCore
from phonograph.engine.llm import LLM
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.offline.simulation.step_times import StepWork, summarized, table_of, work_of
from phonograph.graphs.cuda import CudaRuntime
from phonograph.runner.runner import Runner

DECODE_TOKENS = 32
"""Tokens of each answer in batches of one size, of which half make the times right even if the first ones are slow: a
GPU that long prompts brought to its power limit needs tens of milliseconds for its usual clock."""
LONGEST_GAP = 0.05
"""Seconds between two steps from which the engine was idle."""
PHASES, PHASE_REQUESTS = 8, 128
"""Phases of requests that arrive while others decode, and requests of each beside those that fill the sequences."""
ARRIVALS = 0, 1, 1, 2
"""Requests that may arrive in one step."""


class StepRecorder:
    """Records the work and the seconds of an engine's steps, and the gaps of the host between them.

    On a GPU, events before and behind the kernels of a step give its seconds: the host sees late that a step has ended
    while it launches the kernels of the next one without a graph, which can take 30 ms.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self.gaps: dict[int, list[float]] = defaultdict(list)
        self._submitted: deque[tuple[StepWork, torch.cuda.Event | None, torch.cuda.Event | None]] = deque()
        self._last_ended = 0.0

    @contextmanager
    def watching(self, core: EngineCore) -> Generator[None]:
        """Record the steps of a core until the end of the block."""
        runner, submit, on_step = core.runner, core.runner.submit, core.on_step
        runtime = runner.runtime if isinstance(runner, Runner) else None
        stream = runtime.stream if isinstance(runtime, CudaRuntime) else None

        def event() -> torch.cuda.Event | None:
            if stream is None:
                return None
            recorded = torch.cuda.Event(enable_timing=True)
            recorded.record(stream)
            return recorded

        def submitted(batch: ScheduledBatch) -> Any:
            began = event()
            pending = submit(batch)
            self._submitted.append((work_of(batch, pending.decision), began, event()))
            return pending

        runner.submit = submitted
        core.on_step = self._take
        try:
            yield
        finally:
            runner.submit, core.on_step = submit, on_step

    def _take(self, record: StepRecord) -> None:
        work, began, ended = self._submitted.popleft()
        seconds = record.seconds
        if began is not None and ended is not None:
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1e3
        self.steps.append((work, seconds))
        gap = record.ended - record.seconds - self._last_ended
        if gap < LONGEST_GAP:
            self.gaps[work.num_reqs].append(gap)
        self._last_ended = record.ended


def bench_steps(llm: LLM, input_lens: Sequence[int], num_iters: int, progress: BenchProgress) -> dict[str, Any]:
    """Measure steps of all graphs, and return the table.

    Batches of each size of a decode graph run with prompts of each length. The largest one of a length comes first, so
    that the prefix cache has the prompts of the others: their prefills would take ten minutes with an 8B model, and
    bring the GPU to its power limit. Then requests arrive while others decode, as at a server (`_serve_arriving`).

    Args:
        llm: engine to measure.
        input_lens: tokens of prompts.
        num_iters: repetitions.
        progress: called with the batches that are done.
    """
    limits, rng, recorder = llm.plan.limits, random.Random(0), StepRecorder()
    longest = llm.engine.core.scheduler.context_len - DECODE_TOKENS
    keys = llm.plan.captures.decode
    sizes = sorted({1, limits.max_num_seqs, *(key.num_reqs for key in keys if key.num_reqs <= limits.max_num_seqs)})
    lens = sorted({min(length, longest) for length in input_lens})
    room = llm.plan.memory.num_tokens
    batches = [(size, length) for length in lens for size in sizes[::-1] if size * (length + DECODE_TOKENS) <= room]
    total = len(batches) * num_iters + num_iters
    longest_of = [max(length for count, length in batches if count > index) for index in range(max(batches)[0])]
    beginnings = [random_prompt(llm, rng, length) for length in longest_of]
    for turn, (size, length) in enumerate(itertools.chain([batches[0]], batches * num_iters)):
        progress("batches", turn, total + 1)
        prompts = [prompt[:length] for prompt in beginnings[:size]]
        # The first one warms up.
        with recorder.watching(llm.engine.core) if turn else nullcontext():
            run_requests(llm, prompts, [greedy(DECODE_TOKENS)] * size)
    # Those of the last length.
    cached = [prompt for prompt in beginnings if len(prompt) == longest_of[0]]
    for turn in range(num_iters):
        progress("batches", total - num_iters + turn, total + 1)
        with recorder.watching(llm.engine.core):
            _serve_arriving(llm, rng, min(longest, limits.max_num_batched_tokens // 2), cached)
    host = [(reqs, median(gaps)) for reqs, gaps in sorted(recorder.gaps.items())]
    return table_of(llm.plan, summarized(recorder.steps), host)


def _serve_arriving(llm: LLM, rng: random.Random, longest: int, cached: list[list[int]]) -> None:
    """Serve random requests that arrive while others decode, until all are answered.

    From phase to phase answers become longer, so that more and more sequences decode. Prompts have up to `longest`
    tokens, more of them few than many: most steps have one prompt or two, of all sizes, as at a server. Every second
    one follows a part of one of `cached`, prompts in the prefix cache, so that the tokens of prefills and the keys that
    they attend to vary by themselves. Few sequences share a beginning, which attention would read once.
    """
    session, most = llm.session, llm.plan.limits.max_num_seqs
    context_len = llm.engine.core.scheduler.context_len
    # All are ready before the first step: a device that waits for the host would make steps longer.
    requests: deque[tuple[list[int], SamplingParams]] = deque()
    for phase in range(PHASES):
        usual = most ** ((phase + 0.5) / PHASES)
        for number in range(PHASE_REQUESTS + round(usual)):
            prompt = random_prompt(llm, rng, max(1, round(longest ** rng.random())))
            beginning = rng.choice(cached)
            room = min(len(beginning), context_len - 1 - len(prompt))
            if number % 2 and room > 0:
                prompt = beginning[: round(room ** rng.random())] + prompt
            requests.append((prompt, greedy(min(context_len - len(prompt), rng.randint(1, round(2 * usual))))))
    while requests or session.has_unfinished:
        for _ in range(min(len(requests), rng.choice(ARRIVALS))):
            session.add(*requests.popleft())
        session.step()
