"""`phonograph bench serve`: a table, or with `--json` a record with the keys of vLLM's benchmark."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from phonograph.bench.serving.settings import ServingBench
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import Json, Output, check_installed, note, print_table, report

PACKAGES = ("httptools", "uvloop")
BUSY = 0.7
"""Share of its time from which the client may have measured itself."""
COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "total_input_sequences": "Inputs embedded",
    "total_audio_seconds": "Audio (s)",
    "total_input_tokens": "Input tokens",
    "total_cached_tokens": "Input tokens cached",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests/s",
    "input_sequence_throughput": "Inputs/s",
    "rtfx": "Audio seconds a second (RTFx)",
    "output_throughput": "Output tokens/s",
    "total_token_throughput": "Tokens/s, input and output",
    "max_output_tokens_per_s": "Output tokens in the busiest second",
    "max_concurrent_requests": "Requests at once, at most",
}
NAMES = {
    "ttft": "TTFT, time to first token",
    "tpot": "TPOT, time per output token after it",
    "itl": "ITL, inter-token latency",
    "e2el": "E2EL, end-to-end latency",
}
DEFAULTS = ServingBench()


def serve(
    *,
    settings: Annotated[ServingBench, Parameter(name="*")] = DEFAULTS,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Load any server with OpenAI's API and time its answers. A key, if it needs one, is taken from OPENAI_API_KEY.

    Exit code 1 where a request failed.
    """
    check_installed("bench serve", PACKAGES, extra="bench")
    from phonograph.bench.records.record import provenance
    from phonograph.bench.records.results import append_record
    from phonograph.bench.serving.serving_bench import bench_serving

    origin = provenance()
    with progress_bar() as progress:
        result = bench_serving(settings, progress, api_key=os.environ.get("OPENAI_API_KEY"))
    record = {**origin, **result}
    save = None if output is None else partial(append_record, output, record)
    report(record, lambda: _print_tables(result), as_json=as_json, save=save)
    return 1 if result["failed"] else 0


def _print_tables(result: dict[str, Any]) -> None:
    print_table(("serving", ""), [(name, _number(result[key])) for key, name in COUNTS.items() if key in result])
    columns = ("mean", "median", "p99")
    rows = [(name, *(_number(result[f"{column}_{kind}_ms"]) for column in columns)) for kind, name in NAMES.items()]
    print_table(("ms", "mean", "median", "P99"), rows)
    for error, count in result["error_counts"].items():
        print(f"{count} failed: {error}")
    chunks, share = result["chunks_per_output_token"], result["client_cpu_share"]
    if result["mean_itl_ms"] is not None and chunks is not None and abs(chunks - 1) > 0.02:
        note(f"{chunks:.2f} chunks for each output token: ITL is the time between chunks")
    if share > BUSY:
        note(f"the client was busy for {share:.0%} of the time: it may have measured itself")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
