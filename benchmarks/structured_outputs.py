"""Structured output of the demo model: are outputs of random schemas valid, and what does a mask cost a step?

python benchmarks/structured_outputs.py [--schemas 500] [--seed 0]

Prints a table, then one line of JSON. Exit code 1 where an output is invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from phonograph import LLM, SamplingParams, StructuredOutputs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from schemas import random_schema

ROWS, STEPS, ROUNDS = 8, 100, 5
LONG = {"regex": "([a-z ]|[0-9]){2000}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    llm = LLM(model="demo", max_model_len=4096, max_num_seqs=ROWS, seed=options.seed)
    found = validity(llm, options.schemas, options.seed) | cost(llm)
    for name, value in found.items():
        print(f"{name:28} {value}")
    print(json.dumps(found))
    return 1 if found["invalid"] else 0


def validity(llm: LLM, count: int, seed: int) -> dict[str, Any]:
    """Outputs by how they ended; of those that came to their end, which are not valid."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=1500,
            seed=index,
            structured_outputs=StructuredOutputs(json=schema, disable_any_whitespace=index % 10 > 0),
        )
        for index, schema in enumerate(schemas)
    ]
    start = time.perf_counter()
    outputs = llm.generate(["Here it is: "] * count, params)
    seconds = time.perf_counter() - start
    ends = Counter("error" if output.error else str(output.outputs[0].finish_reason) for output in outputs)
    invalid = 0
    for schema, output in zip(schemas, outputs, strict=True):
        if output.error or output.outputs[0].finish_reason != "stop":
            print(output.error or f"not ended: {json.dumps(schema)[:200]}", file=sys.stderr)
            continue
        text = output.outputs[0].text
        try:
            checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            checker.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            invalid += 1
            print(f"invalid: {text[:200]!r} of {json.dumps(schema)[:200]}: {error}", file=sys.stderr)
    return {"schemas": count, **{f"ended: {end}": ends[end] for end in sorted(ends)}, "invalid": invalid} | {
        "seconds": round(seconds, 1)
    }


def cost(llm: LLM) -> dict[str, Any]:
    """Milliseconds a step of `ROWS` decodes, with a mask for each and without, and what the matcher takes of it."""
    kinds = {
        "free": SamplingParams(max_tokens=STEPS, ignore_eos=True),
        "masked": SamplingParams(max_tokens=STEPS, structured_outputs=StructuredOutputs(**LONG)),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(ROUNDS + 1):
        for name, params in kinds.items():
            start = time.perf_counter()
            llm.generate(["Once upon a time"] * ROWS, params)
            if turn:  # the first compiles
                times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    free, masked = (statistics.median(times[name]) for name in kinds)
    return {
        "ms a step, free": round(free, 3),
        "ms a step, masked": round(masked, 3),
        "ms, mask": round(masked - free, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
