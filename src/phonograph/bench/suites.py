"""The engine's workloads by name: parse the user's cases, select the fitting ones, run them on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from phonograph.bench import cases
from phonograph.bench.engine import bench_latency, bench_throughput
from phonograph.bench.records.results import BenchProgress, Row, check_at_least
from phonograph.config.engine_config import EngineConfig
from phonograph.engine.llm import LLM
from phonograph.engine.startup.configured_model import read_configured_model

Note = Callable[[str], None]
"""Callback for remarks on the choice of cases."""
Suite = Callable[[LLM, BenchProgress, Note], Iterator[Row]]
RunCases = Callable[[LLM, Sequence[Any], BenchProgress], Iterator[Row]]

MAX_MODEL_LEN = 70_000
GPU_MEMORY_UTILIZATION = 0.85


def with_published_settings(config: EngineConfig, **limits: object) -> EngineConfig:
    """Fill unset settings with the limits of the published comparison, and with `limits`."""
    settings = {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION, **limits}
    explicit = {name for name in config.model_fields_set if getattr(config, name) is not None}
    if "max_model_len" not in explicit:
        model = read_configured_model(config, config_only=True)
        settings["max_model_len"] = min(MAX_MODEL_LEN, model.context_length)
    return config.model_copy(update={name: value for name, value in settings.items() if name not in explicit})


def latency_suite(
    text: str | None,
    *,
    output_len: int = cases.LATENCY_OUTPUT_LEN,
    batch_size: int = 1,
    num_iters_warmup: int = 1,
    num_iters: int = 5,
) -> Suite:
    """Return the latency workload for prompt lengths separated by commas; None is the published ones."""
    check_at_least("output_len", output_len, 1)
    check_at_least("batch_size", batch_size, 1)
    check_at_least("num_iters", num_iters, 1)
    check_at_least("num_iters_warmup", num_iters_warmup, 0)
    published = cases.LATENCY_INPUT_LENS
    lens = published if text is None else [cases.parse_size("input_len", length) for length in text.split(",")]
    selected = [cases.LatencyCase(length, output_len, batch_size) for length in lens]
    run = partial(bench_latency, num_iters_warmup=num_iters_warmup, num_iters=num_iters)
    return fitting_suite(run, "input_len", selected, requested=text is not None)


def throughput_suite(
    num_prompts: int, input_len: str | None = None, output_len: str | None = None, *, longest_first: bool = False
) -> Suite:
    """Return the throughput workload for lengths such as "128" or "100-1023"; None is the published ones."""
    check_at_least("num_prompts", num_prompts, 1)
    inputs, outputs = (
        cases.THROUGHPUT_LENS if text is None else cases.Lengths.parse(setting, text)
        for setting, text in (("input_len", input_len), ("output_len", output_len))
    )

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        return bench_throughput(
            llm,
            num_prompts=num_prompts,
            input_len=inputs,
            output_len=outputs,
            progress=progress,
            longest_first=longest_first,
        )

    return run


def fitting_suite(bench: RunCases, setting: str, selected: Sequence[cases.Case], *, requested: bool) -> Suite:
    """Return a workload of the selected cases that fit the engine; see `cases_that_fit`."""

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        fitting, left_out = cases.cases_that_fit(setting, selected, llm.plan.limits, requested=requested)
        for line in left_out:
            note(line)
        return bench(llm, fitting, progress)

    return run
