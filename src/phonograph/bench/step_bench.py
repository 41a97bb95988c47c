"""Times of steps by graph and work, for `phonograph simulate`."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from phonograph.bench.engine import greedy, random_prompt
from phonograph.bench.records.results import BenchProgress
from phonograph.bench.run_requests import run_requests
from phonograph.core.batch import ScheduledBatch
from phonograph.engine.core import EngineCore
from phonograph.engine.llm import LLM
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.offline.simulation.step_times import StepWork, summarized, table_of, work_of

DECODE_TOKENS = 12
"""Tokens of each answer in batches of one size."""
LONGEST_GAP = 0.05
"""Seconds between two steps from which the engine was idle."""
PHASES, PHASE_REQUESTS = 8, 128
"""Phases of requests that arrive while others decode, and requests of each beside those that fill the sequences."""
ARRIVALS = 0, 1, 1, 2
"""Requests that may arrive in one step."""


class StepRecorder:
    """Records the work and the seconds of an engine's steps, and the gaps of the host between them."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self.gaps: dict[int, list[float]] = defaultdict(list)
        self._submitted: deque[StepWork] = deque()
        self._last_ended = 0.0

    @contextmanager
    def watching(self, core: EngineCore) -> Generator[None]:
        """Record the steps of a core until the end of the block."""
        runner, submit, on_step = core.runner, core.runner.submit, core.on_step

        def recorded(batch: ScheduledBatch) -> Any:
            pending = submit(batch)
            self._submitted.append(work_of(batch, pending.decision))
            return pending

        runner.submit = recorded
        core.on_step = self._take
        try:
            yield
        finally:
            runner.submit, core.on_step = submit, on_step

    def _take(self, record: StepRecord) -> None:
        work = self._submitted.popleft()
        self.steps.append((work, record.seconds))
        gap = record.ended - record.seconds - self._last_ended
        if gap < LONGEST_GAP:
            self.gaps[work.num_reqs].append(gap)
        self._last_ended = record.ended


def bench_steps(llm: LLM, input_lens: Sequence[int], num_iters: int, progress: BenchProgress) -> dict[str, Any]:
    """Measure steps of all graphs, and return the table.

    Batches of each size of a decode graph run with prompts of each length. Prompts begin alike in all batches, so that
    the prefix cache has most of them from the batch before: prefills of all prompts of an 8B model would take ten
    minutes. Then requests arrive while others decode, as at a server (`_serve_arriving`).

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
    batches = [(size, length) for size in sizes for length in lens if size * (length + DECODE_TOKENS) <= room]
    total = len(batches) * num_iters + num_iters
    longest_of = [max(length for count, length in batches if count > index) for index in range(max(batches)[0])]
    beginnings = [random_prompt(llm, rng, length) for length in longest_of]
    for turn, (size, length) in enumerate(itertools.chain([batches[0]], batches * num_iters)):
        progress("batches", turn, total + 1)
        prompts = [prompt[:length] for prompt in beginnings[:size]]
        if turn:  # the first one warms up
            with recorder.watching(llm.engine.core):
                run_requests(llm, prompts, [greedy(DECODE_TOKENS)] * size)
        else:
            run_requests(llm, prompts, [greedy(DECODE_TOKENS)] * size)
    for turn in range(num_iters):
        progress("batches", total - num_iters + turn, total + 1)
        with recorder.watching(llm.engine.core):
            _serve_arriving(llm, rng, min(longest, limits.max_num_batched_tokens // 2))
    host = [(reqs, median(gaps)) for reqs, gaps in sorted(recorder.gaps.items())]
    return table_of(llm.plan, summarized(recorder.steps), host)


def _serve_arriving(llm: LLM, rng: random.Random, longest: int) -> None:
    """Serve random requests that arrive while others decode, until all are answered.

    From phase to phase answers become longer, so that more and more sequences decode. Prompts have up to `longest`
    tokens, more of them few than many: most steps have one prompt or two, of all sizes, as at a server.
    """
    session, most = llm.session, llm.plan.limits.max_num_seqs
    context_len = llm.engine.core.scheduler.context_len
    for phase in range(PHASES):
        usual = most ** ((phase + 0.5) / PHASES)
        left = PHASE_REQUESTS + round(usual)
        while left > 0:
            for _ in range(rng.choice(ARRIVALS)):
                prompt = random_prompt(llm, rng, max(1, round(longest ** rng.random())))
                session.add(prompt, greedy(min(context_len - len(prompt), rng.randint(1, round(2 * usual)))))
                left -= 1
            session.step()
    while session.has_unfinished:
        session.step()
