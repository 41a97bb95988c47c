"""`phonograph bench serve`: a table, or with `--json` a record with the keys of vLLM's benchmark."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.progress import progress_bar
from phonograph.cli.show import OUTPUT, Json, note, print_json
from phonograph.errors import ConfigError

PACKAGES = ("httptools", "uvloop")
BUSY = 0.7
"""Share of its time from which the client may have measured itself."""
COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_cached_tokens": "Input tokens cached",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests/s",
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


def serve(
    *,
    base_url: Annotated[str, Parameter(help="Server to measure.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, Parameter(help="/v1/completions or /v1/chat/completions.")] = "/v1/completions",
    model: Annotated[str | None, Parameter(help="Model to ask for; else the first that the server has.")] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="Folder or hub id of the tokenizer that makes prompts; else the model's.")
    ] = None,
    dataset_name: Annotated[
        Literal["random", "sharegpt-like", "jsonl"],
        Parameter(help="Random tokens of given lengths, of lengths like ShareGPT's, or prompts from a file."),
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        Parameter(help="File of jsonl: one object a line with prompt or messages, and max_tokens if need be."),
    ] = None,
    num_prompts: Annotated[int | None, Parameter(help="Requests to send; else 100, or all of the file.")] = None,
    input_len: Annotated[str, Parameter(help="Tokens of a random prompt, or a range such as 100-1023.")] = "1024",
    output_len: Annotated[str, Parameter(help="Tokens to generate, or a range; not for sharegpt-like.")] = "128",
    prompt_format: Annotated[
        Literal["tokens", "text"] | None, Parameter(help="How made prompts are sent; else text to chats, tokens else.")
    ] = None,
    request_rate: Annotated[float, Parameter(help="Requests a second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[
        float, Parameter(help="Shape of the gaps between requests: 1 Poisson, less in bursts, more evenly.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, Parameter(help="Requests that are open at once, at most.")] = None,
    num_warmups: Annotated[int, Parameter(help="Requests before the measured ones, not counted.")] = 1,
    temperature: Annotated[float, Parameter(help="Of the sampling; 0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool | None, Parameter(help="Generate on to the full length; else for made prompts only.")
    ] = None,
    extra_body: Annotated[str, Parameter(help="JSON object of more fields for every request.")] = "{}",
    request_timeout: Annotated[float | None, Parameter(help="Seconds after which an answer counts as failed.")] = None,
    label: Annotated[str | None, Parameter(help="What the record calls this run.")] = None,
    seed: Annotated[int, Parameter(help="Of lengths, prompts and arrivals.")] = 0,
    save_detailed: Annotated[bool, Parameter(negative="", help="Times, texts and errors of each request too.")] = False,
    output: Annotated[
        Path | None, OUTPUT, Parameter(help="File to append the result to, one JSON object a line.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Load any server with OpenAI's API and time its answers. A key, if it needs one, is taken from OPENAI_API_KEY.

    Exit code 1 where a request failed.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("bench serve", ", ".join(missing), "not installed; pip install 'phonograph[bench]'")
    from phonograph.bench.cases import Lengths
    from phonograph.bench.records.record import provenance
    from phonograph.bench.records.results import append_record
    from phonograph.bench.serving.serving_bench import ServingBench, bench_serving

    bench = ServingBench(
        base_url=base_url,
        endpoint=endpoint,
        model=model,
        tokenizer=tokenizer,
        api_key=os.environ.get("OPENAI_API_KEY"),
        dataset_name=dataset_name,
        dataset_path=dataset_path,
        num_prompts=num_prompts,
        input_len=Lengths.parse("input_len", input_len),
        output_len=Lengths.parse("output_len", output_len),
        prompt_format=prompt_format,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        num_warmups=num_warmups,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=_object("extra_body", extra_body),
        request_timeout=request_timeout,
        label=label,
        seed=seed,
        save_detailed=save_detailed,
    )
    origin = provenance()
    with progress_bar() as progress:
        result = bench_serving(bench, progress)
    record = {**origin, **result}
    try:
        if output is not None:
            append_record(output, record)
    finally:  # a disk may have become full
        if as_json:
            print_json(record)
        else:
            _print_tables(result)
    return 1 if result["failed"] else 0


def _object(setting: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(setting, text, f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(setting, text, "must be a JSON object")
    return value


def _print_tables(result: dict[str, Any]) -> None:
    counts = Table("serving", "")
    for key, name in COUNTS.items():
        counts.add_row(name, _number(result[key]))
    latencies = Table("ms", "mean", "median", "P99")
    for kind, name in NAMES.items():
        latencies.add_row(name, *(_number(result[f"{column}_{kind}_ms"]) for column in ("mean", "median", "p99")))
    console = Console()
    console.print(counts, markup=False)
    console.print(latencies, markup=False)
    for error, count in result["error_counts"].items():
        print(f"{count} failed: {error}")
    chunks, share = result["chunks_per_output_token"], result["client_cpu_share"]
    if chunks is not None and abs(chunks - 1) > 0.02:
        note(f"{chunks:.2f} chunks for each output token: ITL is the time between chunks")
    if share > BUSY:
        note(f"the client was busy for {share:.0%} of the time: it may have measured itself")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
