"""Idle time of the GPU between two steps, from a profiler's trace.

A step runs from one prepare kernel to the next. The GPU is idle where neither a kernel nor a copy runs between the last
kernel of one step and the first of the next. Gaps inside a graph do not count.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from bench.cases import DecodeCase
from phonograph.bench.engine import greedy, random_prompt, timed
from phonograph.bench.records.results import BenchProgress, Row
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError

STEP_KERNEL = "_prepare_kernel"
"""Our kernel's name; FlashAttention 3 has a `prepare_varlen_num_blocks_kernel`."""
IDLE_TOKENS = 64
Activity = tuple[float, float, str]
"""Start and end in us, and the name of a kernel or copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReport:
    """Wall time of `num_steps` steps, and the idle time between them, in us."""

    num_steps: int
    wall_us: float
    idle_us: float

    @property
    def share(self) -> float:
        return self.idle_us / self.wall_us if self.wall_us else 0.0


def bench_idle(llm: LLM, cases: Sequence[DecodeCase], progress: BenchProgress) -> Iterator[Row]:
    """Measure the share of the wall time in which the GPU is idle between steps, while all sequences decode.

    Raises:
        ConfigError: the engine runs on a CPU.
    """
    for case, decode in steady_decodes(llm, cases, progress, "idle cases", IDLE_TOKENS):
        before = Counter(llm.step_counts)
        report = idle_between_steps(device_activities(decode))
        facts = {
            "bs": case.num_seqs,
            "ctx": case.context,
            "idle_share": round(report.share, 5),
            "idle_us": round(report.idle_us / max(1, report.num_steps), 2),
            "step_us": round(report.wall_us / max(1, report.num_steps), 1),
        }
        yield Row(suite="idle", case=str(case), facts=facts, steps=Counter(llm.step_counts) - before)


def steady_decodes(
    llm: LLM, cases: Sequence[DecodeCase], progress: BenchProgress, unit: str, num_tokens: int
) -> Iterator[tuple[DecodeCase, Callable[[], object]]]:
    """Yield each case with a function that decodes `num_tokens` tokens of its sequences after cached prompts.

    Raises:
        ConfigError: the engine runs on a CPU.
    """
    if llm.plan.device.kind != "cuda":
        raise ConfigError("device", llm.plan.device.kind, "the time of a step is read from a GPU's trace; cuda works")
    rng = random.Random(0)
    for done, case in enumerate(cases):
        progress(unit, done, len(cases))
        prompts = [random_prompt(llm, rng, case.context) for _ in range(case.num_seqs)]
        timed(llm, prompts, [greedy(1)] * len(prompts))
        yield case, partial(timed, llm, prompts, [greedy(num_tokens)] * len(prompts))


def device_activities(run: Callable[[], object]) -> list[Activity]:
    """Return all kernels and copies of the GPU during `run`."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [
        (float(event.time_range.start), float(event.time_range.end), str(event.name))
        for event in profiler.events() or []
        if str(event.device_type).endswith("CUDA")
    ]


def idle_between_steps(activities: list[Activity]) -> IdleReport:
    """Return the idle time between the steps of a trace; activities before the first prepare kernel are left out."""
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
