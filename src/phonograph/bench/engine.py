"""Workloads of a whole engine: latency and throughput.

They are the workloads of the published comparison with vLLM (`benchmarks/vs_vllm.py`), down to the seeds of the
lengths: random token ids, greedy, no end of sequence, timed from the call of `generate` to its return.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from phonograph.bench.cases import LatencyCase, Lengths
from phonograph.bench.records.results import BenchProgress, Row, summary
from phonograph.bench.run_requests import Run, TimedAnswer, run_requests
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.errors import ConfigError, counted

THROUGHPUT_WARMUP_REQUESTS, THROUGHPUT_WARMUP_TOKENS = 8, 8


def bench_latency(
    llm: LLM, cases: Sequence[LatencyCase], progress: BenchProgress, *, num_iters_warmup: int, num_iters: int
) -> Iterator[Row]:
    """Measure the milliseconds from the start of a batch, alone in the engine, to its last token (median).

    Prefill ends with the first token of the last request to have one. The rest is decode. Each batch has new prompts,
    so that no prefix is cached.
    """
    rng = random.Random(0)
    for number, case in enumerate(cases):
        params = [greedy(case.output_len)] * case.num_seqs
        turns = num_iters_warmup + num_iters
        runs: list[Run] = []
        for turn in range(turns):
            progress("latency batches", number * turns + turn, len(cases) * turns)
            prompts = [random_prompt(llm, rng, case.input_len) for _ in range(case.num_seqs)]
            runs.append(run_requests(llm, prompts, params))
        measured = runs[num_iters_warmup:]
        facts = {
            "input_len": case.input_len,
            "out_len": case.output_len,
            "bs": case.num_seqs,
            "ms": round(statistics.median(run.seconds for run in measured) * 1e3, 3),
            **_phases(measured),
            "latency_seconds": summary([run.seconds for run in measured]),
            **_token_times([answer for run in measured for answer in run.answers]),
        }
        steps = sum((run.steps for run in measured), Counter[str]())
        yield Row(suite="latency", case=str(case), facts=facts, steps=steps)


def bench_throughput(
    llm: LLM,
    *,
    num_prompts: int,
    input_len: Lengths,
    output_len: Lengths,
    progress: BenchProgress,
    longest_first: bool = False,
) -> Iterator[Row]:
    """Measure the output tokens a second of random requests that are all queued at the start and never end early.

    With `longest_first` the requests of the most output tokens are queued first. Then the last to end began early, and
    prompts can be spread over the steps in which the first decode: `max_num_batched_tokens` little above
    `max_num_seqs`.

    Raises:
        ConfigError: the longest request does not fit the engine.
    """
    longest = llm.plan.limits.max_model_len
    if input_len.high + output_len.high > longest:
        problem = f"with output_len={output_len.high} is more than max_model_len={longest}; lower one of them"
        raise ConfigError("input_len", input_len.high, problem)
    lengths, rng = random.Random(1), random.Random(0)
    input_lens, output_lens = input_len.draw(lengths, num_prompts), output_len.draw(lengths, num_prompts)
    if longest_first:
        order = sorted(range(num_prompts), key=lambda request: -output_lens[request])
        input_lens, output_lens = ([lens[request] for request in order] for lens in (input_lens, output_lens))
    warmup = [random_prompt(llm, rng, length) for length in input_lens[:THROUGHPUT_WARMUP_REQUESTS]]
    timed(llm, warmup, [greedy(min(THROUGHPUT_WARMUP_TOKENS, output_len.high))] * len(warmup))
    num_done = 0

    def finished(*_: object) -> None:
        nonlocal num_done
        num_done += 1
        progress("requests", num_done, num_prompts)

    prompts = [random_prompt(llm, rng, length) for length in input_lens]
    run = run_requests(llm, prompts, [greedy(length) for length in output_lens], finished)
    facts = {
        "reqs": num_prompts,
        "in_tok": run.prompt_tokens,
        "out_tok": run.output_tokens,
        "s": round(run.seconds, 3),
        "out_tok_s": round(run.output_tokens / run.seconds, 1),
        **_token_times(run.answers),
    }
    case = counted(num_prompts, "request") + (", longest first" if longest_first else "")
    yield Row(suite="throughput", case=case, facts=facts, steps=run.steps)


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Return the seconds that `generate` takes, with an idle device before and after.

    Raises:
        RequestError: a prompt is refused.
    """
    on_gpu = llm.plan.device.kind == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise output.error
    return seconds


def random_prompt(llm: LLM, rng: random.Random, length: int) -> list[int]:
    """Draw token ids from 1000 to 100,000, as the peer's script does, within the vocabulary."""
    vocabulary = llm.plan.model.vocab_size
    low, high = (1000, min(vocabulary, 100_000)) if vocabulary > 2000 else (0, vocabulary)
    return [rng.randrange(low, high) for _ in range(length)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _phases(runs: Sequence[Run]) -> dict[str, float]:
    """Return milliseconds and tokens per second of prefill and decode (medians); no decode after one token."""
    prefills = [max(answer.ttft for answer in run.answers) for run in runs]
    decodes = [run.seconds - prefill for run, prefill in zip(runs, prefills, strict=True)]
    decoded = [
        sum(time > prefill for answer in run.answers for time in answer.times)
        for run, prefill in zip(runs, prefills, strict=True)
    ]
    facts = _phase("prefill", prefills, [run.prompt_tokens for run in runs])
    return {**facts, **_phase("decode", decodes, decoded)} if all(decoded) else facts


def _phase(name: str, seconds: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    return {
        f"{name}_ms": round(statistics.median(seconds) * 1e3, 3),
        f"{name}_tok_s": round(statistics.median(rates), 1),
    }


def _token_times(answers: Sequence[TimedAnswer]) -> dict[str, dict[str, float]]:
    return {
        "ttft_seconds": summary([answer.ttft for answer in answers]),
        "itl_seconds": summary([gap for answer in answers for gap in answer.itl]),
    }
