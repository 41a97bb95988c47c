"""Milliseconds between tokens with sets of product configurations and of settings, an engine for each: a test of what
`sweep_products.py` found, before it becomes a rule, or of a setting before it becomes the default.

    python benchmarks/products_in_engines.py --model DIR --rows 8 --sets sets.json --cases 4x1k 8x1k --output a.json

DIR needs a config.json only. sets.json has, by the name of a set, configurations as Python has them, by what they are
for: {"wide": {"product 4096 1024": "GemmSmallMConfig(8, 32, 512, 2, 2, 8, 1, 0, True)"}}, where the numbers are
outputs and inputs, "silu" stands for gates and ups, and an empty set for what is chosen now; --rows is their class.
{"setting enable_prefix_caching": "False"} is a setting of the engine. The chain of all kernels that the sweep runs is
not the step of an engine: a set that gained 5% there gained 1.3% here, and lost 4% with another number of sequences.
Sets run in the order given, so name the first one again at the end.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import re
from pathlib import Path
from typing import Any

import torch
from sweep_products import Settings, Weights, applied, this_gpu

from bench.cases import DecodeCase
from bench.result_files import output_file, write_result
from bench.workloads import bench_decode
from phonograph.bench.records.record import provenance
from phonograph.engine.llm import LLM
from phonograph.kernels.triton.gemm.product_plan import (
    GemmRingConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    GemvConfig,
    KernelConfig,
    ProductShape,
    WeightFormat,
)

KINDS = {kind.__name__: kind for kind in (GemvConfig, GemmSmallMConfig, GemmRingConfig, GemmTiledConfig)}


def read_set(name: str, texts: dict[str, str]) -> tuple[Settings, dict[str, object]]:
    """Return configurations, and settings of the engine. End the program if something is unlike what the script's text
    says."""
    products: Settings = {}
    settings: dict[str, object] = {}
    for what, text in texts.items():
        if match := re.fullmatch(r"setting (\w+)", what):
            settings[match[1]] = read_value(name, text)
        elif match := re.fullmatch(r"(product|silu) (\d+) (\d+)", what):
            shape = ProductShape(int(match[2]), int(match[3]), gated=match[1] == "silu")
            products[shape] = read_config(name, text)
        else:
            raise SystemExit(f"set {name}: {what!r} must be product or silu, then outputs and inputs, or setting NAME")
    return products, settings


def read_value(name: str, text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise SystemExit(f"set {name}: {text!r} must be a value as Python has it, such as True or 'FULL'") from None


def read_config(name: str, text: str) -> KernelConfig | None:
    if text == "None":
        return None
    kind, _, values = text.partition("(")
    try:
        numbers = ast.literal_eval(f"({values}")
        if all(isinstance(number, int) for number in numbers):
            return KINDS[kind](*numbers)
    except (KeyError, SyntaxError, TypeError, ValueError):
        pass
    known = ", ".join(KINDS)
    raise SystemExit(f"set {name}: {text!r} must be None or one of {known} with its numbers in order")


def measure(
    model: str, cases: list[DecodeCase], turns: int, device: str, settings: dict[str, object]
) -> dict[str, list[float]]:
    """By case, of one engine, what each turn took."""
    most = max(case.num_seqs for case in cases)
    made: dict[str, object] = {
        "model": model,
        "load_format": "dummy",
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "device": device,
        "max_num_seqs": most,
        "max_model_len": max(case.length for case in cases),
        "max_cudagraph_capture_size": most,
    }
    llm = LLM(**(made | settings))
    ms: dict[str, list[float]] = {}
    for _ in range(turns):
        for row in bench_decode(llm, cases, lambda *_: None):
            ms.setdefault(row.case, []).append(row.facts["itl_ms"])
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=8, help="the class of rows that the sets are for")
    parser.add_argument("--sets", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["4x1k", "8x1k"], help="sequences x tokens of context")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="cpu: without products of ours, to try the script")
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    origin = provenance()
    cases = [DecodeCase.parse(case) for case in arguments.cases]
    given: list[tuple[str, dict[str, str]]] = json.loads(arguments.sets.read_text(), object_pairs_hook=list)
    sets = [(name, dict(texts)) for name, texts in given]
    read = [read_set(name, texts) for name, texts in sets]
    dense = Weights(WeightFormat("bfloat16"), this_gpu())
    rows: list[dict[str, Any]] = []
    for (name, texts), (products, settings) in zip(sets, read, strict=True):
        with applied(products, arguments.rows, dense):
            ms = measure(arguments.model, cases, arguments.turns, arguments.device, settings)
        rows.append({"set": name, "ms": ms, "configurations": texts})
        medians = {case: sorted(turns)[len(turns) // 2] for case, turns in ms.items()}
        print(f"{len(rows)} of {len(sets)}, {name}: {medians}", flush=True)
        # The next engine takes its share of what is free.
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    if arguments.output is not None:
        write_result(
            arguments.output, origin, {"model": Path(arguments.model).name, "class": arguments.rows, "rows": rows}
        )


if __name__ == "__main__":
    main()
