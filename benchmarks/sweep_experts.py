"""Times the experts of one layer on this GPU, kernel by kernel, beside the floor of memory; finds tiles with --sweep.

    python benchmarks/sweep_experts.py --model qwen3-30b-a3b --tokens 1 8 32 128 256 2048
    python benchmarks/sweep_experts.py --model gpt-oss-20b --format mxfp4 --tokens 8 --sweep gate_up
    python benchmarks/sweep_experts.py --model qwen3.6-35b-a3b --tokens 1 --one-row --sweep down
    python benchmarks/sweep_experts.py --model gpt-oss-20b --format mxfp4 --tokens 2048 8192 --layers 2 --long

A graph has several layers with weights of their own, so that the L2 cache has none of them at the next replay; random
rows route nearly independently. The floor is the bytes of the experts that were chosen, and of the router, over 4.33
TB/s; `tflops` is the speed of both products together. A sweep tries all candidates for one product, the others as
`expert_plan` says, and prints the best; the block of pairs and the tail belong to both products. `--long` measures
the configurations for long prompts with all tails, and compares their results with those of the first. The results name
the entries of `_CONFIGS` in kernels/triton/experts/expert_plan.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from bench.result_files import output_file, write_result
from phonograph.bench.records.record import provenance
from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import (
    ExpertConfig,
    ExpertTile,
    FewRowsTile,
    RowConfig,
    RowTile,
    expert_config,
    row_config,
)
from phonograph.kernels.triton.experts.expert_products import down_products, fitted, gate_up_products
from phonograph.kernels.triton.experts.expert_results import add_results
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.experts.route_row import route_row
from phonograph.kernels.triton.experts.row_products import add_down_row, gate_up_row
from phonograph.kernels.triton.gemm.product import Matrix
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme

BYTES_PER_US = 4.33e6
REPLAYS = 20


class Model(NamedTuple):
    """Sizes of a layer's experts."""

    routing: Routing
    hidden_size: int
    intermediate_size: int


MODELS = {
    "qwen3-30b-a3b": Model(Routing(128, 8), 2048, 768),
    "qwen3.6-35b-a3b": Model(Routing(256, 8, shared=True), 2048, 512),
    "gpt-oss-20b": Model(Routing(32, 4), 2880, 2880),
    "mixtral-8x7b": Model(Routing(8, 2), 4096, 14336),
    "olmoe-7b": Model(Routing(64, 8, renormalised=False), 2048, 1024),
}
FORMATS = ("bf16", "fp8", "fp8-128", "int4", "int8", "mxfp4")
LONG_TOKENS = 2048, 8192
"""Prompts whose configurations `--long` measures with all tails."""


def matrix(outputs: int, inputs: int, kind: str) -> Matrix:
    """Return random weights of a format, as they lie on a GPU."""
    if kind == "bf16":
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(0, inputs**-0.5)
    if kind == "mxfp4":
        weight = Mxfp4Scheme().allocate(
            outputs, inputs, lambda *shape, dtype=None: torch.empty(shape, dtype=dtype, device="cuda")
        )
        weight.draw(inputs**-0.5, torch.Generator("cuda").manual_seed(1))
        return weight.values
    group = inputs if kind == "fp8" else 128 if inputs % 128 == 0 else 32
    dtype = torch.float32 if kind == "fp8" else torch.bfloat16
    scales = torch.full((inputs // group, outputs), inputs**-0.5, dtype=dtype, device="cuda").t()
    if kind.startswith("fp8"):
        values = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_().to(torch.float8_e4m3fn)
        return Grouped(values, scales, None, 8, group)
    bits = int(kind.removeprefix("int"))
    words = torch.randint(-(2**31), 2**31, (outputs, inputs * bits // 32), device="cuda").to(torch.int32)
    return Grouped(words, scales / (1 << (bits - 1)), None, bits, group, interleaved=bits == 4 and group % 128 == 0)


def nbytes(weight: Matrix) -> int:
    tensors = weight if isinstance(weight, Grouped) else (weight,)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


class Layer:
    """Experts of a layer with random weights, and the memory of a step of T tokens."""

    def __init__(self, model: Model, num_tokens: int, kind: str) -> None:
        routing, hidden, inner = model
        pairs, matrices = num_tokens * routing.num_pairs, routing.num_matrices
        self.routing = routing

        def halves(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()

        # A gate of a shared expert is one more output.
        self.x, self.router = halves(num_tokens, hidden), halves(matrices, hidden)
        self.gate_up = matrix(matrices * 2 * inner, hidden, kind)
        self.down = matrix(matrices * hidden, inner, kind)
        self.hidden, self.normed, self.norm = halves(num_tokens, hidden), halves(num_tokens, hidden), halves(hidden)
        self.inner, self.results = halves(pairs, inner), halves(pairs, hidden)
        words = torch.zeros(ExpertLists.num_words(num_tokens, routing), device="cuda")
        counters = ExpertLists.counters(num_tokens, torch.device("cuda"))
        self.lists = ExpertLists.over(words, num_tokens, routing, counters)
        self.real = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")

    def calls(self, config: ExpertConfig | RowConfig) -> dict[str, Callable[[], None]]:
        """Return the launches of a layer, of which those for one row need no kernel that adds results."""
        routing, lists = self.routing, self.lists
        norm = self.norm, 1e-6, self.normed
        if isinstance(config, RowConfig):
            gate_up, down = self.gate_up, self.down
            return {
                "route": lambda: route_row(self.hidden, self.router, routing, lists, config.route, norm=norm),
                "gate_up": lambda: gate_up_row(self.normed, gate_up, lists, config.gate_up, self.inner),
                "down": lambda: add_down_row(self.inner, down, lists, config.down, self.hidden),
            }
        config = fitted(config, self.gate_up, self.down)
        return {
            "route": lambda: route(self.x, self.router, routing, lists, block=config.block, num_rows=self.real),
            "gate_up": lambda: gate_up_products(self.x, self.gate_up, lists, routing, config, self.inner),
            "down": lambda: down_products(self.inner, self.down, lists, routing, config, self.results),
            "add": lambda: add_results(self.results, self.hidden, routing.num_pairs, num_rows=self.real, norm=norm),
        }

    def tflops(self, us: float) -> float:
        """Return the speed of both products from their time."""
        return 6 * self.results.numel() * self.inner.shape[1] / us / 1e6

    def floor_us(self) -> tuple[float, int]:
        """Return the microseconds that reading the chosen experts takes at least, and their number, after a route."""
        chosen = len(self.lists.experts_Tk.unique())
        weights = (nbytes(self.gate_up) + nbytes(self.down)) * chosen / self.routing.num_matrices
        return (weights + self.router.nbytes) / BYTES_PER_US, chosen


def microseconds(calls: list[Callable[[], None]], each: int) -> float:
    """Return the time of one of `each` parts of the calls, which run in order as one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / each)
    return statistics.median(times)


def measure(layers: list[Layer], config: ExpertConfig | RowConfig) -> dict[str, float]:
    """Return the times of all kernels of a layer, and of each alone, in microseconds."""
    of_layers = [layer.calls(config) for layer in layers]
    whole = microseconds([call for calls in of_layers for call in calls.values()], len(layers))
    alone = {name: microseconds([calls[name] for calls in of_layers], len(layers)) for name in of_layers[0]}
    return {"all": whole, **alone}


def candidates(config: ExpertConfig | RowConfig, product: str) -> Iterator[ExpertConfig | RowConfig]:
    """Yield configurations with all tiles of one product, or with all blocks."""
    if isinstance(config, RowConfig) and isinstance(config.down, FewRowsTile):
        for block_n, units, ahead, warps in itertools.product((8, 16, 32), (1, 2, 4, 8), (1, 2, 3, 4, 6), (1, 2, 4, 8)):
            if units % warps == 0 and (block_n == 8 or product == "gate_up"):
                yield config._replace(**{product: FewRowsTile(block_n, units, ahead, warps)})
        return
    if isinstance(config, RowConfig):
        for block_n, block_k, ahead, warps in itertools.product(
            (1, 2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 2, 4, 8)
        ):
            if block_n * block_k <= 512 * warps * 4 and block_k >= 64 * warps:
                yield config._replace(**{product: RowTile(block_n, block_k, ahead, warps)})
        return
    if product in ("block", "tail"):
        sizes = (16, 32, 64, 128, 256) if product == "block" else (0, 16, 32, 64, 128)
        yield from (config._replace(**{product: size}) for size in sizes if product == "block" or size < config.block)
        return
    if product == "route":
        return
    tiles = [
        ExpertTile(*tile) for tile in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 6))
    ]
    if config.block < 128:
        yield from (config._replace(**{product: tile}) for tile in tiles)
        return
    # Sums of 64 to 128 numbers a thread.
    for block, tile in itertools.product((128, 256), tiles):
        outputs = tile.block_n * (1 + (product == "gate_up"))
        if 64 <= outputs * block // (32 * tile.num_warps) <= 128 and tile.block_k >= 64:
            yield config._replace(**{"block": block, product: tile})


def sweep(
    layers: list[Layer], config: ExpertConfig | RowConfig, product: str, most: int
) -> list[tuple[float, ExpertConfig | RowConfig]]:
    """Return times and configurations, best first."""
    kernel = "all" if product in ("block", "tail") else product
    found: list[tuple[float, ExpertConfig | RowConfig]] = []
    matrices = layers[0].gate_up, layers[0].down
    wanted = candidates(config, product)
    tried = [*dict.fromkeys(one if isinstance(one, RowConfig) else fitted(one, *matrices) for one in wanted)]
    for one in tried[:: max(1, len(tried) // most)]:
        calls = [layer.calls(one) for layer in layers]
        try:
            chosen = [call for of in calls for name, call in of.items() if kernel in ("all", name)]
            for of in calls:
                of["route"]()
            found.append((microseconds(chosen, len(layers)), one))
        except OutOfResources:
            continue
    return sorted(found, key=lambda pair: pair[0])


def long_prompts(layers: list[Layer], configs: Iterable[ExpertConfig | RowConfig]) -> list[tuple[str, str]]:
    """Return the times of configurations, and the relative difference of their results from those of the first."""
    rows: list[tuple[str, str]] = []
    wanted: torch.Tensor | None = None
    for config in configs:
        layers[0].inner.fill_(torch.nan)
        layers[0].results.fill_(torch.nan)
        times = measure(layers, config)
        found = layers[0].results.float()
        wanted = found if wanted is None else wanted
        error = float((found - wanted).norm() / wanted.norm())
        speed = layers[0].tflops(times["gate_up"] + times["down"])
        texts = [f"{name} {time:.1f}" for name, time in times.items()]
        rows.append(("  ".join([*texts, f"tflops {speed:.0f}", f"difference {error:.1e}"]), repr(config)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 256, 2048])
    parser.add_argument("--layers", type=int, default=4, help="in a graph, with weights of their own")
    parser.add_argument("--sweep", choices=("route", "gate_up", "down", "block", "tail"), help="try candidates")
    parser.add_argument("--long", action="store_true", help="measure the tails of configurations for long prompts")
    parser.add_argument("--one-row", action="store_true", help="with the kernels of one row; --tokens 1, bf16 or mxfp4")
    parser.add_argument("--most", type=int, default=200, help="candidates that are tried")
    parser.add_argument("--output", type=output_file)
    options = parser.parse_args()
    origin = provenance()
    rows: list[dict[str, Any]] = []
    for num_tokens in options.tokens:
        layers = [Layer(MODELS[options.model], num_tokens, options.format) for _ in range(options.layers)]
        config: ExpertConfig | RowConfig
        config = expert_config(num_tokens, layers[0].routing, fp4=options.format == "mxfp4")
        if options.one_row:
            sizes = layers[0].hidden.shape[1], layers[0].inner.shape[1]
            config = row_config(*sizes, fp4=options.format == "mxfp4")
        times = {name: round(time, 2) for name, time in measure(layers, config).items()}
        floor, chosen = layers[0].floor_us()
        row = {"tokens": num_tokens, "experts": chosen, "floor": round(floor, 2), **times, "config": repr(config)}
        row["of floor"] = round(times["all"] / floor, 2)
        row["tflops"] = round(layers[0].tflops(times["gate_up"] + times["down"]))
        if options.sweep is not None:
            best = sweep(layers, config, options.sweep, options.most)
            row["best"] = [(round(time, 2), repr(one)) for time, one in best[:5]]
        if options.long:
            plans = [expert_config(count, layers[0].routing, fp4=options.format == "mxfp4") for count in LONG_TOKENS]
            tails = [one for plan in dict.fromkeys(plans) for one in candidates(plan, "tail")]
            row["best"] = long_prompts(layers, tails)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "best"), flush=True)
        for time, one in row.get("best", ()):
            print(f"    {time}  {one}", flush=True)
        del layers
        torch.cuda.empty_cache()
    if options.output is not None:
        write_result(options.output, origin, {"model": options.model, "format": options.format, "rows": rows})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
