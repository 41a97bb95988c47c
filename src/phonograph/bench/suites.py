"""The engine's workloads by name: parse the user's cases, select the fitting ones, run them on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from phonograph.bench import cases
from phonograph.bench.engine import bench_decode, bench_latency, bench_mixed, bench_throughput
from phonograph.bench.idle_trace import bench_idle
from phonograph.bench.records.results import BenchProgress, Row, check_at_least
from phonograph.bench.step_trace import bench_step
from phonograph.config.engine_config import EngineConfig
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError
from phonograph.models.spec import read_configured_model

Note = Callable[[str], None]
"""Callback for remarks on the choice of cases."""
Suite = Callable[[LLM, BenchProgress, Note], Iterator[Row]]
RunCases = Callable[[LLM, Sequence[Any], BenchProgress], Iterator[Row]]

MAX_MODEL_LEN = 70_000
GPU_MEMORY_UTILIZATION = 0.85
SUITES = ("decode", "latency", "mixed", "throughput")
_CASE_SUITES: Mapping[str, tuple[RunCases, Sequence[cases.AnyCase], Callable[[str], cases.AnyCase]]] = {
    "decode": (bench_decode, cases.DECODE_CASES, cases.DecodeCase.parse),
    "mixed": (bench_mixed, cases.MIXED_CASES, cases.MixedCase.parse),
    "idle": (bench_idle, cases.IDLE_CASES, cases.DecodeCase.parse),
    "step": (bench_step, cases.STEP_CASES, cases.DecodeCase.parse),
}


def with_published_settings(config: EngineConfig, *, mixed: bool = False) -> EngineConfig:
    """Fill unset settings with the limits of the published comparison.

    Args:
        config: configuration of the user.
        mixed: limit the engine to two sequences, as the mixed workload needs.
    """
    settings: dict[str, object] = {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
    if mixed:
        settings["max_num_seqs"] = cases.MIXED_SEQS
    explicit = {name for name in config.model_fields_set if getattr(config, name) is not None}
    if "max_model_len" not in explicit:
        model = read_configured_model(config, config_only=True)
        settings["max_model_len"] = min(MAX_MODEL_LEN, model.context_length)
    return config.model_copy(update={name: value for name, value in settings.items() if name not in explicit})


def check_suites(text: str) -> list[str]:
    """Parse names of suites that share an engine, separated by commas.

    Raises:
        ConfigError: a name is unknown or repeated, or mixed is not alone.
    """
    names = text.split(",")
    if not set(names) <= set(SUITES) or len(set(names)) < len(names):
        raise ConfigError("suites", text, f"must be some of {', '.join(SUITES)}, each once")
    if "mixed" in names and len(names) > 1:
        raise ConfigError("suites", text, "mixed runs alone: it limits the engine to two sequences at a time")
    return names


def case_suite(name: str, text: str | None) -> Suite:
    """Return the workload `name`: decode, mixed, idle or step.

    Args:
        name: name of the workload.
        text: cases separated by commas; None is the published ones.
    """
    run, published, parse = _CASE_SUITES[name]
    selected = published if text is None else [parse(case) for case in text.split(",")]
    return _suite(run, "cases", selected, requested=text is not None)


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
    return _suite(run, "input_len", selected, requested=text is not None)


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


def _suite(bench: RunCases, setting: str, selected: Sequence[cases.AnyCase], *, requested: bool) -> Suite:
    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        limits = llm.plan.limits
        fitting, left_out = cases.cases_that_fit(
            setting,
            selected,
            requested=requested,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
        )
        for line in left_out:
            note(line)
        return bench(llm, fitting, progress)

    return run
