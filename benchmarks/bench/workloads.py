"""Workloads of a whole engine: decode and mixed, as in the published comparison with vLLM."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.cases import DECODE_TOKENS, MIXED_TOKENS, DecodeCase, MixedCase
from bench.floor import decode_floor, this_chip
from phonograph.bench.engine import greedy, random_prompt, timed
from phonograph.bench.records.results import BenchProgress, Row
from phonograph.core.batch import ScheduledBatch
from phonograph.engine.llm import LLM
from phonograph.runner.steps import PendingStep

DECODE_TURNS = 2
MIXED_SHORT_PROMPTS, MIXED_SHORT_LEN, MIXED_RUNS = 100, 5, 3


def bench_decode(llm: LLM, cases: Sequence[DecodeCase], progress: BenchProgress) -> Iterator[Row]:
    """Measure the milliseconds between tokens while all sequences decode, over 96 tokens after cached prompts."""
    rng = random.Random(0)
    plan = llm.plan
    chip = this_chip(plan.device.kind)
    for done, case in enumerate(cases):
        progress("decode cases", done, len(cases))
        prompts = [random_prompt(llm, rng, case.context) for _ in range(case.num_seqs)]

        def seconds(num_tokens: int, prompts: list[list[int]] = prompts) -> float:
            return timed(llm, prompts, [greedy(num_tokens)] * len(prompts))

        seconds(1)
        short = min(seconds(1) for _ in range(DECODE_TURNS))
        before, drafts = Counter(llm.step_counts), llm.engine.core.scheduler.stats.drafts
        long = min(seconds(1 + DECODE_TOKENS) for _ in range(DECODE_TURNS))
        facts: dict[str, Any] = {
            "bs": case.num_seqs,
            "ctx": case.context,
            "itl_ms": round((long - short) / DECODE_TOKENS * 1e3, 4),
        }
        after = llm.engine.core.scheduler.stats.drafts
        if after.verified:
            facts["drafts"] = {
                "verified": after.verified - drafts.verified,
                "accepted": after.accepted - drafts.accepted,
            }
        if chip is not None:
            floor = decode_floor(
                chip,
                plan.model,
                plan.attention,
                num_seqs=case.num_seqs,
                context=case.context,
            )
            facts["floor_ms"] = round(floor * 1e3, 4)
        yield Row(suite="decode", case=str(case), facts=facts, steps=Counter(llm.step_counts) - before)


def bench_mixed(llm: LLM, cases: Sequence[MixedCase], progress: BenchProgress) -> Iterator[Row]:
    """Measure the seconds in which one long sequence decodes 100 tokens beside 100 short prompts of one token each.

    Two sequences run at a time (max_num_seqs 2), so that nearly every step has a decode with a long context and a short
    prefill. The first run also computes the long prompt and is not counted; the result is the median of the others.
    """
    rng = random.Random(0)
    for done, case in enumerate(cases):
        long = random_prompt(llm, rng, case.context)
        seconds: list[float] = []
        before: Counter[str] = Counter()
        with batches_by_kind(llm) as kinds:
            for turn in range(MIXED_RUNS):
                progress("mixed runs", done * MIXED_RUNS + turn, len(cases) * MIXED_RUNS)
                prompts = [long, *(random_prompt(llm, rng, MIXED_SHORT_LEN) for _ in range(MIXED_SHORT_PROMPTS))]
                kinds.clear()
                before = Counter(llm.step_counts)
                params = [greedy(MIXED_TOKENS), *[greedy(1)] * MIXED_SHORT_PROMPTS]
                seconds.append(timed(llm, prompts, params))
        facts = {
            "ctx": case.context,
            "s": round(statistics.median(seconds[1:]), 4),
            "all": [round(run, 4) for run in seconds],
            # Batches and steps are those of the last run.
            "batches": dict(kinds),
            "mixed_steps": kinds["mixed"],
        }
        yield Row(suite="mixed", case=str(case), facts=facts, steps=Counter(llm.step_counts) - before)


@contextmanager
def batches_by_kind(llm: LLM) -> Generator[Counter[str]]:
    """Count the submitted batches as "decode", "prefill" or "mixed", whatever graphs run them."""
    runner = llm.engine.core.runner
    submit = runner.submit
    kinds: Counter[str] = Counter()

    def counting(batch: ScheduledBatch) -> PendingStep:
        if batch.num_decodes == 0:
            kinds["prefill"] += 1
        else:
            kinds["mixed" if batch.num_decodes < batch.num_reqs else "decode"] += 1
        return submit(batch)

    runner.submit = counting
    try:
        yield kinds
    finally:
        runner.submit = submit
