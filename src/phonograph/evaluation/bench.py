"""Latency of one batch and throughput of many requests, through the engine as it serves, on random token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError
from phonograph.evaluation.run import Run, run_requests
from phonograph.sampling_params import SamplingParams

BenchProgress = Callable[[str, int, int], None]
"""Called with what is counted, how many of it are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, setting: str, text: str) -> Lengths:
        """Reads "128" or "100-1024".

        Raises:
            ConfigError: it is neither, or not from 1 upwards.
        """
        try:
            low, _, high = text.partition("-")
            lengths = cls(int(low), int(high or low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(setting, text, "must be a number of tokens >= 1, or a range of them such as 100-1024")
        return lengths

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.low, self.high + 1, count).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds. latency: a batch from its start to its last token, one an iteration; ttft: of each request; itl: of each
    token after the first. steps: of the measured iterations, by the kind of decision that ran them."""

    latency: list[float]
    ttft: list[float]
    itl: list[float]
    steps: Counter[str]


def bench_latency(
    llm: LLM,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    progress: BenchProgress,
) -> Latency:
    """Times one batch, alone in the engine, again and again. Its prompts are new each time, so no prefix is cached.

    Raises:
        ConfigError: a value is out of range, or the batch does not fit the engine.
    """
    for name, value, least in (("num_iters", num_iters, 1), ("num_iters_warmup", num_iters_warmup, 0)):
        _check_at_least(name, value, least)
    seqs = llm.plan.limits.max_num_seqs
    if not 1 <= batch_size <= seqs:
        raise ConfigError("batch_size", batch_size, f"must be from 1 to {seqs} (max_num_seqs), to run at once")
    _check_at_least("input_len", input_len, 1)
    _check_at_least("output_len", output_len, 1)
    _check_fits(llm, input_len, output_len)
    rng = np.random.default_rng(0)
    runs: list[Run] = []
    for iteration in range(num_iters_warmup + num_iters):
        progress("iterations", iteration, num_iters_warmup + num_iters)
        runs.append(_run_random(llm, rng, [input_len] * batch_size, [output_len] * batch_size))
    measured = runs[num_iters_warmup:]
    answers = [answer for run in measured for answer in run.answers]
    return Latency(
        latency=[run.seconds for run in measured],
        ttft=[answer.ttft for answer in answers],
        itl=[gap for answer in answers for gap in answer.itl],
        steps=sum((run.steps for run in measured), Counter[str]()),
    )


def bench_throughput(
    llm: LLM, *, num_prompts: int, input_len: Lengths, output_len: Lengths, progress: BenchProgress
) -> Run:
    """Serves random requests that are all there from the start, and never end early.

    Raises:
        ConfigError: there is no request, or the longest one does not fit the engine.
    """
    _check_at_least("num_prompts", num_prompts, 1)
    _check_fits(llm, input_len.high, output_len.high)
    rng = np.random.default_rng(0)
    return _run_random(llm, rng, input_len.draw(rng, num_prompts), output_len.draw(rng, num_prompts), progress)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; empty where there is nothing to summarise."""
    if not seconds:
        return {}
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": p50, "p90": p90, "p99": p99}


def _run_random(
    llm: LLM,
    rng: np.random.Generator,
    input_lens: list[int],
    output_lens: list[int],
    progress: BenchProgress | None = None,
) -> Run:
    prompts = [rng.integers(0, llm.plan.model.vocab_size, length).tolist() for length in input_lens]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in output_lens]
    num_done = 0

    def finished(*_: object) -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress("requests", num_done, len(prompts))

    return run_requests(llm, prompts, params, finished)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(name, value, f"must be a whole number >= {least}")


def _check_fits(llm: LLM, input_len: int, output_len: int) -> None:
    longest = llm.plan.limits.max_model_len
    if input_len + output_len > longest:
        problem = f"with output_len={output_len} is more than max_model_len={longest}; lower one of them"
        raise ConfigError("input_len", input_len, problem)
