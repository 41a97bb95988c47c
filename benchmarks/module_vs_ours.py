"""Llama by transformers' module beside our own layers: one sequence's decode steps on a CPU, in pairs.

    OMP_NUM_THREADS=1 python benchmarks/module_vs_ours.py --output benchmarks/results/module_vs_ours.json

Weights are random. Both engines are in one process and take turns. A step's time is that of a call of many tokens
without that of one token, by the time that the process computes, which other processes hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from bench.result_files import output_file, write_result
from phonograph import LLM, SamplingParams
from phonograph.bench.records.record import provenance


def step_seconds(llm: LLM, tokens: int) -> float:
    """Return the time of a decode step of one sequence."""
    taken: list[float] = []
    for count in (1, 1 + tokens):
        began = time.process_time()
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
        taken.append(time.process_time() - began)
    return (taken[1] - taken[0]) / tokens


def compare(model: str, tokens: int, pairs: int) -> dict[str, Any]:
    """Return the median step of each side in milliseconds, and the median and the spread of the ratios of the pairs."""
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 1, "max_model_len": 512}
    settings |= {"num_kv_blocks": 64}
    sides = {impl: LLM(model, model_impl=impl, **settings) for impl in ("phonograph", "transformers")}
    times: dict[str, list[float]] = {impl: [] for impl in sides}
    for number in range(pairs + 1):
        for impl, llm in sides.items():
            seconds = step_seconds(llm, tokens)
            if number:  # the first pair warms up
                times[impl].append(seconds)
    ratios = sorted(theirs / ours for ours, theirs in zip(*times.values(), strict=True))
    modes = {impl: llm.plan.resolution.mode.value for impl, llm in sides.items()}
    medians = {impl: round(statistics.median(seconds) * 1e3, 3) for impl, seconds in times.items()}
    ratio = {"median": round(statistics.median(ratios), 3), "least": round(ratios[0], 3), "most": round(ratios[-1], 3)}
    return {"modes": modes, "step_ms": medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "smollm2-360m"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    origin = provenance()
    found = {model: compare(model, arguments.tokens, arguments.pairs) for model in arguments.models}
    print(found)
    if arguments.output:
        write_result(arguments.output, origin, {"models": found})


if __name__ == "__main__":
    main()
