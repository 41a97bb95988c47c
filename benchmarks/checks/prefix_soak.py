"""Requests whose prefixes come and go, for long: samples, two levels, aborts, preemptions and resets of the cache.

    PYTHONPATH=src:benchmarks python -m checks.prefix_soak --seconds 600 --output soak.json

The log-probability of each token of an answer is compared with that of an engine without a prefix cache that gets
prompt and answer as one prompt, which shares nothing. On a GPU give a model whose prefixes are worth sharing:
`--model FOLDER --set load_format=dummy --set max_model_len=16384 --prefix 8000 --blocks 4000 --tolerance 0.1`.
`--set NAME=VALUE` is a setting of both engines. At the end nothing may be left of any request. The exit code is 1 after
a difference.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from typing import Any

from bench.result_files import output_file
from phonograph import LLM, SamplingParams
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.outputs import CompletionOutput, RequestOutput

COMPARED = 40
"""Answers that the second engine scores at a time."""


class Arrivals:
    """Draws prompts: one of a few prefixes, often a longer prefix after it, and tokens of their own."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self._rng, self._longest = rng, longest
        self._prefixes: list[list[int]] = []

    def draw(self) -> tuple[list[int], SamplingParams, str | None]:
        rng = self._rng
        if len(self._prefixes) < 6 or rng.random() < 0.05:
            self._prefixes.append(self._tokens(rng.randint(1, self._longest // 2)))
            if rng.random() < 0.6:
                self._prefixes.append(self._prefixes[-1] + self._tokens(rng.randint(1, self._longest // 2)))
            del self._prefixes[:-8]
        # Some prompts are a prefix and no more.
        prompt = rng.choice(self._prefixes) + self._tokens(rng.choice([0, 1, rng.randint(1, 40)]))
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 3, 8, 20]),
            max_tokens=rng.randint(1, 40),
            temperature=1.0,
            ignore_eos=rng.random() < 0.7,
            logprobs=0,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            detokenize=False,
        )
        return prompt, params, rng.choice([None, None, None, "salt"])

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(5, 250) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prefix", type=int, default=180, help="tokens of the longest prefix")
    parser.add_argument("--requests", type=int, default=12, help="requests in progress, each of up to 20 samples")
    parser.add_argument("--blocks", type=int, default=120, help="KV blocks; few, so that requests are preempted")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of a log-probability")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of both engines")
    parser.add_argument("--output", type=output_file, help="JSON file")
    arguments = parser.parse_args()
    settings = {"max_model_len": 256, "max_num_seqs": 32, "seed": 1} | dict(map(_setting, arguments.set))
    result = soak(arguments, settings)
    print(json.dumps(result, indent=1))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["problems"]))


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def soak(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Run requests and compare their answers; return counts, and `problems` in words."""
    rng = random.Random(arguments.seed)
    llm = LLM(arguments.model, num_kv_blocks=arguments.blocks, **settings)
    judge = LLM(arguments.model, num_kv_blocks=arguments.blocks, enable_prefix_caching=False, **settings)
    arrivals, live, ended = Arrivals(rng, arguments.prefix), list[RequestOutput](), list[RequestOutput]()
    totals = dict.fromkeys(("steps", "shared_units", "copies", "aborted", "resets", "answers", "tokens"), 0)
    problems: list[str] = []
    worst = total = 0.0

    def count(record: StepRecord) -> None:
        totals["steps"] += 1
        totals["shared_units"] += record.shared_units

    core, submit = llm.engine.core, llm.engine.core.runner.submit

    def submit_counted(batch: Any) -> Any:
        totals["copies"] += len(batch.copies)
        return submit(batch)

    core.on_step = count
    core.runner.submit = submit_counted
    deadline = time.monotonic() + arguments.seconds
    while live or time.monotonic() < deadline:
        while len(live) < arguments.requests and time.monotonic() < deadline and rng.random() < 0.7:
            prompt, params, salt = arrivals.draw()
            live.append(llm.session.add(prompt, params, cache_salt=salt))
        llm.session.step()
        if live and rng.random() < 0.02:
            output = rng.choice(live)
            index = rng.choice([None, rng.randrange(len(output.outputs))])
            llm.session.abort(output, index)
            totals["aborted"] += 1
        if rng.random() < 0.005:
            core.scheduler.reset_prefix_cache()
            totals["resets"] += 1
        ended += [one for one in live if one.finished]
        live = [one for one in live if not one.finished]
        answers = [(one.prompt_token_ids, sample) for one in ended for sample in one.outputs if sample.token_ids]
        if len(answers) >= COMPARED or not live:
            differences = _differences(judge, answers)
            worst, total = max(worst, *differences, 0.0), total + sum(differences)
            totals["answers"] += len(answers)
            totals["tokens"] += sum(len(sample.token_ids) for _, sample in answers)
            problems += [str(one.error) for one in ended if one.error is not None]
            ended.clear()
    if worst > arguments.tolerance:
        problems.append(f"a log-probability differs by {worst:.3g}")
    while llm.session.has_unfinished:
        llm.session.step()
    stats = core.scheduler.stats
    if stats.blocks_used or core.scheduler.has_unfinished:
        problems.append(f"{stats.blocks_used} blocks are in use at the end")
    gc.collect()
    return {
        **totals,
        "preemptions": stats.num_preemptions,
        "prefix_hits": stats.prefix_hits,
        "prefix_queries": stats.prefix_queries,
        "largest_difference": worst,
        "mean_of_answers": total / max(totals["answers"], 1),
        "problems": problems,
    }


def _differences(judge: LLM, answers: list[tuple[list[int], CompletionOutput]]) -> list[float]:
    """Return the largest difference of a log-probability of each answer from that of an engine that shares nothing."""
    if not answers:
        return []
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [prompt + sample.token_ids for prompt, sample in answers]
    # A prompt leaves room for a token, and an answer may end with the context; its last token is then not scored.
    longest = judge.plan.limits.max_model_len - 1
    found: list[float] = []
    for (prompt, sample), output in zip(
        answers, judge.generate([one[:longest] for one in prompts], params), strict=True
    ):
        assert output.prompt_logprobs is not None and sample.logprobs is not None
        scored = output.prompt_logprobs.positions[len(prompt) :]
        pairs = zip(scored, sample.logprobs.positions, strict=False)
        found.append(
            max((abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs if one and other), default=0.0)
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
