"""Acceptance of drafts by method, on the held-out problems of the demo model, on a CPU.

    PYTHONPATH=src:benchmarks OMP_NUM_THREADS=1 python benchmarks/draft_acceptance.py --draft-model MODEL \\
        --output benchmarks/results/draft_acceptance.json

The head is the one in the package; `training/demo/train_drafts.py` makes it, and the draft model. Problems are those of
`benchmarks/demo_evaluation`, each a chat of one turn, which the model ends itself. All drafts are verified.

The *accepted length* is the mean number of tokens of a decode, of 1 + drafts: its drafts that were right, and the one
behind them. All decodes count but the last of an answer, which its end may cut; so a decode for which prompt lookup
found nothing counts with 1. Each problem has a seed of its own. *Coupled* drafts, those of the engine, are drawn at the
request's temperature with the noise of the draw that they stand for; *greedy* ones are the most likely tokens.

`prefix` has the accepted length after a hit in the prefix cache. Other problems have the same turns before them, which
end with a block, so that the last entry of the last cached block has the first token of another problem. `kept` is the
engine's way. The others clear keys and values of the head, in all cached entries of the named part: they have a score
of 0 there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.result_files import output_file, write_result
from phonograph import LLM, SamplingParams
from phonograph.bench.records.record import provenance
from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.runner.draft_runner import DraftRunner
from phonograph.sampling.sampler import Sampled

PROBLEMS = Path(__file__).parent / "demo_evaluation" / "tasks" / "held_out_problems.jsonl"
BLOCK = 16
END = 2
"""Token at the end of an answer."""
TEMPERATURES = 0.0, 1.0, 2.0
HISTORY = 4
"""Turns before a problem where the prefix cache is measured."""
PARTS: dict[str, Callable[[int], slice]] = {
    "last entry cleared": lambda length: slice(length - 1, length),
    "last block cleared": lambda length: slice(length - BLOCK, length),
    "all blocks cleared": lambda length: slice(0, length),
}


class Counted:
    """Accepted drafts of an engine's decodes, by position."""

    def __init__(self, llm: LLM, most: int) -> None:
        self._most = most
        self._start()
        drafts: Any = llm.engine.core.scheduler.drafts
        self._learn = drafts.learn
        drafts.learn = self._count

    def _start(self) -> None:
        self.decodes, self.tokens, self.by_position, self.drafts = 0, 0, [0] * self._most, 0

    def _count(self, batch: ScheduledBatch, output: StepOutput, seconds: float) -> None:
        self._learn(batch, output, seconds)
        ended = {*output.failures}
        depths = dict(zip(batch.slots[: batch.num_decodes], batch.query_lens, strict=False))
        for slot, tokens in zip(output.slots, output.token_ids, strict=True):
            if slot not in depths or slot in ended or END in tokens:
                continue
            self.decodes += 1
            self.tokens += len(tokens)
            self.drafts += depths[slot] - 1
            for position in range(len(tokens) - 1):
                self.by_position[position] += 1

    def take(self) -> dict[str, Any]:
        """Return the counts since the last call."""
        counts = {
            "accepted_length": round(self.tokens / self.decodes, 3),
            "decodes": self.decodes,
            "drafts": self.drafts,
            "accepted_by_position": self.by_position,
        }
        self._start()
        return counts


class GreedyDrafts:
    """Takes the most likely tokens as drafts, in place of the engine's sampler."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits_NV: torch.Tensor, slots: Sequence[int], output_lens: object) -> Sampled:
        return Sampled(token_ids=logits_NV.argmax(-1).tolist())


def make_llm(speculation: dict[str, Any] | None, **more: Any) -> LLM:
    settings = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 8, "block_size": BLOCK} | more
    config = None if speculation is None else speculation | {"adaptive_depth": False}
    return LLM("demo", **settings, speculative_config=config)


def draft_runner_of(llm: LLM) -> DraftRunner:
    runner: Any = llm.engine.core.runner
    return runner._sampling._draft_runner


def params_of(number: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=seed, max_tokens=80) for seed in range(number)]


def answers(llm: LLM, prompts: Sequence[list[int]], temperature: float) -> list[list[int]]:
    outputs = llm.generate([*prompts], params_of(len(prompts), temperature), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def measure_methods(
    methods: dict[str, dict[str, Any]], chats: Sequence[list[int]], numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the acceptance of each method, number of drafts and temperature."""
    results: list[dict[str, Any]] = []
    llm = make_llm(None)
    plain = {temperature: answers(llm, chats, temperature) for temperature in TEMPERATURES}
    for (method, settings), most in product(methods.items(), numbers):
        llm = make_llm(settings | {"num_speculative_tokens": most}, enable_prefix_caching=False)
        counted = Counted(llm, most)
        for temperature, draws in product(TEMPERATURES, ("coupled", "greedy")):
            # Greedy drafts are coupled ones at temperature 0, and a lookup draws nothing.
            if draws == "greedy" and (not temperature or method == "ngram"):
                continue
            with greedy_drafts(llm) if draws == "greedy" else nullcontext():
                found = answers(llm, chats, temperature)
            results.append(
                {"method": method, "drafts_a_decode": most, "temperature": temperature, "drafts_are": draws}
                | counted.take()
                | {"answers_as_without": sum(map(list.__eq__, found, plain[temperature]))}
                | {"answers_as_greedy": sum(map(list.__eq__, found, plain[0.0])), "answers": len(found)}
            )
            print(json.dumps(results[-1]), flush=True)
    return results


@contextmanager
def greedy_drafts(llm: LLM) -> Iterator[None]:
    """Take the most likely tokens as drafts."""
    runner: Any = draft_runner_of(llm).runner
    sampling = runner._sampling
    drawing, sampling._sampler = sampling._sampler, GreedyDrafts(llm.engine.plan.model.vocab_size)
    yield
    sampling._sampler = drawing


@contextmanager
def cleared(llm: LLM, part: Callable[[int], slice] | None) -> Iterator[None]:
    """Clear keys and values of the head in a part of the cached entries of each sequence that starts."""
    drafting: Any = draft_runner_of(llm)
    draft, inputs, caches = drafting.draft, drafting._inputs, drafting.runner._program.attention._kv_caches

    def clear_and_draft(batch: ScheduledBatch, *rest: Any) -> dict[int, int]:
        for new in batch.new if part is not None else ():
            entries = torch.arange(new.num_computed)[part(new.num_computed)] if new.num_computed else []
            for entry in map(int, entries):
                for cache in caches:
                    cache[:, int(inputs.slot_blocks[0, new.slot, entry // BLOCK]), entry % BLOCK] = 0
        return draft(batch, *rest)

    drafting.draft = clear_and_draft
    yield
    drafting.draft = draft


def measure_prefixes(
    head: dict[str, Any],
    problems: Sequence[dict[str, Any]],
    most: int,
    encode: Callable[[list[dict[str, str]]], list[int]],
) -> list[dict[str, Any]]:
    """Return the acceptance after hits in the prefix cache, with and without keys and values of the head."""
    history, asked = problems[:HISTORY], problems[HISTORY:]
    turns = [
        {"role": role, "content": content}
        for one in history
        for role, content in (("user", one["question"]), ("assistant", one["worked_answer"]))
    ]
    prompts = [encode([*turns, {"role": "user", "content": one["question"]}]) for one in asked]
    same = next(index for index, tokens in enumerate(zip(*prompts, strict=False)) if len({*tokens}) > 1)
    # Without some of the first tokens the common ones end with a block.
    prompts = [[prompt[0], *prompt[1 + (same % BLOCK) :]] for prompt in prompts]
    same -= same % BLOCK
    results: list[dict[str, Any]] = []
    cases: dict[str, Callable[[int], slice] | None] = {"no prefix cache": None, "kept": None, **PARTS}
    for caches in (False, True):
        llm = make_llm(head | {"num_speculative_tokens": most}, enable_prefix_caching=caches)
        counted = Counted(llm, most)
        for name, part in cases.items():
            if caches == (name == "no prefix cache"):
                continue
            llm.reset_prefix_cache()
            before = llm.engine.core.scheduler.stats.prefix_hits
            with cleared(llm, part):
                answers(llm, prompts[:1], 0.0)
                counted.take()
                answers(llm, prompts[1:], 0.0)
            hits = llm.engine.core.scheduler.stats.prefix_hits - before
            results.append({"cached": name, "common_tokens": same, "hit_tokens": hits} | counted.take())
            print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", default="demo-eagle3", help="draft head")
    parser.add_argument("--draft-model", help="draft model; left out without it")
    parser.add_argument("--drafts", type=int, nargs="+", default=(3, 4), help="num_speculative_tokens")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--output", type=output_file, help="file for the record")
    arguments = parser.parse_args()
    origin = provenance()
    lines = PROBLEMS.read_text(encoding="utf-8").splitlines()[: arguments.problems]
    problems = [json.loads(line) for line in lines]
    encode = make_llm(None).encode_chat
    chats = [encode([{"role": "user", "content": one["question"]}]) for one in problems]
    head = {"method": "eagle3", "model": arguments.head}
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "eagle3": head,
    }
    if arguments.draft_model:
        methods["draft_model"] = {"method": "draft_model", "model": arguments.draft_model}
    result = {
        "model": "demo",
        "problems": len(problems),
        "methods": measure_methods(methods, chats, arguments.drafts),
        "prefix": measure_prefixes(head, problems, max(arguments.drafts), encode),
    }
    if arguments.output is not None:
        write_result(arguments.output, origin, result)


if __name__ == "__main__":
    main()
