"""`phonograph bench`: published workloads, attention kernels and start-up, with the graph decisions that ran.

Each command prints a table, or with `--json` its record in one line. Each row counts the steps by graph decision, so
that an eager run shows as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from phonograph.cli import show
from phonograph.cli.examples import epilogue
from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import Json, Output, note, start
from phonograph.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from phonograph.bench.records.results import Row
    from phonograph.bench.suites import Suite

COLUMNS = {
    "decode": ("itl_ms", "floor_ms"),
    "latency": ("out_len", "bs", "ms", "prefill_ms", "prefill_tok_s", "decode_ms", "decode_tok_s"),
    "mixed": ("s", "mixed_steps"),
    "throughput": ("in_tok", "out_tok", "s", "out_tok_s"),
    "idle": ("idle_share", "idle_us", "step_us"),
    "step": ("step_us", "products_us", "attention_us", "rest_us", "gaps_us", "floor_us"),
    "attention": ("provider", "page", "us", "schedule_us", "tb_s", "tflops", "floor_us", "x_floor", "err"),
    "startup": ("seconds", "engine_seconds", "first_tokens_seconds"),
}
"""Fields of a suite's rows in its table, beside the case and the steps."""
_DECODE_CASES = "Sequences x context of each row, as 1x1k,8x32k."
CASE_COMMANDS = {
    "decode": ("Time between tokens while 1 to 256 sequences decode, with short and long contexts.", _DECODE_CASES),
    "mixed": (
        "Time one long decode beside a stream of short prompts, two sequences at a time.",
        "Tokens of the long prompt, one row a number: 16k,64k.",
    ),
    "idle": (
        "Share of the time between steps in which a GPU does nothing, from a profiler's trace of steady decode.",
        _DECODE_CASES,
    ),
    "step": (
        "Where a decode step's time goes on a GPU: products, attention, the rest and gaps, from a profiler's trace.",
        _DECODE_CASES,
    ),
}
"""Commands whose only option is their cases: the help of the command, and of the option."""

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


def _add_case_command(name: str) -> None:
    def command(config: EngineConfig, *, cases: str | None = None, output: Output = None, as_json: Json = False) -> int:
        from phonograph.bench.suites import case_suite

        return _run_suites(config, {name: case_suite(name, cases)}, output, as_json=as_json)

    summary, cases = CASE_COMMANDS[name]
    command.__doc__ = f"{summary}\n\nArgs:\n    cases: {cases}\n"
    app.command(takes_engine_config(command), name=name, help_epilogue=epilogue(f"bench {name}"))


for _name in CASE_COMMANDS:
    _add_case_command(_name)


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
    return _run_suites(config, {"latency": workload}, output, as_json=as_json)


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
    return _run_suites(config, {"throughput": workload}, output, as_json=as_json)


@app.command(help_epilogue=epilogue("bench suite"))
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
    from phonograph.bench.suites import case_suite, check_suites, latency_suite, throughput_suite

    names = check_suites(suites)
    every = {
        "decode": case_suite("decode", decode_cases),
        "latency": latency_suite(latency_cases),
        "mixed": case_suite("mixed", mixed_cases),
        "throughput": throughput_suite(num_prompts),
    }
    return _run_suites(config, {name: every[name] for name in names}, output, as_json=as_json)


@app.command(help_epilogue=epilogue("bench attention"))
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


@app.command(help_epilogue=epilogue("bench startup"))
@takes_engine_config
def startup(
    config: EngineConfig,
    *,
    once: Annotated[bool, Parameter(negative="", show=False)] = False,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time from the start of a process to an engine that is ready: the first on a machine, and the second."""
    from phonograph.bench.startup import bench_startup, start_once

    if once:  # a child of the command
        show.print_json(start_once(config))
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
    """Start an engine and run workloads. If a case fails, the rows before it are still reported."""
    from phonograph.bench.records.record import provenance
    from phonograph.bench.suites import with_published_settings

    origin = provenance()
    llm = start(with_published_settings(config, mixed="mixed" in suites))
    limits = llm.plan.limits
    facts = {
        **origin,
        **show.engine_facts(llm),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_tokens": llm.plan.memory.num_blocks * llm.plan.attention.block_size,
    }
    rows: list[Row] = []
    try:
        with progress_bar() as progress:
            for run in suites.values():
                for row in run(llm, progress, note):
                    rows.append(row)
    except BaseException:
        if rows:
            _report({**facts, "complete": False}, rows, output, as_json=as_json)
        raise
    _report(facts, rows, output, as_json=as_json)
    if not as_json:
        note(llm.plan.resolution.label)
    return 0


def _report(facts: dict[str, Any], rows: Sequence[Row], output: Path | None, *, as_json: bool) -> None:
    from phonograph.bench.records.results import append_record

    record = {**facts, "rows": [row.as_json() for row in rows]}
    save = None if output is None else partial(append_record, output, record)
    show.report(record, lambda: _print_tables(rows), as_json=as_json, save=save)


def _print_tables(rows: Sequence[Row]) -> None:
    for suite_name in dict.fromkeys(row.suite for row in rows):
        _print_table(suite_name, [row for row in rows if row.suite == suite_name])


def _print_table(suite_name: str, rows: Sequence[Row]) -> None:
    columns = [name for name in COLUMNS[suite_name] if any(name in row.facts for row in rows)]
    phases = list(dict.fromkeys(phase for row in rows for phase in row.facts.get("phases", {})))
    steps = ["what ran"] if any(row.steps for row in rows) else []
    cells = (
        (
            row.case,
            *(_cell(row.facts.get(name)) for name in columns),
            *(_cell(row.facts["phases"].get(phase)) for phase in phases),
            *(show.steps_text(row.steps) for _ in steps),
        )
        for row in rows
    )
    show.print_table((suite_name, *columns, *phases, *steps), cells)
    for row in rows:
        if "error" in row.facts:
            print(f"{row.case}: {row.facts['error']}")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
