"""`phonograph bench`: the published workloads, the attention kernels and the start, with the graph decisions that ran.

Each command prints a table, or with `--json` its record in one line. The steps are part of every row, so that figures
of an eager run show as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import OUTPUT, Json, engine_facts, note, print_json, start, steps_text
from phonograph.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from phonograph.bench.records.results import Row
    from phonograph.bench.suites import Suite

Output = Annotated[Path | None, OUTPUT, Parameter(help="File to append the result to, one JSON object a line.")]
COLUMNS = {
    "decode": ("itl_ms", "floor_ms"),
    "latency": ("out_len", "bs", "ms"),
    "mixed": ("s", "mixed_steps"),
    "throughput": ("in_tok", "out_tok", "s", "out_tok_s"),
    "idle": ("idle_share", "idle_us", "step_us"),
    "step": ("step_us", "products_us", "attention_us", "rest_us", "gaps_us", "floor_us"),
    "attention": ("provider", "page", "us", "schedule_us", "tb_s", "tflops", "floor_us", "x_floor", "err"),
    "startup": ("seconds", "engine_seconds", "first_tokens_seconds"),
}
"""The fields of a suite's rows that its table has, beside the case and the steps."""

app = App(name="bench", help="Measure what the engine does, on random tokens, or a server.", help_format="plaintext")
app.command("phonograph.cli.commands.bench_serve:serve", name="serve", help="Load any server with OpenAI's API.")


@app.command
@takes_engine_config
def decode(
    config: EngineConfig,
    *,
    cases: Annotated[str | None, Parameter(help="Sequences x context of each row, as 1x1k,8x32k.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time between tokens while 1 to 256 sequences decode, with short and long contexts."""
    from phonograph.bench.suites import decode_suite

    return _run_suites(config, {"decode": decode_suite(cases)}, output, as_json=as_json)


@app.command
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
    """Time one batch, alone in the engine, from its start to its last token."""
    from phonograph.bench.suites import latency_suite

    workload = latency_suite(
        input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters_warmup=num_iters_warmup,
        num_iters=num_iters,
    )
    return _run_suites(config, {"latency": workload}, output, as_json=as_json)


@app.command
@takes_engine_config
def mixed(
    config: EngineConfig,
    *,
    cases: Annotated[str | None, Parameter(help="Tokens of the long prompt, one row a number: 16k,64k.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time one long decode beside a stream of short prompts, two sequences at a time."""
    from phonograph.bench.suites import mixed_suite

    return _run_suites(config, {"mixed": mixed_suite(cases)}, output, as_json=as_json)


@app.command
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
    return _run_suites(config, {"throughput": workload}, output, as_json=as_json)


@app.command
@takes_engine_config
def idle(
    config: EngineConfig,
    *,
    cases: Annotated[str | None, Parameter(help="Sequences x context of each row, as 1x1k,256x512.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Share of the time between steps in which a GPU does nothing, from a profiler's trace of steady decode."""
    from phonograph.bench.suites import idle_suite

    return _run_suites(config, {"idle": idle_suite(cases)}, output, as_json=as_json)


@app.command
@takes_engine_config
def step(
    config: EngineConfig,
    *,
    cases: Annotated[str | None, Parameter(help="Sequences x context of each row, as 1x1k,256x512.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Where a decode step's time goes on a GPU: products, attention, the rest and gaps, from a profiler's trace."""
    from phonograph.bench.suites import step_suite

    return _run_suites(config, {"step": step_suite(cases)}, output, as_json=as_json)


@app.command
@takes_engine_config
def suite(
    config: EngineConfig,
    *,
    suites: Annotated[str, Parameter(help="Of decode, latency, throughput; or mixed alone.")],
    decode_cases: Annotated[str | None, Parameter(help="Rows of decode.")] = None,
    latency_cases: Annotated[str | None, Parameter(help="Rows of latency.")] = None,
    mixed_cases: Annotated[str | None, Parameter(help="Rows of mixed.")] = None,
    num_prompts: Annotated[int, Parameter(help="Requests of throughput.")] = 256,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Run several workloads with one start of the engine."""
    from phonograph.bench import suites as bench_suites

    wanted = bench_suites.check_suites(suites)
    every = {
        "decode": bench_suites.decode_suite(decode_cases),
        "latency": bench_suites.latency_suite(latency_cases),
        "mixed": bench_suites.mixed_suite(mixed_cases),
        "throughput": bench_suites.throughput_suite(num_prompts),
    }
    return _run_suites(config, {name: every[name] for name in wanted}, output, as_json=as_json)


@app.command
@takes_engine_config
def attention(
    config: EngineConfig,
    *,
    cases: Annotated[
        str | None, Parameter(help="Names as decode_8x1k, or count*query@length: 64*1@4096+2048@2048, and so on.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time the attention backend's kernels, with the heads of the model."""
    from phonograph.bench.attention import bench_attention, default_cases
    from phonograph.bench.records.record import provenance
    from phonograph.bench.suites import with_published_settings
    from phonograph.engine.build import this_device
    from phonograph.engine.plan import make_plan
    from phonograph.models.spec import read_configured_model

    origin = provenance()
    config = with_published_settings(config)
    model = read_configured_model(config, config_only=True)
    plan = make_plan(config, model, this_device(config.device))
    names, left_out = (cases.split(","), []) if cases is not None else default_cases(plan)
    for line in left_out:
        note(line)
    with progress_bar() as progress:
        rows = list(bench_attention(plan, names, progress))
    facts = {
        "model": config.model,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.attention.kv_cache_dtype,
        "kv_cache_layout": plan.attention.layout.value,
        "device": plan.device.name,
        "attention_backend": plan.selection.capabilities.label,
    }
    _report({**origin, **facts}, rows, output, as_json=as_json)
    return 1 if any("error" in row.facts for row in rows) else 0


@app.command
@takes_engine_config
def startup(
    config: EngineConfig,
    *,
    once: Annotated[bool, Parameter(negative="", show=False)] = False,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time from the start of a process to an engine that is ready: the first on a machine, and the second."""
    from phonograph.bench.startup import PhaseClock, bench_startup, start_once

    if once:  # a child of the command
        clock = PhaseClock()
        clock.begin("imports")
        print_json(start_once(config, clock))
        return 0
    from phonograph.bench.records.record import provenance
    from phonograph.bench.suites import with_published_settings

    origin = provenance()
    config = with_published_settings(config)
    with progress_bar() as progress:
        rows = bench_startup(config, progress)
    _report({**origin, "model": config.model, "load_format": config.load_format}, rows, output, as_json=as_json)
    return 0


def _run_suites(config: EngineConfig, suites: dict[str, Suite], output: Path | None, *, as_json: bool) -> int:
    """Starts an engine and measures. If a case fails, the rows before it are reported all the same."""
    from phonograph.bench.records.record import provenance
    from phonograph.bench.suites import with_published_settings

    origin = provenance()
    llm = start(with_published_settings(config, mixed="mixed" in suites))
    limits = llm.plan.limits
    facts = {
        **engine_facts(llm),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_tokens": llm.plan.memory.num_blocks * limits.block_size,
    }
    rows: list[Row] = []
    try:
        with progress_bar() as progress:
            for run in suites.values():
                for row in run(llm, progress, note):
                    rows.append(row)
    except BaseException:
        if rows:
            _report({**origin, **facts, "complete": False}, rows, output, as_json=as_json)
        raise
    _report({**origin, **facts}, rows, output, as_json=as_json)
    if not as_json:
        note(llm.plan.resolution.label)
    return 0


def _report(origin: dict[str, Any], rows: Sequence[Row], output: Path | None, *, as_json: bool) -> None:
    from phonograph.bench.records.results import append_record

    record = {**origin, "rows": [row.as_json() for row in rows]}
    try:
        if output is not None:
            append_record(output, record)
    finally:  # a disk may have become full
        if as_json:
            print_json(record)
        else:
            for suite_name in dict.fromkeys(row.suite for row in rows):
                _print_table(suite_name, [row for row in rows if row.suite == suite_name])


def _print_table(suite_name: str, rows: Sequence[Row]) -> None:
    columns = [name for name in COLUMNS[suite_name] if any(name in row.facts for row in rows)]
    phases = list(dict.fromkeys(phase for row in rows for phase in row.facts.get("phases", {})))
    with_steps = any(row.steps for row in rows)
    table = Table(suite_name, *columns, *phases, *(["what ran"] if with_steps else []))
    for row in rows:
        cells = [_cell(row.facts.get(name)) for name in columns]
        cells += [_cell(row.facts["phases"].get(phase)) for phase in phases]
        table.add_row(row.case, *cells, *([steps_text(row.steps)] if with_steps else []))
    Console().print(table, markup=False)
    for row in rows:
        if "error" in row.facts:
            print(f"{row.case}: {row.facts['error']}")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
