"""A server of ours under many streams for long, some of them cut at random: no error, nothing left, memory flat.

Memory is the resident set of each process, sampled all the time. What counts is the line fitted to the second half,
when caches are full: by how much it rises in ten minutes, as a share of its mean.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from checks.processes import ServerProcess
from checks.serving.faults import engine_of
from checks.serving.mixture import Mixture, Stream, problem_of
from checks.serving.scrape import read_metrics
from phonograph.bench.serving.connection import Recording, Target, exchange

SAMPLE_SECONDS = 5.0
LEAST_SAMPLES = 20
"""A short soak is looked at more often, so that it too sees the server in the middle of its work."""
SETTLE_SECONDS = 1.0
"""Time that the server has to close connections before its files are counted."""
IDLE_SECONDS = 60.0
"""Time after the last stream in which nothing may be left of any."""
EXIT_SECONDS = 10.0
"""Time from SIGTERM to the end of an idle server: less than it gives to what it believes to be open."""
ANSWER_SECONDS = 300.0
FLAT_SECONDS = 600.0
MOST_GROWTH = 0.01
"""Largest growth in `FLAT_SECONDS`, as a share of the mean."""
JUDGED_SECONDS = 300.0
"""A shorter run says nothing about memory: caches are still filling in its second half."""
SHOWN = 10
"""Number of problems of streams that are reported in full."""
MIB = 2**20

HTTP, ENGINE, OTHERS = "http", "engine", "others"
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the server at one moment.

    at:     seconds since the beginning
    rss:    bytes of the HTTP process, the engine's, and all others that these started
    gauges: of /metrics
    """

    at: float
    rss: dict[str, int]
    gauges: dict[str, float]


@dataclass(slots=True)
class Tally:
    """Counts of streams by their end. `latency` is the running mean, in seconds, of complete streams."""

    complete: Counter[str] = field(default_factory=Counter[str])
    aborted: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    num_bytes: int = 0
    latency: float = 0.5


async def soak(
    server: ServerProcess,
    *,
    seconds: float,
    num_streams: int,
    abort_share: float,
    seed: int,
    progress: Callable[[Sample, Tally], None],
) -> dict[str, Any]:
    """Keep so many streams open for so long, then end the server. `problems` in the result lists faults.

    abort_share: of the streams, those that are cut at a random moment, before their first token or long after it
    """
    target = Target.parse(server.url)
    processes = Processes(server)
    mixture, rng = Mixture(seed), random.Random(seed)
    # What is started by the first requests, such as processes for grammars, is there before files are counted.
    await asyncio.gather(*(_ask(target, mixture.draw()) for _ in range(num_streams)))
    await asyncio.sleep(SETTLE_SECONDS)
    files = processes.num_files()
    tally, samples = Tally(), list[Sample]()
    between = min(SAMPLE_SECONDS, seconds / LEAST_SAMPLES)
    began = time.monotonic()

    async def watch() -> None:
        while True:
            samples.append(Sample(time.monotonic() - began, processes.rss(), await gauges(target)))
            progress(samples[-1], tally)
            await asyncio.sleep(between)

    watcher = asyncio.create_task(watch())
    try:
        await asyncio.gather(
            *(_client(target, tally, mixture, rng, began + seconds, abort_share) for _ in range(num_streams))
        )
    finally:
        watcher.cancel()
    took = time.monotonic() - began
    problems, idle = await _until_idle(target, processes, files)
    metrics = await read_metrics(target)
    end = await asyncio.to_thread(_end, server, problems)
    memory = {name: growth([(one.at, one.rss[name]) for one in samples]) for name in (HTTP, ENGINE, OTHERS)}
    for name, found in memory.items():
        if took >= JUDGED_SECONDS and found["growth_in_10_min"] > MOST_GROWTH:
            problems.append(f"the memory of {name} grows by {found['growth_in_10_min']:.2%} in ten minutes")
    problems += [f"{len(tally.problems)} answers were wrong"] if tally.problems else []
    return {
        "seconds": round(took, 1),
        "streams": {
            "complete": sum(tally.complete.values()),
            "aborted": sum(tally.aborted.values()),
            "wrong": len(tally.problems),
            "by_kind": {kind: [tally.complete[kind], tally.aborted[kind]] for kind in sorted(tally.complete)},
            "first_problems": tally.problems[:SHOWN],
        },
        "server": {
            name: metrics[name]
            for name in sorted(metrics)
            if name.startswith(("vllm:request_success", "vllm:num_preemptions", "vllm:prefix_", "vllm:generation_"))
        },
        "samples": len(samples),
        "seen": {name: _range([one.gauges[name] for one in samples]) for name in GAUGES},
        "idle": idle,
        "end": end,
        "memory": {"judged": took >= JUDGED_SECONDS, **memory},
        "problems": problems,
    }


class Processes:
    """The processes of a server: HTTP, the engine, and what compiles grammars or watches over resources."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = psutil.Process(server.pid)
        self._engine = engine_of(server)

    def rss(self) -> dict[str, int]:
        named = {HTTP: self._http, ENGINE: self._engine}
        found = {name: process.memory_info().rss for name, process in named.items()}
        others = 0
        for process in self._http.children(recursive=True):
            if process != self._engine:
                try:
                    others += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue  # it has ended since it was listed
        return {**found, OTHERS: others}

    def num_files(self) -> dict[str, int]:
        """Open files, sockets among them."""
        return {HTTP: self._http.num_fds(), ENGINE: self._engine.num_fds()}


def growth(points: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Fit a line to the second half of (seconds, bytes); return its rise in ten minutes, as a share of its mean."""
    half = points[len(points) // 2 :]
    times, sizes = [at for at, _ in half], [float(size) for _, size in half]
    middle, mean = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((at - middle) ** 2 for at in times)
    slope = (
        sum((at - middle) * (size - mean) for at, size in zip(times, sizes, strict=True)) / spread if spread else 0.0
    )
    thinned = points[:: max(1, len(points) // 20)]
    return {
        "growth_in_10_min": round(slope * FLAT_SECONDS / mean, 5) if mean else 0.0,
        "mean_mib": round(mean / MIB, 1),
        "least_mib": round(min(sizes) / MIB, 1),
        "most_mib": round(max(sizes) / MIB, 1),
        "mib_over_time": " ".join(f"{size / MIB:.1f}" for _, size in thinned),
    }


async def gauges(target: Target) -> dict[str, float]:
    metrics = await read_metrics(target)
    return {name: metrics[metric] for name, metric in GAUGES.items()}


async def _client(
    target: Target, tally: Tally, mixture: Mixture, rng: random.Random, until: float, abort_share: float
) -> None:
    """One stream after another, each on a connection of its own."""
    while time.monotonic() < until:
        stream = mixture.draw()
        cut_after = rng.uniform(0, 1.5 * tally.latency) if rng.random() < abort_share else None
        began = time.monotonic()
        recording, aborted = await _ask(target, stream, cut_after)
        problem = problem_of(stream, recording, aborted=aborted)
        if problem is not None:
            tally.problems.append(f"{stream.kind}: {problem}")
        elif aborted:
            tally.aborted[stream.kind] += 1
        else:
            tally.complete[stream.kind] += 1
            tally.latency += 0.02 * (time.monotonic() - began - tally.latency)
        tally.num_bytes += sum(map(len, recording.pieces))


async def _ask(target: Target, stream: Stream, cut_after: float | None = None) -> tuple[Recording, bool]:
    """Return the answer, and True if the connection was cut before its end, after so many seconds."""
    recording = Recording()
    asked = asyncio.create_task(
        exchange(
            target,
            "POST",
            stream.path,
            json.dumps(stream.body).encode(),
            headers={},
            timeout=ANSWER_SECONDS,
            recording=recording,
        )
    )
    done, _ = await asyncio.wait([asked], timeout=cut_after)
    if done:
        return await asked, False
    asked.cancel()
    await asyncio.wait([asked])
    return recording, True


async def _until_idle(target: Target, processes: Processes, files: dict[str, int]) -> tuple[list[str], dict[str, Any]]:
    """Wait until no stream holds anything, and return what remains."""
    began = time.monotonic()
    while True:
        # Counted first: the server may not have closed the connection yet that the question was asked on.
        now = processes.num_files()
        left: dict[str, Any] = await gauges(target)
        left |= {f"files_of_{name}": now[name] - count for name, count in files.items()}
        seconds = time.monotonic() - began
        held = [f"{value:g} {name} are left" for name, value in left.items() if value > 0]
        if not held or seconds > IDLE_SECONDS:
            return held, {"seconds": round(seconds, 1), "left": left, "files_before": files}
        await asyncio.sleep(0.2)


def _end(server: ServerProcess, problems: list[str]) -> dict[str, Any]:
    """Send SIGTERM to an idle server."""
    children = psutil.Process(server.pid).children(recursive=True)
    began = time.monotonic()
    server.terminate()
    code = server.wait()
    seconds = time.monotonic() - began
    # The children of the server's children end by themselves, on a busy machine some seconds later.
    _, alive = psutil.wait_procs(children, timeout=EXIT_SECONDS)
    if code != 0:
        problems.append(f"exit code {code} after SIGTERM")
    if seconds > EXIT_SECONDS:
        problems.append(f"the end took {seconds:.1f} s, so something was still open")
    if alive:
        problems.append(f"{len(alive)} processes are left")
    return {"exit_code": code, "seconds": round(seconds, 2), "processes_left": len(alive)}


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(sum(values) / len(values), 3), "most": round(max(values), 3)}
