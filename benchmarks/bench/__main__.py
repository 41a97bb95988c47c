"""Benches for developers: workloads of the published comparison, traces of steps, attention kernels and start-up.

    PYTHONPATH=src:benchmarks python -m bench decode demo --cases 1x1k,8x1k

Each command takes the engine's flags, as `phonograph bench` does, and prints a table, or with `--json` its record.
"""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from bench.attention import bench_attention, default_cases
from bench.cases import MIXED_SEQS
from bench.program import run_program
from bench.startup import bench_startup
from bench.suites import case_suite, check_suites
from phonograph.bench.records.record import provenance
from phonograph.bench.suites import Suite, latency_suite, throughput_suite, with_published_settings
from phonograph.cli.commands import bench
from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import Json, Output, note, print_table
from phonograph.config.engine_config import EngineConfig
from phonograph.engine.build import this_device
from phonograph.engine.plan import make_plan
from phonograph.engine.startup.configured_model import read_configured_model

COLUMNS: bench.Columns = {
    **bench.COLUMNS,
    "decode": ("itl_ms", "floor_ms"),
    "mixed": ("s", "mixed_steps"),
    "idle": ("idle_share", "idle_us", "step_us"),
    "step": ("step_us", "products_us", "attention_us", "rest_us", "gaps_us", "floor_us"),
    "attention": ("provider", "page", "us", "schedule_us", "tb_s", "tflops", "floor_us", "x_floor", "err"),
    "startup": ("seconds", "engine_seconds", "first_tokens_seconds"),
}
_DECODE_CASES = "Sequences x context of each row, as 1x1k,8x32k."
CASE_COMMANDS = {
    "decode": ("Time between tokens while 1 to 256 sequences decode, with short and long contexts.", _DECODE_CASES),
    "mixed": (
        "Time one long decode next to a stream of short prompts, two sequences at a time.",
        "Tokens of the long prompt, one row a number: 16k,64k.",
    ),
    "idle": (
        "Share of the time between steps in which a GPU does nothing, from a profiler's trace of steady decode.",
        _DECODE_CASES,
    ),
    "step": (
        "Parts of a decode step's time on a GPU: products, attention, the rest and gaps, from a profiler's trace.",
        _DECODE_CASES,
    ),
}
"""Commands whose only option is their cases: the help of the command, and of the option."""

app = App(name="bench", help="Benches for developers.", help_format="plaintext", version_flags=())


def _add_case_command(name: str) -> None:
    def command(config: EngineConfig, *, cases: str | None = None, output: Output = None, as_json: Json = False) -> int:
        return _run(config, {name: case_suite(name, cases)}, output, as_json=as_json)

    summary, cases = CASE_COMMANDS[name]
    command.__doc__ = f"{summary}\n\nArgs:\n    cases: {cases}\n"
    app.command(takes_engine_config(command), name=name)


for _name in CASE_COMMANDS:
    _add_case_command(_name)


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
    names = check_suites(suites)
    every = {
        "decode": case_suite("decode", decode_cases),
        "latency": latency_suite(latency_cases),
        "mixed": case_suite("mixed", mixed_cases),
        "throughput": throughput_suite(num_prompts),
    }
    return _run(config, {name: every[name] for name in names}, output, as_json=as_json)


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
    bench.report_rows({**origin, **facts}, rows, output, as_json=as_json, columns=COLUMNS)
    failed = [row for row in rows if "error" in row.facts]
    for row in failed if not as_json else ():
        print(f"{row.case}: {row.facts['error']}")
    return 1 if failed else 0


@app.command
@takes_engine_config
def startup(
    config: EngineConfig,
    *,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Time from the start of a process to an engine that is ready: the first on a machine, and the second."""
    origin = provenance()
    config = with_published_settings(config)
    with progress_bar() as progress:
        rows = bench_startup(config, progress)
    facts = {**origin, "model": config.model, "load_format": config.load_format}
    bench.report_rows(facts, rows, output, as_json=as_json, columns=COLUMNS)
    phases = list(rows[0].facts["phases"])
    if not as_json:
        print_table(("seconds", *phases), [(row.case, *map(str, row.facts["phases"].values())) for row in rows])
    return 0


def _run(config: EngineConfig, suites: dict[str, Suite], output: Output, *, as_json: bool) -> int:
    limits = {"max_num_seqs": MIXED_SEQS} if "mixed" in suites else {}
    return bench.run_suites(config, suites, output, as_json=as_json, columns=COLUMNS, **limits)


def main(tokens: list[str] | None = None) -> int:
    """Run a command; the exit code is 2 for a user error."""
    return run_program(app, "bench", tokens)


if __name__ == "__main__":
    sys.exit(main())
