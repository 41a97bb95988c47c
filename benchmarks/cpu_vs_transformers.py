"""Decoding speed of the demo model on this CPU, beside transformers' generate and its continuous batching.

    OMP_NUM_THREADS=2 python benchmarks/cpu_vs_transformers.py
    OMP_NUM_THREADS=2 python benchmarks/cpu_vs_transformers.py --output benchmarks/results/cpu_vs_transformers.json

One process, float32, the same prompts and the same number of output tokens for all. All take the threads that
OMP_NUM_THREADS says; without it our engine chooses its own number. The systems take turns, each round with new prompts,
and only ratios within a round are compared: what else the machine does hits all of them alike. Two kinds of cases:

*lockstep*: all sequences begin together and get the same number of tokens. Prompts have about 64 tokens, of unlike
lengths as they come (where `generate` pads them and masks the padding), and cut to equal ones, the best case for it.

*queue*: held-out problems, several times as many as run at once, each answered to its own end, as people use it.
`generate` takes them in batches; tokens behind an answer's end do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.result_files import output_file, write_result
from phonograph import LLM, SamplingParams
from phonograph.bench.records.record import provenance
from phonograph.bench.run_requests import run_requests
from phonograph.demo import MODEL_DIRECTORY

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from demo_tasks.tasks import PROBLEM_TOKENS, problems, recalls

Answer = Callable[[list[list[int]], int | None], list[list[int]]]
"""Prompts and a number of output tokens (None: each to its own end) -> the output tokens of each."""

PAD, END = 0, 2
LONGEST_ANSWER = PROBLEM_TOKENS
QUEUE_ROUNDS = 6
"""Times as many problems in a queue as run at once."""


class Transformers:
    """The same weights in transformers, with its default attention (SDPA)."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32).eval()
        # A second model, because continuous batching changes how attention is computed in the one it runs.
        self._batching: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32).eval()
        # The model's own configuration would end answers at its end-of-sequence token.
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int | None) -> list[list[int]]:
        starts = range(0, len(prompts), self._batch_size)
        return [
            one for start in starts for one in self._generate(prompts[start : start + self._batch_size], num_tokens)
        ]

    def _generate(self, prompts: list[list[int]], num_tokens: int | None) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens or LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=PAD,
            eos_token_id=END if num_tokens is None else None,
            use_cache=True,
        )
        answers: list[list[int]] = output[:, longest:].tolist()
        if num_tokens is None:
            answers = [tokens[: tokens.index(END) + 1] if END in tokens else tokens for tokens in answers]
        return answers

    def continuous_batching(self, prompts: list[list[int]], num_tokens: int | None) -> list[list[int]]:
        """Return the settings that are fastest for this model on a CPU (see docs/performance.md)."""
        outputs = self._batching.generate_batch(
            prompts,
            # -1: no token ends an answer.
            generation_config=GenerationConfig(
                max_new_tokens=num_tokens or LONGEST_ANSWER,
                do_sample=False,
                eos_token_id=END if num_tokens is None else -1,
                pad_token_id=PAD,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                # A sequence fits one block, so that as many run at once as there are blocks.
                block_size=256,
                num_blocks=max(len(prompts) if num_tokens else self._batch_size, 2),
                max_batch_tokens=1024,
                use_async_batching=False,
            ),
        )
        # Ids end in the position of their request.
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        assert all(output.error is None for output in ordered), [output.error for output in ordered]
        return [output.generated_tokens for output in ordered]


def ours(llm: LLM) -> Answer:
    def answer(prompts: list[list[int]], num_tokens: int | None) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens or LONGEST_ANSWER, ignore_eos=num_tokens is not None
        )
        run = run_requests(llm, prompts, [params] * len(prompts))
        return [one.completion.token_ids for one in run.answers]

    return answer


def compare(
    systems: dict[str, Answer], draw: Callable[[], list[list[int]]], *, num_tokens: int | None, num_rounds: int
) -> dict[str, Any]:
    """Tokens a second of each system (median of the rounds), and how alike the answers are."""
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    alike = {name: 0 for name in systems}
    num_answers = 0
    for round_number in range(num_rounds + 1):
        prompts = draw()
        answers: dict[str, list[list[int]]] = {}
        # Each round begins with another system, so that none always follows the same one.
        names = list(systems)
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            answers[name] = systems[name](prompts, num_tokens)
            seconds = time.perf_counter() - start
            assert num_tokens is None or all(len(tokens) == num_tokens for tokens in answers[name]), name
            if round_number:  # the first one warms up
                speeds[name].append(sum(map(len, answers[name])) / seconds)
        first = answers[names[0]]
        num_answers += len(prompts)
        for name in names:
            alike[name] += sum(one == other for one, other in zip(first, answers[name], strict=True))
    first_speeds = next(iter(speeds.values()))
    return {
        "tokens_per_second": {name: round(statistics.median(found), 1) for name, found in speeds.items()},
        "speedup_over": {
            name: round(statistics.median(a / b for a, b in zip(first_speeds, found, strict=True)), 3)
            for name, found in speeds.items()
        },
        "answers_equal_to_ours": {name: f"{count} of {num_answers}" for name, count in alike.items()},
        "rounds": {name: [round(speed, 1) for speed in found] for name, found in speeds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    origin = provenance()
    llm = LLM(model="demo", dtype="float32", max_num_seqs=max(arguments.batch_sizes), enable_prefix_caching=False)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    largest = max(arguments.batch_sizes)
    num_lockstep = (arguments.num_rounds + 1) * 2 * sum(arguments.batch_sizes)
    texts = recalls("speed", num_lockstep, arguments.input_len, count_tokens=lambda text: len(tokenizer.encode(text)))
    drawn = (llm.encode_chat([{"role": "user", "content": one.prompt}]) for one in texts)
    asked = problems("speed", (arguments.num_rounds + 1) * QUEUE_ROUNDS * largest)
    queued = (llm.encode_chat([{"role": "user", "content": one.question}]) for one in asked)
    transformers = Transformers(largest)
    systems: dict[str, Answer] = {
        "phonograph": ours(llm),
        "generate": transformers.generate,
        "continuous_batching": transformers.continuous_batching,
    }
    results: list[dict[str, Any]] = []

    def run(case: str, batch_size: int, num_tokens: int | None, draw: Callable[[], list[list[int]]]) -> None:
        before = Counter(llm.step_counts)
        result = compare(systems, draw, num_tokens=num_tokens, num_rounds=arguments.num_rounds)
        steps = Counter(llm.step_counts) - before
        results.append({"case": case, "batch_size": batch_size, "output_len": num_tokens, **result, "steps": steps})
        print(f"{case}, {batch_size} at a time; {dict(steps)}")
        for name, speed in result["tokens_per_second"].items():
            print(
                f"  {name:20s} {speed:8.1f} tok/s   phonograph is {result['speedup_over'][name]:.2f}x as fast;"
                f" answers equal to ours: {result['answers_equal_to_ours'][name]}"
            )

    for size in arguments.batch_sizes:
        run(
            "lockstep, prompts as they come",
            size,
            arguments.output_len,
            lambda size=size: [next(drawn) for _ in range(size)],
        )
        if size > 1:
            run(
                "lockstep, equal prompts",
                size,
                arguments.output_len,
                lambda size=size: [next(drawn)[: arguments.input_len] for _ in range(size)],
            )
    run("queue of problems", largest, None, lambda: [next(queued) for _ in range(QUEUE_ROUNDS * largest)])
    if arguments.output is not None:
        facts = {"input_len": arguments.input_len, "dtype": "float32"}
        write_result(arguments.output, origin, {**facts, "results": results})


if __name__ == "__main__":
    main()
