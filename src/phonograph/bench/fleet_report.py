"""Result of a simulation as JSON facts, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phonograph.bench.records.output import writing
from phonograph.engine.offline.simulation.coarse_fleet import simulate_coarsely
from phonograph.engine.offline.simulation.fleet import KV_SECONDS, FleetResult, simulate
from phonograph.engine.offline.simulation.request_traces import TracedRequest
from phonograph.engine.offline.simulation.step_times import StepTimes
from phonograph.engine.plan import EnginePlan

Values = Sequence[float]
SAMPLE_ENGINES, SAMPLE_REQUESTS = 8, 2000
"""Most engines and requests of the sample on which a coarse simulation is compared with an exact one."""
FRONT_SECONDS = 1.6e-3
"""Time that a server adds to that of a first token: HTTP, tokens, and the ways to the engine's process and back. It is
the sum of these parts of a short request, by marks in both processes on an H200's host (docs/notebook/start.md)."""


def fleet_facts(result: FleetResult, num_engines: int, price: float | None) -> dict[str, Any]:
    """Return the facts of a simulation, with the keys of `bench serve` where it has them.

    Args:
        result: outcome of the simulation.
        num_engines: number of engines.
        price: price of one engine for an hour; None without.
    """
    answers, seconds = result.answers, result.seconds
    inputs = sum(answer.request.input_len for answer in answers)
    outputs = sum(answer.request.output_len for answer in answers)
    cached = sum(answer.num_cached for answer in answers)
    uses = result.kv_use.values()
    graphs = sorted(result.graphs.items())
    computed = sum(use.num_tokens for _, use in graphs)
    padded = sum(use.num_padded for _, use in graphs)
    cost = None if price is None else price * num_engines * seconds / 3600
    return {
        "engines": num_engines,
        "duration": seconds,
        "completed": len(answers),
        "total_input_tokens": inputs,
        "total_cached_tokens": cached,
        "total_output_tokens": outputs,
        "request_throughput": len(answers) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        **{name: value for kind, values in latencies(result).items() for name, value in _latency(kind, values).items()},
        "prefix_hit_rate": cached / inputs,
        "num_preemptions": sum(answer.num_preemptions for answer in answers),
        "kv_use_mean": sum(total for total, _, _ in uses) / sum(num_steps for _, num_steps, _ in uses),
        "kv_use_max": max(most for _, _, most in uses),
        "busy_share": sum(use.seconds for _, use in graphs) / (seconds * num_engines),
        "padding": padded / (computed + padded),
        "graphs": [
            {
                "graph": label,
                "graph_tokens": tokens,
                "steps": use.num_steps,
                "tokens": use.num_tokens,
                "padded_tokens": use.num_padded,
                "seconds": use.seconds,
            }
            for (label, tokens), use in graphs
        ],
        "routed": [
            {"engine": engine, "reason": reason, "prompts": count}
            for (engine, reason), count in sorted(result.routed.items())
        ],
        "cost": cost,
        "cost_per_million_output_tokens": None if cost is None else cost / outputs * 1e6,
    }


def coarse_difference(
    plan: EnginePlan, times: StepTimes, trace: Sequence[TracedRequest], num_engines: int
) -> dict[str, Any]:
    """Return the relative difference of a coarse simulation to an exact one, on a sample with the same load."""
    engines = min(num_engines, SAMPLE_ENGINES)
    sample = trace[:: -(-num_engines // engines)][:SAMPLE_REQUESTS]
    results = (one(plan, times, sample, num_engines=engines) for one in (simulate, simulate_coarsely))
    exact, coarse = (fleet_facts(result, engines, None) for result in results)
    names = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
    relative = {name: coarse[name] / exact[name] - 1 for name in names if exact[name]}
    return {"engines": engines, "requests": len(sample), "relative": relative}


def latencies(result: FleetResult) -> dict[str, list[float]]:
    """Return TTFT, TPOT and end-to-end latency in seconds as at a server, a value for each request that has one."""
    answers = result.answers
    return {
        "ttft": [answer.first_token - answer.request.arrival + FRONT_SECONDS for answer in answers],
        "tpot": [
            (answer.ended - answer.first_token) / (answer.request.output_len - 1)
            for answer in answers
            if answer.request.output_len > 1
        ],
        "e2el": [answer.ended - answer.request.arrival + FRONT_SECONDS for answer in answers],
    }


def plot_fleet(result: FleetResult, path: Path, title: str) -> None:
    """Draw the latencies and the use of the KV cache to a file of any type that matplotlib writes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for axis, (kind, values) in zip(axes, latencies(result).items(), strict=False):
        if kind != "e2el":
            axis.plot(np.sort(values) * 1e3, np.linspace(0, 1, len(values)))
            axis.set(xlabel=f"{kind.upper()} in ms", ylabel="share of requests", ylim=(0, 1))
    uses = sorted(result.kv_use.items())
    axes[2].plot(
        [interval * KV_SECONDS for interval, _ in uses], [total / num_steps for _, (total, num_steps, _) in uses]
    )
    axes[2].set(xlabel="seconds", ylabel="used share of the KV cache", ylim=(0, 1))
    figure.suptitle(title)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path)
    pyplot.close(figure)


def _latency(kind: str, seconds: Values) -> dict[str, float | None]:
    names = ("mean", "median", "p99")
    if not seconds:
        return {f"{name}_{kind}_ms": None for name in names}
    found = np.mean(seconds), np.median(seconds), np.percentile(seconds, 99)
    return {f"{name}_{kind}_ms": float(value) * 1e3 for name, value in zip(names, found, strict=True)}
