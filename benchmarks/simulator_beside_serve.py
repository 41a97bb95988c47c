"""Compares `phonograph simulate` with `phonograph serve` on five workloads, which the table of step times has not.

    python benchmarks/simulator_beside_serve.py MODEL --table steps.json --folder runs --output FILE [serve flags]

The table is of `phonograph bench steps` with the same flags. Each workload is a trace in the folder. A server gets it
by `bench serve --dataset-name trace` several times, of which medians count: the TTFT of a burst differs by 11% between
two runs. The simulator reads the same trace. What the folder has already is not run again, so that a machine without a
GPU can simulate what a server on a GPU has measured (`--device-name`). Flags after these are those of the server and of
the simulator, as `--load-format dummy`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.request import urlopen

from bench.result_files import output_file, write_result
from checks.processes import ServerProcess, leave_at_sigterm
from phonograph.bench.records.record import provenance
from phonograph.bench.serving.lengths import sharegpt_like_lengths
from phonograph.bench.serving.load import arrival_times
from phonograph.engine.offline.simulation.request_traces import HASHED_TOKENS

READY_SECONDS = 300
BARS = {
    "output_throughput": 0.05,
    "median_tpot_ms": 0.05,
    "median_ttft_ms": 0.10,
    "p99_ttft_ms": 0.20,
    "prefix_hit_rate": 0.02,
    "steps": 0.02,
}
"""Largest relative differences."""


class Workload(NamedTuple):
    """Requests a second, and tokens of each prompt and answer with the hashes of the prompt's blocks."""

    rate: float
    requests: list[tuple[int, int, tuple[int, ...]]]


def chat(rng: random.Random) -> Workload:
    """Lengths like those of ShareGPT."""
    return Workload(20, [(*lens, ()) for lens in sharegpt_like_lengths(rng, 400)])


def long_prompts(rng: random.Random) -> Workload:
    return Workload(3, [(rng.randint(2000, 6000), 100, ()) for _ in range(60)])


def burst(rng: random.Random) -> Workload:
    """All at once."""
    return Workload(math.inf, [(rng.randint(50, 400), rng.randint(200, 400), ()) for _ in range(256)])


def shared_prefixes(rng: random.Random) -> Workload:
    """Eight prefixes of 2,048 tokens, each with own tokens of one block."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for number in range(200):
        first = 4 * rng.randrange(8)
        input_len = 4 * HASHED_TOKENS + rng.randint(100, HASHED_TOKENS)
        found.append((input_len, rng.randint(64, 256), (*range(first, first + 4), 1000 + number)))
    return Workload(12, found)


def saturation(rng: random.Random) -> Workload:
    """More than an engine can take at once."""
    return Workload(40, [(rng.randint(500, 1500), rng.randint(100, 300), ()) for _ in range(400)])


WORKLOADS: tuple[Callable[[random.Random], Workload], ...] = chat, long_prompts, burst, shared_prefixes, saturation


def write_trace(make: Callable[[random.Random], Workload], path: Path, scale: float) -> None:
    """Write a workload as a trace in Mooncake's form, with a share of its requests."""
    rng = random.Random(make.__name__)
    rate, requests = make(rng)
    count = max(2, round(len(requests) * scale))
    times = arrival_times(rng, count, rate=rate, burstiness=1.0)
    names = "timestamp", "input_length", "output_length", "hash_ids"
    rows = [(round(time * 1e3), *request) for time, request in zip(times, requests, strict=False)]
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), encoding="utf-8")


def steps_of(server: ServerProcess) -> Counter[str]:
    """Return the steps of a server by graph mode and kind of batch, named as in simulations."""
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("phonograph:steps_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            mode = labels["mode"].lower()
            found["eager" if mode == "none" else f"{mode} {labels['kind']}"] += round(float(line.split()[-1]))
    return found


def measure(server: ServerProcess, trace: Path, tokenizer: str, seed: int) -> dict[str, Any]:
    """Send a trace to a server; return the figures of `bench serve`, and the steps. A seed is used once, as prompts of
    an earlier run would be in the prefix cache."""
    output = trace.with_suffix(".served.jsonl")
    output.unlink(missing_ok=True)
    flags = [
        "--base-url",
        server.url,
        "--tokenizer",
        tokenizer,
        "--dataset-name",
        "trace",
        "--dataset-path",
        str(trace),
    ]
    flags += ["--num-warmups", "0", "--seed", str(seed), "--output", str(output)]
    before = steps_of(server)
    run([sys.executable, "-m", "phonograph", "bench", "serve", *flags])
    facts = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    output.unlink()
    return figures(facts, dict(steps_of(server) - before))


def simulate(model: str, trace: Path, table: Path, flags: list[str]) -> dict[str, Any]:
    """Simulate a trace; return the same figures."""
    words = ["simulate", model, "--trace", str(trace), "--step-times", str(table), "--json", *flags]
    facts = json.loads(run([sys.executable, "-m", "phonograph", *words]).splitlines()[-1])
    steps: Counter[str] = Counter()
    for one in facts["graphs"]:
        steps[one["graph"]] += one["steps"]
    return figures(facts, dict(steps))


def figures(facts: dict[str, Any], steps: dict[str, int]) -> dict[str, Any]:
    names = "duration", "output_throughput", "median_tpot_ms", "median_ttft_ms", "p99_ttft_ms"
    rate = facts["total_cached_tokens"] / facts["total_input_tokens"]
    return {**{name: facts[name] for name in names}, "prefix_hit_rate": rate, "steps": steps}


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, and of the steps of each kind, over runs of one trace."""
    steps = {kind: median(one["steps"].get(kind, 0) for one in rounds) for one in rounds for kind in one["steps"]}
    return {name: median(one[name] for one in rounds) for name in rounds[0] if name != "steps"} | {"steps": steps}


def differences(served: dict[str, Any], simulated: dict[str, Any]) -> dict[str, float]:
    """Return relative differences; that of steps is the largest over their kinds, as a share of all."""
    total = sum(served["steps"].values())
    kinds = {*served["steps"], *simulated["steps"]}
    found = {name: simulated[name] / served[name] - 1 for name in BARS if name != "steps" and served[name]}
    counts = [(simulated["steps"].get(kind, 0) - served["steps"].get(kind, 0)) / total for kind in kinds]
    return found | {"steps": max(counts, key=abs)}


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=output_file, required=True)
    parser.add_argument("--tokenizer", help="of a model without one; only its size counts, as prompts are tokens")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests of each workload")
    parser.add_argument("--rounds", type=int, default=3, help="how often each workload is sent")
    parser.add_argument("--device-name", help="device of the plan, where the server ran")
    arguments, flags = parser.parse_known_args()
    leave_at_sigterm()
    origin = provenance()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    traces: list[Path] = []
    for make in WORKLOADS:
        traces.append(arguments.folder / f"{make.__name__}.jsonl")
        if not traces[-1].exists():
            write_trace(make, traces[-1], arguments.scale)
    missing = [one for one in traces if not one.with_suffix(".served.json").exists()]
    if missing:
        tokenizer = ["--tokenizer", arguments.tokenizer] if arguments.tokenizer is not None else []
        server = ServerProcess.of_checkout([arguments.model, *tokenizer, *flags], arguments.folder / "server.log")
        try:
            server.wait_until_ready(READY_SECONDS, print)
            seeds = itertools.count()
            for trace in missing:
                rounds = [
                    measure(server, trace, arguments.tokenizer or "demo", next(seeds)) for _ in range(arguments.rounds)
                ]
                served = medians(rounds) | {"rounds": rounds}
                trace.with_suffix(".served.json").write_text(json.dumps(served), encoding="utf-8")
                print(trace.stem, json.dumps(served), flush=True)
        finally:
            server.stop()
    device = [] if arguments.device_name is None else ["--device-name", arguments.device_name]
    rows: list[dict[str, Any]] = []
    for trace in traces:
        served = json.loads(trace.with_suffix(".served.json").read_text(encoding="utf-8"))
        simulated = simulate(arguments.model, trace, arguments.table, [*flags, *device])
        apart = differences(served, simulated)
        rows.append({"workload": trace.stem, "served": served, "simulated": simulated, "differences": apart})
        late = [name for name, value in apart.items() if abs(value) > BARS[name]]
        shown = ", ".join(f"{name} {value:+.1%}" for name, value in apart.items())
        print(f"{trace.stem}: {shown}; missed: {', '.join(late) or 'none'}", flush=True)
    write_result(arguments.output, origin, {"model": Path(arguments.model).name, "flags": flags, "rows": rows})


if __name__ == "__main__":
    main()
