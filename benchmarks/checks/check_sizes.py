"""Starts and answers of an engine at each of several max_num_seqs at which other engines hung after the capture.

    python -m checks.check_sizes '{"attention_backend": "flashinfer"}' 1,2,4

Engines of the demo model follow each other in one process; the last line is JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from demo_tasks.tasks import PROBLEM_TOKENS, problems
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM

PROBLEMS = 60
"""Above the largest max_num_seqs asked for, so that each runs full, and partly filled at the end."""
_SEED = 17


def answers_at(size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Answers PROBLEMS problems with at most `size` requests in a step; returns how, and the token ids of all."""
    llm = LLM(model="demo", max_num_seqs=size, **settings)
    asked = [llm.encode_chat([{"role": "user", "content": one.question}]) for one in problems(_SEED, PROBLEMS)]
    outputs = llm.generate(asked, SamplingParams(max_tokens=PROBLEM_TOKENS, temperature=0.0))
    return {
        "max_num_seqs": size,
        "backend": llm.plan.selection.capabilities.label,
        "mode": llm.plan.resolution.mode.value,
        "num_graphs": llm.engine.captured.num_graphs,
        "steps": dict(llm.step_counts),
        "finished": sum(output.finished and output.error is None for output in outputs),
        "token_ids": [output.outputs[0].token_ids for output in outputs],
    }


def main(arguments: Sequence[str]) -> None:
    settings, sizes = arguments
    found: list[dict[str, Any]] = []
    for size in map(int, sizes.split(",")):
        print(f"max_num_seqs {size} ...", flush=True)  # the last line of a process that hangs
        found.append(answers_at(size, json.loads(settings)))
        # An engine's parts refer to each other, and its graphs hold memory.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    first = found[0]["token_ids"]
    for one in found:
        one["answers_unlike_first"] = sum(a != b for a, b in zip(first, one.pop("token_ids"), strict=True))
    print(json.dumps({"asked": PROBLEMS, "sizes": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
