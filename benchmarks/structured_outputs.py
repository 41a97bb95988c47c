"""Structured output: are the demo model's outputs of random schemas valid, and what does a mask cost a step?

    python benchmarks/structured_outputs.py --schemas 500 --rows 8 --output RESULT.json
    python benchmarks/structured_outputs.py --model-config DIR --rows 1 8 32 128

With a DIR that holds a config.json only the cost is measured, of that model with random weights and a tokenizer made
here (`benchmarks/checks/serving/generated.py`). Prints a table, then one line of JSON. Exit code 1 where an output is
invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from bench.result_files import output_file, write_result
from checks.serving.generated import make_model_folder
from phonograph import LLM, SamplingParams, StructuredOutputs
from phonograph.bench.records.record import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from schemas import random_schema

STEPS, ROUNDS = 100, 5
LONG: dict[str, Any] = {"regex": "([a-z ]|[0-9]){2000}"}
RECORD: dict[str, Any] = {
    "json": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "tags"],
    }
}
"""A text that the demo model continues for all steps, and a record whose first string random weights do not close."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=500, help="of the demo model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="decodes of a step")
    parser.add_argument("--model-config", type=Path, help="folder with the config.json of another model")
    parser.add_argument(
        "--output", type=output_file, help="file for the result, with date, hardware, versions and commit"
    )
    options = parser.parse_args()
    origin = provenance()
    settings = {"max_model_len": 4096, "max_num_seqs": max(options.rows), "seed": options.seed}
    found: dict[str, Any] = {"model": "demo" if options.model_config is None else options.model_config.name}
    with tempfile.TemporaryDirectory() as name:
        if options.model_config is None:
            llm = LLM(model="demo", **settings)
            found |= validity(llm, options.schemas, options.seed)
        else:
            folder = make_model_folder(options.model_config, Path(name) / options.model_config.name)
            llm = LLM(model=str(folder), load_format="dummy", dtype="bfloat16", **settings)
        for rows in options.rows:
            found |= cost(llm, rows, LONG if options.model_config is None else RECORD)
    for what, value in found.items():
        print(f"{what:36} {value}")
    if options.output is not None:
        write_result(options.output, origin, found)
    print(json.dumps(found))
    return 1 if found.get("invalid") else 0


def validity(llm: LLM, count: int, seed: int) -> dict[str, Any]:
    """Count outputs by their ends, and list complete ones that are not valid."""
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


def cost(llm: LLM, rows: int, constraint: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds a step of so many decodes, with a mask for each and without."""
    kinds = {
        "free": SamplingParams(max_tokens=STEPS, ignore_eos=True),
        "masked": SamplingParams(max_tokens=STEPS, structured_outputs=StructuredOutputs(**constraint)),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(ROUNDS + 1):
        for name, params in kinds.items():
            start = time.perf_counter()
            outputs = llm.generate(["Once upon a time"] * rows, params)
            seconds = time.perf_counter() - start
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            assert lengths == {STEPS}, f"{name}: outputs of {lengths} tokens"
            if turn:  # the first compiles the grammar
                times[name].append(seconds / STEPS * 1e3)
    free, masked = (statistics.median(times[name]) for name in kinds)
    return {
        f"ms a step of {rows}, free": round(free, 3),
        f"ms a step of {rows}, masked": round(masked, 3),
        f"share that the masks of {rows} cost": round(masked / free - 1, 4),
    }


if __name__ == "__main__":
    raise SystemExit(main())
