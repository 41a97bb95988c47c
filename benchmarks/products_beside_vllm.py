"""Microseconds of quantized products alone, beside vLLM's Marlin, Machete and CUTLASS operators in the same process.

    PYTHONPATH=SITE python benchmarks/products_beside_vllm.py --output products.json
    python benchmarks/plot_results.py --products products.json

SITE is a folder with the package vllm 0.26, of which only the library of its CUDA operators is loaded. The weights are
random numbers, quantized once, in the order that each operator wants. Each result is compared with a product in float64
of the numbers that the weights stand for; a wrong result is not timed. An operator that fails loses its own figures,
and the record has the first line of its error.

A CUDA graph has one product after another, with copies of the weights that together exceed the L2 cache several times,
as the layers of a model do. The graphs of all operators run in turn, at one clock. Our kernels begin to read weights
while the kernel before ends, as they do in a step. Activations of FP8 products are quantized inside the time of both
systems, but for `torch._scaled_mm`, which is the product alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from bench.floor import this_chip
from bench.result_files import output_file, write_result
from checks.quantized_operators import BUILDERS, OURS, Operator, Run, bound_of, ours
from checks.random_weights import DTYPE, fp8_weight, int4_weight, largest_error, reference
from phonograph.bench.records.record import provenance

CACHES = 4
"""Times that the copies of the weights exceed the L2 cache."""
CALLS = 64
"""Products in a graph at least, so that the gap between graphs does not count."""
TURNS = 12


class Model(NamedTuple):
    """Products of a model: name, outputs and inputs of each."""

    name: str
    bits: int
    products: dict[str, tuple[int, int]]


MODELS = {
    "qwen": Model(
        "Qwen2.5-7B, GPTQ of 4 bits",
        4,
        {"qkv": (4608, 3584), "output": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
    ),
    "llama": Model(
        "Llama-3.1-8B, FP8",
        8,
        {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    ),
}


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


class Cell:
    """One product of so many rows: what each operator did."""

    def __init__(self, bits: int, x_MK: torch.Tensor, expected_MN: torch.Tensor) -> None:
        self.bits, self.x_MK, self.expected_MN = bits, x_MK, expected_MN
        self.errors: dict[str, float | None] = {}
        self.failed: dict[str, str] = {}

    def check(self, name: str, result_MN: torch.Tensor) -> None:
        """Note the error of a result, the largest of several.

        Raises:
            ArithmeticError: it exceeds the bound.
        """
        error, bound = largest_error(result_MN, self.expected_MN), bound_of(name, self.bits, len(self.x_MK))
        before = self.errors.get(name, 0.0)
        worst = math.inf if before is None else max(error, before)
        self.errors[name] = float(f"{worst:.3g}") if math.isfinite(worst) else None
        if error > bound:
            raise ArithmeticError(f"wrong result: relative error {error:.3g}, at most {bound:g} allowed")

    def runs(self, operators: dict[str, Operator]) -> dict[str, Run]:
        """Run all operators once, and return those with a right result."""
        found: dict[str, Run] = {}
        for name, operator in operators.items():
            try:
                run = operator(self.x_MK)
                self.check(name, run(0))
            except Exception as error:  # the others are still measured
                self.fail(name, error)
            else:
                found[name] = run
        return found

    def fail(self, name: str, error: Exception) -> None:
        self.failed[name] = first_line(error)
        if torch.cuda.is_available():
            # After a wrong address the GPU is lost to this process: then this call raises, and ends the program.
            torch.cuda.synchronize()


def captured(run: Run, calls: int, copies: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of `calls` products with one copy of the weights after another, and the last one's result."""
    graph, result = torch.cuda.CUDAGraph(), None
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for call in range(calls):
            result = run(call % copies)
    finally:
        graph.capture_end()
    assert result is not None
    return graph, result


def in_turn(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, float]:
    """Return the median microseconds of a product in each graph."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            first.record()
            graph.replay()
            last.record()
            events[name].append((first, last))
    torch.cuda.synchronize()
    return {
        name: round(statistics.median(first.elapsed_time(last) for first, last in pairs) / calls * 1000, 3)
        for name, pairs in events.items()
    }


def measure(
    model: Model, product: str, rows: Sequence[int], least_copies: int | None, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Measure one product of a model on a GPU, and return a row of the record for each number of rows."""
    outputs, inputs = model.products[product]
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)
    weight = (int4_weight if model.bits == 4 else fp8_weight)(outputs, inputs, generator)
    num_bytes = weight.packed_OW.nbytes + weight.scales_OG.nbytes
    copies = least_copies or max(2, -(-CACHES * torch.cuda.get_device_properties().L2_cache_size // num_bytes))
    calls = copies * -(-CALLS // copies)
    all_rows_MK = torch.randn(max(rows), inputs, generator=generator, device="cuda").to(DTYPE)
    expected_MN = reference(all_rows_MK, weight)
    operators: dict[str, Operator] = {}
    not_built: dict[str, str] = {}
    for name, build in BUILDERS[model.bits].items():
        if name in names:
            try:
                operators[name] = build(weight, copies)
                torch.cuda.synchronize()
            except Exception as error:  # the others are still measured
                not_built[name] = first_line(error)
    chip, found = this_chip("cuda"), []
    for num_rows in rows:
        cell = Cell(model.bits, all_rows_MK[:num_rows], expected_MN[:num_rows])
        cell.failed |= not_built
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, run in cell.runs(operators).items():
            try:
                graph, result = captured(run, calls, copies)
                graph.replay()
                cell.check(name, result)
            except Exception as error:  # the others are still measured
                cell.fail(name, error)
            else:
                graphs[name] = graph
        row = {"model": model.name, "product": product, "outputs": outputs, "inputs": inputs, "rows": num_rows}
        if chip is not None:
            moved = num_bytes + num_rows * (inputs + outputs) * DTYPE.itemsize
            row["floor_us"] = round(moved / chip.bandwidth * 1e6, 3)
        row |= {"us": in_turn(graphs, calls), "errors": cell.errors, "failed": cell.failed, "copies": copies}
        found.append(row)
        print({key: row[key] for key in ("product", "rows", "us", "failed")}, flush=True)
    return found


def compile_ours(models: Sequence[Model], rows: Sequence[int]) -> None:
    """Compile our kernels of all products in parallel, before any of them is measured."""
    from phonograph.kernels.triton.launch.precompile import compile_only

    generator = torch.Generator("cuda").manual_seed(0)
    with compile_only():
        for model in models:
            for outputs, inputs in model.products.values():
                operator = ours((int4_weight if model.bits == 4 else fp8_weight)(outputs, inputs, generator), 1)
                for num_rows in rows:
                    operator(torch.zeros(num_rows, inputs, dtype=DTYPE, device="cuda"))(0)


def table(record: dict[str, Any]) -> str:
    """Return the record's microseconds as Markdown: a line for each product and operator, a column for each rows."""
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in record["rows"]:
        shape = f"{row['product']} {row['outputs']}x{row['inputs']}"
        texts = {name: f"{us:.1f}" for name, us in row["us"].items()}
        texts |= {name: "wrong" if "wrong result" in why else "failed" for name, why in row["failed"].items()}
        for name, text in texts.items():
            cells.setdefault((row["model"], shape, name), {})[row["rows"]] = text
    columns = sorted({row["rows"] for row in record["rows"]})
    lines: list[str] = []
    for model in dict.fromkeys(model for model, _, _ in cells):
        lines += ["", _line(f"{model}, us", "", map(str, columns)), "|" + "---|" * (2 + len(columns))]
        for (own, shape, name), texts in cells.items():
            if own == model:
                lines.append(_line(shape, name, [texts.get(column, "") for column in columns]))
    return "\n".join(lines[1:])


def _line(first: str, second: str, rest: Iterable[str]) -> str:
    return f"| {' | '.join([first, second, *rest])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(dict.fromkeys(name for builders in BUILDERS.values() for name in builders))
    parser.add_argument("--model-shapes", choices=["both", *MODELS], default="both")
    parser.add_argument("--rows", type=int, nargs="+", default=[1 << power for power in range(10)])
    parser.add_argument("--copies", type=int, help="of the weights; as many as exceed the L2 cache four times if unset")
    parser.add_argument("--operators", nargs="+", choices=known, default=known)
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    models = list(MODELS.values()) if arguments.model_shapes == "both" else [MODELS[arguments.model_shapes]]
    origin = provenance()
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = None
    record: dict[str, Any] = {"vllm": version, "rows": []}
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        if OURS in arguments.operators:
            try:
                compile_ours(models, arguments.rows)
            except Exception as error:  # kernels are compiled at their first launch then
                print(f"compile: {first_line(error)}", flush=True)
        for model in models:
            for product in model.products:
                record["rows"] += measure(model, product, arguments.rows, arguments.copies, arguments.operators)
                # A run that is cut off leaves the products before.
                if arguments.output is not None:
                    write_result(arguments.output, origin, record)
    print(table(record))


if __name__ == "__main__":
    main()
