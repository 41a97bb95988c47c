"""`phonograph bench`: latency of one batch and throughput of many requests, with the graph decisions that ran.

The steps are part of every result, so that nobody takes the figures of an eager run for those of a graph.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.options import takes_engine_config
from phonograph.cli.show import Json, engine_facts, mode_line, note, print_json, progress_bar, start, steps_text
from phonograph.config import EngineConfig

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM

app = App(name="bench", help="Measure latency and throughput on random tokens.", help_format="plaintext")


@app.command
@takes_engine_config
def latency(
    config: EngineConfig,
    *,
    input_len: Annotated[int, Parameter(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, Parameter(help="Tokens to generate for each.")] = 128,
    batch_size: Annotated[int, Parameter(help="Requests that run at once.")] = 8,
    num_iters_warmup: Annotated[int, Parameter(help="Batches to run before measuring.")] = 10,
    num_iters: Annotated[int, Parameter(help="Batches to measure.")] = 30,
    as_json: Json = False,
) -> int:
    """Time one batch, alone in the engine, from its start to its last token."""
    from phonograph.evaluation.bench import bench_latency, summary
    from phonograph.evaluation.record import provenance

    origin = provenance()
    llm = start(config)
    with progress_bar() as progress:
        result = bench_latency(
            llm,
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters,
            progress=progress,
        )
    asked = {
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "num_iters_warmup": num_iters_warmup,
        "num_iters": num_iters,
    }
    times = {"latency": summary(result.latency), "ttft": summary(result.ttft), "itl": summary(result.itl)}
    rates = {"output_tokens_per_second": batch_size * output_len * num_iters / sum(result.latency)}
    _report(llm, origin, asked, rates, times, result.steps, as_json=as_json)
    return 0


@app.command
@takes_engine_config
def throughput(
    config: EngineConfig,
    *,
    num_prompts: Annotated[int, Parameter(help="Requests, all there from the start.")] = 100,
    input_len: Annotated[str, Parameter(help="Tokens of a prompt, or a range such as 100-1024.")] = "32",
    output_len: Annotated[str, Parameter(help="Tokens to generate, or a range.")] = "128",
    as_json: Json = False,
) -> int:
    """Serve many random requests as fast as the engine can."""
    from phonograph.evaluation.bench import Lengths, bench_throughput, summary
    from phonograph.evaluation.record import provenance

    lengths = {
        "input_len": Lengths.parse("input_len", input_len),
        "output_len": Lengths.parse("output_len", output_len),
    }
    origin = provenance()
    llm = start(config)
    with progress_bar() as progress:
        run = bench_throughput(llm, num_prompts=num_prompts, **lengths, progress=progress)
    asked = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    rates = {
        "requests_per_second": num_prompts / run.seconds,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "total_tokens_per_second": (run.prompt_tokens + run.output_tokens) / run.seconds,
        "seconds": run.seconds,
    }
    times = {
        "ttft": summary([answer.ttft for answer in run.answers]),
        "itl": summary([gap for answer in run.answers for gap in answer.itl]),
    }
    _report(llm, origin, asked, rates, times, run.steps, as_json=as_json)
    return 0


def _report(
    llm: LLM,
    origin: dict[str, Any],
    asked: dict[str, Any],
    rates: dict[str, float],
    times: dict[str, dict[str, float]],
    steps: Counter[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        seconds = {f"{name}_seconds": summary for name, summary in times.items()}
        print_json({**origin, **engine_facts(llm), **asked, **rates, **seconds, "steps": dict(steps)})
        return
    for name, value in rates.items():
        print(f"{name.replace('_', ' ')}: {value:.2f}")
    table = Table("ms", "mean", "p50", "p90", "p99")
    for name, summary in times.items():
        if summary:
            table.add_row(name, *(f"{value * 1e3:.2f}" for value in summary.values()))
    Console().print(table, markup=False)
    note(f"{mode_line(llm.plan)}: {steps_text(steps)}")
