"""The engine's workloads by name, as a user asks for them: text in, checked cases out, ready to run on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
"""Called with what a person should know about the choice of cases."""
Suite = Callable[[LLM, BenchProgress, Note], Iterator[Row]]

MAX_MODEL_LEN = 70_000
GPU_MEMORY_UTILIZATION = 0.85
SUITES = ("decode", "latency", "mixed", "throughput")


def with_published_settings(config: EngineConfig, *, mixed: bool = False) -> EngineConfig:
    """The configuration, with the published comparison's limits where it says nothing.

    Args:
        mixed: for the mixed workload, which is of two sequences at a time.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set}
    settings: dict[str, object] = {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
    if mixed:
        settings["max_num_seqs"] = cases.MIXED_SEQS
    if given.get("max_model_len") is None:
        model = read_configured_model(config, config_only=True)
        settings["max_model_len"] = min(MAX_MODEL_LEN, model.context_length)
    return config.model_copy(update={name: value for name, value in settings.items() if given.get(name) is None})


def check_suites(text: str) -> list[str]:
    """Names of suites that can share an engine, separated by commas.

    Raises:
        ConfigError: one is unknown or there twice, or mixed has company.
    """
    wanted = text.split(",")
    if not set(wanted) <= set(SUITES) or len(set(wanted)) < len(wanted):
        raise ConfigError("suites", text, f"must be some of {', '.join(SUITES)}, each once")
    if "mixed" in wanted and len(wanted) > 1:
        raise ConfigError("suites", text, "mixed runs alone: it limits the engine to two sequences at a time")
    return wanted


def decode_suite(text: str | None) -> Suite:
    wanted = cases.DECODE_CASES if text is None else [cases.DecodeCase.parse(one) for one in text.split(",")]

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        return bench_decode(llm, _fitting(llm, "cases", wanted, note, asked=text is not None), progress)

    return run


def idle_suite(text: str | None) -> Suite:
    wanted = cases.IDLE_CASES if text is None else [cases.DecodeCase.parse(one) for one in text.split(",")]

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        return bench_idle(llm, _fitting(llm, "cases", wanted, note, asked=text is not None), progress)

    return run


def step_suite(text: str | None) -> Suite:
    wanted = cases.STEP_CASES if text is None else [cases.DecodeCase.parse(one) for one in text.split(",")]

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        return bench_step(llm, _fitting(llm, "cases", wanted, note, asked=text is not None), progress)

    return run


def latency_suite(
    text: str | None,
    *,
    output_len: int = cases.LATENCY_OUTPUT_LEN,
    batch_size: int = 1,
    num_iters_warmup: int = 1,
    num_iters: int = 5,
) -> Suite:
    check_at_least("output_len", output_len, 1)
    check_at_least("batch_size", batch_size, 1)
    check_at_least("num_iters", num_iters, 1)
    check_at_least("num_iters_warmup", num_iters_warmup, 0)
    published = cases.LATENCY_INPUT_LENS
    lens = published if text is None else [cases.parse_size("input_len", one) for one in text.split(",")]
    wanted = [cases.LatencyCase(length, output_len, batch_size) for length in lens]

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        fitting = _fitting(llm, "input_len", wanted, note, asked=text is not None)
        return bench_latency(llm, fitting, num_iters_warmup=num_iters_warmup, num_iters=num_iters, progress=progress)

    return run


def mixed_suite(text: str | None) -> Suite:
    wanted = cases.MIXED_CASES if text is None else [cases.MixedCase.parse(one) for one in text.split(",")]

    def run(llm: LLM, progress: BenchProgress, note: Note) -> Iterator[Row]:
        return bench_mixed(llm, _fitting(llm, "cases", wanted, note, asked=text is not None), progress)

    return run


def throughput_suite(
    num_prompts: int, input_len: str | None = None, output_len: str | None = None, *, longest_first: bool = False
) -> Suite:
    check_at_least("num_prompts", num_prompts, 1)
    published = cases.THROUGHPUT_LENS
    inputs = published if input_len is None else cases.Lengths.parse("input_len", input_len)
    outputs = published if output_len is None else cases.Lengths.parse("output_len", output_len)

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


def _fitting(
    llm: LLM, setting: str, wanted: Sequence[cases.AnyCase], note: Note, *, asked: bool
) -> list[cases.AnyCase]:
    """The cases that the engine can run; what is left out of the published ones is said."""
    limits = llm.plan.limits
    fitting, left_out = cases.cases_that_fit(
        setting, wanted, asked=asked, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len
    )
    for line in left_out:
        note(line)
    return fitting
