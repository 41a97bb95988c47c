"""`phonograph bench`: latency and throughput of an engine, with the graph decisions that ran, and a client for servers.

Each command prints a table, or with `--json` its record in one line. Each row counts the steps by graph decision, so
that an eager run shows as such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from phonograph.cli import show
from phonograph.cli.examples import epilogue
from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import OUTPUT, Json, Output, note, start
from phonograph.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from phonograph.bench.records.results import Row
    from phonograph.bench.suites import Suite

Columns = Mapping[str, Sequence[str]]
"""Fields of a suite's rows in its table, between the case and the steps."""
COLUMNS: Columns = {
    "latency": ("out_len", "bs", "ms", "prefill_ms", "prefill_tok_s", "decode_ms", "decode_tok_s"),
    "throughput": ("in_tok", "out_tok", "s", "out_tok_s"),
}

app = App(
    name="bench",
    help="Measure what the engine does, on random tokens, or a server.",
    help_format="plaintext",
    help_epilogue=epilogue("bench"),
)
app.command(
    "phonograph.cli.commands.bench_serve:serve",
    name="serve",
    help="Load any server with OpenAI's API.",
    help_epilogue=epilogue("bench serve"),
)


@app.command(help_epilogue=epilogue("bench latency"))
@takes_engine_config
def latency(
    config: EngineConfig,
    *,
    input_len: Annotated[str | None, Parameter(help="Tokens of each prompt, one row a number: 500,16000.")] = None,
    output_len: Annotated[int, Parameter(help="Tokens to generate for each.")] = 4,
    batch_size: Annotated[int, Parameter(help="Requests that run at once.")] = 1,
    num_iters_warmup: Annotated[int, Parameter(help="Batches to run before measuring.")] = 1,
    num_iters: Annotated[int, Parameter(help="Batches to measure.")] = 5,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time one batch, alone in the engine, from its start to its last token, and its prefill and decode apart."""
    from phonograph.bench.suites import latency_suite

    workload = latency_suite(
        input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters_warmup=num_iters_warmup,
        num_iters=num_iters,
    )
    return run_suites(config, {"latency": workload}, output, as_json=as_json)


@app.command(help_epilogue=epilogue("bench throughput"))
@takes_engine_config
def throughput(
    config: EngineConfig,
    *,
    num_prompts: Annotated[int, Parameter(help="Requests, all there from the start.")] = 256,
    input_len: Annotated[str, Parameter(help="Tokens of a prompt, or a range such as 100-1023.")] = "100-1023",
    output_len: Annotated[str, Parameter(help="Tokens to generate, or a range.")] = "100-1023",
    longest_first: Annotated[bool, Parameter(negative="", help="Queue those of the most output tokens first.")] = False,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Serve many random requests as fast as the engine can."""
    from phonograph.bench.suites import throughput_suite

    workload = throughput_suite(num_prompts, input_len, output_len, longest_first=longest_first)
    return run_suites(config, {"throughput": workload}, output, as_json=as_json)


@app.command(help_epilogue=epilogue("bench steps"))
@takes_engine_config
def steps(
    config: EngineConfig,
    *,
    table: Annotated[Path, OUTPUT, Parameter(help="File of the table, JSON; it is replaced.")],
    input_len: Annotated[str, Parameter(help="Tokens of prompts, with commas between them.")] = "16,256,2k,16k",
    num_iters: Annotated[int, Parameter(help="Repetitions.")] = 1,
) -> int:
    """Measure the time of steps by graph and context, for phonograph simulate."""
    from phonograph.bench.cases import parse_size
    from phonograph.bench.records.output import writing
    from phonograph.bench.records.results import check_at_least
    from phonograph.bench.step_bench import bench_steps

    lens = [parse_size("input_len", length) for length in input_len.split(",")]
    check_at_least("num_iters", num_iters, 1)
    llm = start(config)
    with progress_bar() as progress:
        measured = bench_steps(llm, lens, num_iters, progress)
    with writing(table):
        table.write_text(json.dumps(measured) + "\n", encoding="utf-8")
    note(f"{len(measured['steps'])} kinds of steps, {llm.plan.resolution.label}")
    return 0


def run_suites(
    config: EngineConfig,
    suites: Mapping[str, Suite],
    output: Path | None,
    *,
    as_json: bool,
    columns: Columns = COLUMNS,
    **limits: int,
) -> int:
    """Start an engine and run workloads by name. If a case fails, the rows before it are still reported.

    Settings that the user has not set are the published ones and `limits`.
    """
    from phonograph.bench.records.record import provenance
    from phonograph.bench.suites import with_published_settings

    origin = provenance()
    llm = start(with_published_settings(config, **limits))
    plan = llm.plan
    facts = {
        **origin,
        **show.engine_facts(llm),
        "max_model_len": plan.limits.max_model_len,
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "kv_cache_tokens": plan.memory.num_tokens,
    }
    rows: list[Row] = []
    try:
        with progress_bar() as progress:
            for run in suites.values():
                for row in run(llm, progress, note):
                    rows.append(row)
    except BaseException:
        if rows:
            report_rows({**facts, "complete": False}, rows, output, as_json=as_json, columns=columns)
        raise
    report_rows(facts, rows, output, as_json=as_json, columns=columns)
    if not as_json:
        note(plan.resolution.label)
    return 0


def report_rows(
    facts: dict[str, Any], rows: Sequence[Row], output: Path | None, *, as_json: bool, columns: Columns
) -> None:
    """Save and print a record: `facts`, then the rows."""
    from phonograph.bench.records.results import append_record

    record = {**facts, "rows": [row.as_json() for row in rows]}
    save = None if output is None else partial(append_record, output, record)

    def print_tables() -> None:
        for suite in dict.fromkeys(row.suite for row in rows):
            _print_table(suite, columns[suite], [row for row in rows if row.suite == suite])

    show.report(record, print_tables, as_json=as_json, save=save)


def _print_table(suite: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    columns = [name for name in columns if any(name in row.facts for row in rows)]
    steps = ["what ran"] if any(row.steps for row in rows) else []
    cells = (
        (
            row.case,
            *(_cell(row.facts.get(name)) for name in columns),
            *(show.steps_text(row.steps) for _ in steps),
        )
        for row in rows
    )
    show.print_table((suite, *columns, *steps), cells)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
