"""`phonograph simulate`: what a fleet of engines would do with a trace, in simulated time and without a GPU."""

from __future__ import annotations

import importlib.util
import math
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from phonograph.cli.commands.explain import planned_device
from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import Json, Output, note, print_table, report
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError

COUNTS = {
    "engines": "Engines",
    "completed": "Requests",
    "duration": "Duration (s)",
    "request_throughput": "Requests/s",
    "output_throughput": "Output tokens/s",
    "total_token_throughput": "Tokens/s, input and output",
    "prefix_hit_rate": "Share of input tokens cached",
    "num_preemptions": "Preemptions",
    "kv_use_mean": "Used share of the KV cache, mean",
    "kv_use_max": "Used share of the KV cache, most",
    "busy_share": "Share of time in steps",
    "padding": "Share of padding in steps",
    "cost": "Cost",
    "cost_per_million_output_tokens": "Cost of a million output tokens",
}
MOST_GRAPHS = 12


@takes_engine_config
def simulate(
    config: EngineConfig,
    *,
    trace: Annotated[
        Path | None, Parameter(help="Requests: a .jsonl file of Mooncake's form, or a .csv file of BurstGPT's.")
    ] = None,
    num_prompts: Annotated[
        int | None, Parameter(help="Requests to draw, 1000 by default; with a trace its first ones.")
    ] = None,
    request_rate: Annotated[float, Parameter(help="Drawn requests a second; inf is all at once.")] = math.inf,
    input_len: Annotated[str, Parameter(help="Tokens of a drawn prompt, or a range such as 100-1023.")] = "1024",
    output_len: Annotated[str, Parameter(help="Tokens of a drawn answer, or a range.")] = "128",
    arrival_seed: Annotated[int, Parameter(help="Seed of drawn lengths and times.")] = 0,
    num_engines: Annotated[int | None, Parameter(help="Engines; default: data_parallel_size.")] = None,
    step_times: Annotated[
        Path | None, Parameter(help="Table of bench steps; without one, a roofline of the device.")
    ] = None,
    device_name: Annotated[str | None, Parameter(help="Plan for this device, such as h100.")] = None,
    coarse: Annotated[
        bool,
        Parameter(negative="", help="Many decode steps at once, for thousands of engines; compared on a sample."),
    ] = False,
    price: Annotated[float | None, Parameter(help="Price of one engine for an hour.")] = None,
    plot: Annotated[Path | None, Parameter(help="File of a plot, such as fleet.svg.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Simulate engines: the real scheduler, cache, dispatcher and router, with steps of known time."""
    from phonograph.bench.cases import Lengths
    from phonograph.bench.fleet_report import coarse_difference, fleet_facts, plot_fleet
    from phonograph.bench.records.output import check_output
    from phonograph.bench.records.record import provenance
    from phonograph.bench.records.results import append_record, check_at_least
    from phonograph.engine.offline.simulation import request_traces
    from phonograph.engine.offline.simulation.coarse_fleet import simulate_coarsely
    from phonograph.engine.offline.simulation.fleet import several
    from phonograph.engine.offline.simulation.fleet import simulate as run
    from phonograph.engine.offline.simulation.step_times import RooflineTimes, read_table
    from phonograph.engine.plan import make_plan
    from phonograph.engine.startup.configured_model import read_configured_model

    engines = config.data_parallel_size if num_engines is None else num_engines
    check_at_least("num_engines", engines, 1)
    count = 1000 if num_prompts is None and trace is None else num_prompts
    if count is not None:
        check_at_least("num_prompts", count, 1)
    if not request_rate > 0:
        raise ConfigError("request_rate", request_rate, "must be above 0; inf sends all at once")
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError("price", price, "must be a number >= 0")
    if plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("plot", str(plot), "needs the package matplotlib: pip install matplotlib")
        check_output(plot)
    if trace is None:
        draws = Lengths.parse("input_len", input_len).draw, Lengths.parse("output_len", output_len).draw
        requests = request_traces.drawn_trace(count or 1, request_rate, *draws, arrival_seed)
    else:
        requests = request_traces.read_trace(trace)[:count]
    model = read_configured_model(config, config_only=True)
    plan = make_plan(config, model, planned_device(config, device_name))
    times = RooflineTimes(plan) if step_times is None else read_table(step_times, plan)
    began = time.perf_counter()
    with progress_bar() as progress:
        serve = simulate_coarsely if coarse else run
        shared = several(plan, engines) if engines > 1 else plan
        result = serve(shared, times, requests, num_engines=engines, progress=partial(progress, "requests"))
        difference = coarse_difference(shared, times, requests, engines) if coarse else None
    facts = {
        "model": config.model,
        "device": plan.device.name,
        **fleet_facts(result, engines, price),
        "coarse_difference": difference,
        "notes": list(times.notes),
        "simulation_seconds": time.perf_counter() - began,
    }
    if plot is not None:
        plot_fleet(result, plot, f"{config.model} on {engines} x {plan.device.name}")
    record = {**provenance(), **facts}
    save = None if output is None else partial(append_record, output, record)
    report(record, lambda: _print_tables(facts), as_json=as_json, save=save)
    for text in times.notes:
        note(text)
    if difference is not None:
        parts = ", ".join(f"{name} {value:+.1%}" for name, value in difference["relative"].items())
        note(f"coarse against exact, {difference['requests']} requests on {difference['engines']} engines: {parts}")
    return 0


def _print_tables(facts: dict[str, Any]) -> None:
    rows = [(name, _number(facts[key])) for key, name in COUNTS.items() if facts[key] is not None]
    print_table(("simulated", ""), rows)
    columns = ("mean", "median", "p99")
    kinds = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
    latencies = [(name, *(_number(facts[f"{one}_{kind}_ms"]) for one in columns)) for kind, name in kinds.items()]
    print_table(("ms", "mean", "median", "P99"), latencies)
    graphs = sorted(facts["graphs"], key=lambda one: -one["seconds"])
    shown = [
        (f"{one['graph']} {one['graph_tokens']}", *(_number(one[key]) for key in ("steps", "padded_tokens", "seconds")))
        for one in graphs[:MOST_GRAPHS]
    ]
    if len(graphs) > MOST_GRAPHS:
        shown.append((f"{len(graphs) - MOST_GRAPHS} more", "", "", ""))
    print_table(("graph", "steps", "padding", "s"), shown)
    if facts["routed"]:
        routed = [(str(one["engine"]), one["reason"], str(one["prompts"])) for one in facts["routed"]]
        print_table(("engine", "reason", "prompts"), routed[: 5 * MOST_GRAPHS])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
