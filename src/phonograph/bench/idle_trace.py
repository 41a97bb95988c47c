"""How long the GPU does nothing between two steps, from a profiler's trace.

A step is everything from one prepare kernel to the next; it is idle where neither a kernel nor a copy runs between the
last kernel of one step and the first of the next. Gaps inside a graph are not counted: they are the graph's own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from phonograph.bench.cases import DecodeCase
from phonograph.bench.engine import greedy, random_prompt, timed
from phonograph.bench.records.results import BenchProgress, Row
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError

STEP_KERNEL = "_prepare_kernel"
"""Ours. Others prepare things too: `prepare_varlen_num_blocks_kernel` of FlashAttention 3."""
Activity = tuple[float, float, str]
"""Of the device: start and end in us, and the name of a kernel or copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReport:
    """Of `num_steps` steps: wall time of the trace and of it the time between steps with nothing running, in us."""

    num_steps: int
    wall_us: float
    idle_us: float

    @property
    def share(self) -> float:
        return self.idle_us / self.wall_us if self.wall_us else 0.0


IDLE_TOKENS = 64


def bench_idle(llm: LLM, cases: Sequence[DecodeCase], progress: BenchProgress) -> Iterator[Row]:
    """Share of the wall time in which the GPU does nothing between steps, while all sequences decode.

    Raises:
        ConfigError: the engine runs on a CPU.
    """
    if llm.plan.device.kind != "cuda":
        raise ConfigError("device", llm.plan.device.kind, "idle time is read from a GPU's trace; cuda works")
    for case, decode in steady_decodes(llm, cases, progress, "idle cases", IDLE_TOKENS):
        before = Counter(llm.step_counts)
        report = measure_idle(decode)
        facts = {
            "bs": case.num_seqs,
            "ctx": case.context,
            "idle_share": round(report.share, 5),
            "idle_us": round(report.idle_us / max(1, report.num_steps), 2),
            "step_us": round(report.wall_us / max(1, report.num_steps), 1),
        }
        yield Row(suite="idle", case=str(case), facts=facts, steps=Counter(llm.step_counts) - before)


def steady_decodes(
    llm: LLM, cases: Sequence[DecodeCase], progress: BenchProgress, what: str, num_tokens: int
) -> Iterator[tuple[DecodeCase, Callable[[], object]]]:
    """Each case with what decodes so many tokens of all its sequences, whose prompts are cached by then."""
    rng = random.Random(0)
    for done, case in enumerate(cases):
        progress(what, done, len(cases))
        prompts = [random_prompt(llm, rng, case.context) for _ in range(case.num_seqs)]
        timed(llm, prompts, [greedy(1)] * len(prompts))
        yield case, partial(timed, llm, prompts, [greedy(num_tokens)] * len(prompts))


def measure_idle(run: Callable[[], object]) -> IdleReport:
    """Profiles `run`, which executes steps on the current GPU and waits for them."""
    return idle_between_steps(device_activities(run))


def device_activities(run: Callable[[], object]) -> list[Activity]:
    """Everything that the GPU did in `run`, which waits for it."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [
        (float(event.time_range.start), float(event.time_range.end), str(event.name))
        for event in profiler.events() or []
        if str(event.device_type).endswith("CUDA")
    ]


def idle_between_steps(activities: list[Activity]) -> IdleReport:
    """From (start, end, name) of everything the device did, in us; the first step is only where the trace begins."""
    activities = sorted(activities)
    starts = [index for index, (_, _, name) in enumerate(activities) if STEP_KERNEL in name]
    if len(starts) < 2:
        return IdleReport(num_steps=0, wall_us=0.0, idle_us=0.0)
    idle = 0.0
    busy_until = activities[starts[0]][1]
    for index in range(starts[0] + 1, starts[-1] + 1):
        start, end, name = activities[index]
        # A copy between two steps shortens the gap on both sides of it.
        between = STEP_KERNEL in name or _is_copy(name) or _is_copy(activities[index - 1][2])
        if between:
            idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    wall = activities[starts[-1]][0] - activities[starts[0]][0]
    return IdleReport(num_steps=len(starts) - 1, wall_us=wall, idle_us=idle)


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))
