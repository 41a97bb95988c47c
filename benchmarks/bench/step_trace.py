"""Time of a decode step by part, from a profiler's trace: products, attention, the rest, and gaps.

Kernels overlap, since each lets the next one begin early. A kernel's time here is what it adds: from the end of all
kernels before it, or its own start if that is later, to its own end. The time between is a gap. All parts together are
the wall time.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.cases import DecodeCase
from bench.floor import decode_work, this_chip
from bench.idle_trace import STEP_KERNEL, Activity, device_activities, steady_decodes
from bench.kernel_parts import kernel_part
from phonograph.bench.records.results import BenchProgress, Row
from phonograph.engine.llm import LLM
from phonograph.errors import PhonographError, shortened

TOKENS = 48
MAX_KERNELS = 12
"""Kernels of a row at most."""
_WARMUP_STEPS = 8
"""Steps at the beginning of a trace that are left out, since the host fills its queue there."""
PARTS = ("products", "attention", "rest", "gaps")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Means over `num_steps` steps, in us.

    kernels: (name, us, launches a step), largest time first
    """

    num_steps: int
    parts_us: dict[str, float]
    kernels: list[tuple[str, float, float]]

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())


def step_parts(activities: Sequence[Activity]) -> StepParts:
    """Return the parts of the steps in a trace; a step runs from one prepare kernel to the next.

    Only steps with the most common number of activities count, so that a prefill among decodes is left out.

    Raises:
        PhonographError: a kernel of these steps is missing in `kernel_parts`.
    """
    activities = sorted(activities)
    starts = [index for index, (_, _, name) in enumerate(activities) if STEP_KERNEL in name][_WARMUP_STEPS:]
    steps = list(itertools.pairwise(starts))
    if not steps:
        return StepParts(num_steps=0, parts_us=dict.fromkeys(PARTS, 0.0), kernels=[])
    ((usual, _),) = Counter(last - first for first, last in steps).most_common(1)
    steps = [(first, last) for first, last in steps if last - first == usual]
    part_of = _parts_by_name({name for first, last in steps for _, _, name in activities[first:last]})
    parts, added, launches = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    for first, last in steps:
        end = activities[first][0]
        for start, stop, name in activities[first:last]:
            parts["gaps"] += max(0.0, start - end)
            more = max(0.0, stop - max(start, end))
            parts[part_of[name]] += more
            added[name] += more
            launches[name] += 1
            end = max(end, stop)
        # The next step may begin before this one's last kernel has ended.
        parts["gaps"] += max(0.0, activities[last][0] - end)
    count = len(steps)
    kernels = [(name, added[name] / count, launches[name] / count) for name in added]
    kernels.sort(key=lambda kernel: -kernel[1])
    return StepParts(num_steps=count, parts_us={name: parts[name] / count for name in PARTS}, kernels=kernels)


def _parts_by_name(names: set[str]) -> dict[str, str]:
    found = {name: part for name in names if (part := kernel_part(name)) is not None}
    unknown = sorted(names - found.keys())
    if unknown:
        raise PhonographError(
            f"step report: no part of a step is declared for {', '.join(map(shortened, unknown))}; "
            "declare it in benchmarks/bench/kernel_parts.py"
        )
    return found


def bench_step(llm: LLM, cases: Sequence[DecodeCase], progress: BenchProgress) -> Iterator[Row]:
    """Measure the parts of a step while all sequences decode, with the work of products and attention.

    Raises:
        ConfigError: the engine runs on a CPU.
        PhonographError: a kernel of the step is missing in `kernel_parts`.
    """
    plan = llm.plan
    chip = this_chip(plan.device.kind)
    for case, decode in steady_decodes(llm, cases, progress, "step cases", TOKENS):
        before = Counter(llm.step_counts)
        found = step_parts(device_activities(decode))
        work = decode_work(
            plan.model,
            plan.attention,
            num_seqs=case.num_seqs,
            context=case.context + TOKENS // 2,
        )
        facts = {
            "bs": case.num_seqs,
            "ctx": case.context,
            "step_us": round(found.step_us, 1),
            **{f"{name}_us": round(value, 1) for name, value in found.parts_us.items()},
            "work": {
                name: {"bytes": part.num_bytes, "operations": part.num_operations}
                for name, part in zip(("products", "attention"), work, strict=True)
            },
            "kernels": [
                {"kernel": name[:120], "us": round(us, 2), "launches": round(launches, 2)}
                for name, us, launches in found.kernels[:MAX_KERNELS]
            ],
        }
        if chip is not None:
            facts["floor_us"] = round(1e6 * sum(chip.seconds(*part) for part in work), 1)
        yield Row(suite="step", case=str(case), facts=facts, steps=Counter(llm.step_counts) - before)
