"""Finds how the products between two attention launches run fastest in one launch, in the chain of all layers.

    python benchmarks/sweep_span.py --model DIR --rows 8 16 --output sweep.json
    python benchmarks/sweep_span.py --model DIR --rows 8 16 32 --kind streamed

The first holds weights in registers (`span`, for small models), the second has them on their way all the time
(`stream`, for large ones, on Hopper). DIR needs a config.json only. As in sweep_products.py, all layers with random
weights and nothing in place of attention are captured as one graph: with a launch for each product, then with one a
layer, one choice varied at a time, the others at the best known so far. Every configuration's rows are compared with
those of launches apart. The best of them then run in an engine, behind attention, where their first weights may come
sooner: the one that wins there is an entry for `MEASURED` in kernels/triton/span_plan.py.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sweep_products import NOISE, Chain

from phonograph.engine.llm import LLM
from phonograph.evaluation.bench_cases import DecodeCase
from phonograph.evaluation.bench_engine import bench_decode
from phonograph.evaluation.record import provenance, write_result
from phonograph.kernels.triton.linear import MAX_PARTIALS
from phonograph.kernels.triton.precompile import compile_only
from phonograph.kernels.triton.preload import load_kernels
from phonograph.kernels.triton.span_plan import (
    MEASURED,
    STREAM_TILE,
    ProductConfig,
    SpanConfig,
    SpanSizes,
    StreamConfig,
    make_stream_plan,
    product_shapes,
    span_class,
)
from phonograph.models.spec import read_model_spec

WRONG = 0.1
"""Share by which the rows after all layers may differ from those of products apart.

Random weights carry on what is rounded elsewhere: after 32 layers 0.02 to 0.03, with wrong rows more than 1."""

MOST_SHARED = 222_000
"""Bytes that the rings of `stream` may take; some more are for its barriers and exchanges."""

Config = SpanConfig | StreamConfig
Variation = Callable[[Any], list[Any]]


@contextmanager
def applied(rows_class: int, sizes: SpanSizes, config: Config | None) -> Iterator[None]:
    """Has the decoder run so; None: with a launch for each product."""
    before = dict(MEASURED)
    MEASURED.clear()
    if config is not None:
        MEASURED[rows_class, sizes] = config
    try:
        yield
    finally:
        MEASURED.clear()
        MEASURED.update(before)


def start(rows_class: int, sizes: SpanSizes, kind: str) -> Config:
    """Held: eight outputs a tile, which gives a processor its share of a hidden size of 1024."""
    rows = max(8, rows_class)
    if kind == "streamed":
        block_k = 128 if rows <= 32 else 64
        return streamed(StreamConfig(rows, block_k, 1, max(4, min(12, 512 // rows)), (1, 1, 1, 1)), sizes)
    long, short = ProductConfig(8, 1024, 4), ProductConfig(8, 1024, 2 if rows == 8 else 1)
    return SpanConfig(rows, 8, 64, 128, long, short, long, ProductConfig(32, 1024, 1))


def _with_warps(config: SpanConfig, num_warps: int) -> SpanConfig:
    """The same work of a program, dealt to other warps; as many bytes on their way where registers allow."""
    before, ahead = (min(128, value * config.num_warps // num_warps) for value in (config.before, config.ahead))
    products = []
    for product in config[-4:]:
        sums = max(1, product.sums * config.num_warps // num_warps)
        products.append(product._replace(sums=sums, block_k=max(product.block_k, 32 * num_warps * sums)))
    return SpanConfig(config.rows, num_warps, before, ahead, *products)


def streamed(config: StreamConfig, sizes: SpanSizes, **changes: Any) -> StreamConfig:
    """With as much of the weights on its way as fits, and each product in about as many units as there are processors
    unless `changes` say otherwise."""
    config = config._replace(**changes)
    room = MOST_SHARED - config._replace(weight_stages=0).shared_bytes
    config = config._replace(weight_stages=room // (2 * config.block_k * STREAM_TILE))
    if "splits" in changes:
        return config
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits: list[int] = []
    for outputs, inputs in product_shapes(sizes, last=False):
        most = min(max(1, processors // -(-outputs // STREAM_TILE)), config.rows, -(-inputs // config.block_k))
        splits.append(1 << (most.bit_length() - 1))
    return config._replace(splits=tuple(splits))


def stream_variations(sizes: SpanSizes) -> dict[str, Variation]:
    """As `variations`, of `stream`."""

    def fits(config: StreamConfig) -> bool:
        counts = [-(-inputs // config.block_k) for _, inputs in product_shapes(sizes, last=False)]
        split = all(1 <= count <= min(most, config.rows) for count, most in zip(config.splits, counts, strict=True))
        if config.weight_stages < 3 or not split:
            return False
        return make_stream_plan(sizes, config, last=False).num_partials <= MAX_PARTIALS

    def steps(config: StreamConfig) -> list[StreamConfig]:
        found = (streamed(config, sizes, block_k=block_k) for block_k in (64, 128, 256))
        return [one for one in found if fits(one)]

    def rows(config: StreamConfig) -> list[StreamConfig]:
        found = (streamed(config, sizes, row_stages=count, splits=config.splits) for count in (2, 3, 4, 6, 8, 12, 16))
        return [one for one in found if fits(one)]

    def splits(config: StreamConfig) -> list[StreamConfig]:
        found: list[StreamConfig] = []
        for product in range(4):
            for count in (config.splits[product] // 2, 2 * config.splits[product]):
                changed = (*config.splits[:product], count, *config.splits[product + 1 :])
                found.append(config._replace(splits=changed))
        return [one for one in found if fits(one)]

    return {
        "steps": steps, "rows": rows, "splits": splits, "splits again": splits, "splits once more": splits,
        "rows again": rows,
    }  # fmt: skip


def variations() -> dict[str, Variation]:
    """By what they vary, in the order in which they are tried."""

    def order(config: SpanConfig) -> list[SpanConfig]:
        choices = itertools.product((32, 64, 96, 128), (64, 96, 128))
        return [config._replace(before=before, ahead=ahead) for before, ahead in choices]

    def one(name: str, choices: list[tuple[int, int, int]]) -> Variation:
        def vary(config: SpanConfig) -> list[SpanConfig]:
            return [config._replace(**{name: ProductConfig(*choice)}) for choice in choices]

        return vary

    def warps(config: SpanConfig) -> list[SpanConfig]:
        return [_with_warps(config, num_warps) for num_warps in (4, 16)]

    return {
        "order": order,
        "gate_up": one("gate_up", [(8, 1024, 1), (8, 1024, 2), (8, 1024, 4), (8, 512, 2), (16, 1024, 1)]),
        "qkv": one("qkv", [(32, 512, 1), (16, 1024, 1), (16, 1024, 2), (8, 1024, 4)]),
        "output": one("output", [(8, 1024, 2), (8, 512, 2), (8, 2048, 4), (8, 2048, 8)]),
        "down": one("down", [(8, 1024, 2), (8, 512, 2), (8, 512, 1)]),
        "warps": warps,
        "order again": order,
    }


class Trial:
    """A chain and the time and rows that configurations of it have."""

    def __init__(self, model: str, rows: int, replays: int, kind: str) -> None:
        self.rows_class, self.replays = span_class(rows), replays
        spec = read_model_spec(Path(model))
        heads, kv_heads = (count * spec.head_size for count in (spec.num_query_heads, spec.num_kv_heads))
        self.sizes = SpanSizes(heads, spec.hidden_size, spec.intermediate_size, heads + 2 * kv_heads)
        # A decoder lists the weights of launches only if it may choose one.
        with applied(self.rows_class, self.sizes, start(self.rows_class, self.sizes, kind)):
            self.chain = Chain(model, rows)
        self.compile([None])
        self.wanted: torch.Tensor | None = None

    def compile(self, configs: list[Config | None]) -> None:
        with torch.inference_mode(), compile_only() as kernels:
            for config in configs:
                with applied(self.rows_class, self.sizes, config):
                    self.chain.run()
        load_kernels(kernels)

    def milliseconds(self, config: Config | None) -> float:
        """Raises ValueError where the rows are wrong."""
        with applied(self.rows_class, self.sizes, config):
            graph = self.chain.graph({}, self.rows_class, self.chain.num_layers, span=True)
            (time_of_one,) = self.chain.in_turn([graph], self.replays)
            with torch.inference_mode():
                self.chain.decoder.workspace.attention_TF.copy_(self._attended())
                hidden = self.chain.decoder.forward(self.chain.ids, lambda index, projection, out: None)
                rows = hidden.float().clone()
        if self.wanted is None:
            self.wanted = rows
        error = float((rows - self.wanted).norm() / self.wanted.norm())
        if not error <= WRONG:
            raise ValueError(f"rows differ by {error:.3g}")
        return time_of_one

    def _attended(self) -> torch.Tensor:
        shape = self.chain.decoder.workspace.attention_TF.shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def in_step(model: str, rows: int, context: int, sizes: SpanSizes, config: Config | None) -> float:
    """Milliseconds between tokens of an engine."""
    gc.collect()
    torch.cuda.empty_cache()
    with applied(span_class(rows), sizes, config):
        llm = LLM(
            model=model,
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=rows,
            max_model_len=2 * context,
            max_cudagraph_capture_size=rows,
            gpu_memory_utilization=0.6,
        )
        (row,) = bench_decode(llm, [DecodeCase(rows, context)], lambda *_: None)
    return row.facts["itl_ms"]


def sweep(
    model: str, rows: int, kind: str, seconds: float, replays: int, finalists: int, context: int
) -> dict[str, Any]:
    trial = Trial(model, rows, replays, kind)
    apart = trial.milliseconds(None)
    best = start(trial.rows_class, trial.sizes, kind)
    trial.compile([best])
    now = trial.milliseconds(best)
    print(f"{rows} rows: {apart:.4f} ms apart, {now:.4f} ms with {best}", flush=True)
    end, rounds, known = time.monotonic() + seconds, [], {best: now}
    for name, vary in (variations() if kind == "held" else stream_variations(trial.sizes)).items():
        if time.monotonic() > end:
            print(f"{rows} rows: no time left for {name}", flush=True)
            break
        configs = [config for config in dict.fromkeys(vary(best)) if config not in known]
        try:
            trial.compile(list(configs))
        except Exception as error:  # which one it is shows below
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        for config in configs:
            try:
                known[config] = trial.milliseconds(config)
            except Exception as error:  # one that a device has no room for must not end the others
                print(f"{name} {config}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                continue
            ms = known[config]
            print(f"    {ms:.4f} ms, {ms * 1000 / trial.chain.num_layers:.2f} us a layer: {config}", flush=True)
            rounds.append({"varied": name, "ms": round(ms, 4), "config": repr(config)})
        fastest = min(known, key=lambda config: known[config])
        if known[fastest] < now * (1 - NOISE):
            best, now = fastest, known[fastest]
        print(f"{rows} rows, {name}: {now:.4f} ms", flush=True)
    steps: list[dict[str, Any]] = []
    sizes, rows_class = trial.sizes, trial.rows_class
    del trial
    for config in (None, *sorted(known, key=lambda config: known[config])[:finalists]) if finalists else ():
        ms = in_step(model, rows, context, sizes, config)
        print(f"{rows} rows of {context}, a step of the engine: {ms:.4f} ms with {config}", flush=True)
        steps.append({"ms": ms, "config": repr(config)})
    entry = f"({rows_class}, {sizes}): {best}"
    result = {"rows": rows, "apart_ms": round(apart, 4), "span_ms": round(now, 4), "entry": entry}
    return {**result, "steps": steps, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--kind", choices=("held", "streamed"), default="held", help="of weights")
    parser.add_argument("--seconds", type=float, default=240, help="for each number of rows, compilation included")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--finalists", type=int, default=3, help="configurations that run in an engine at the end")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence there")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    origin = provenance()
    results = [
        sweep(
            arguments.model,
            rows,
            arguments.kind,
            arguments.seconds,
            arguments.replays,
            arguments.finalists,
            arguments.context,
        )
        for rows in arguments.rows
    ]
    if arguments.output is not None:
        write_result(arguments.output, origin, {"model": Path(arguments.model).name, "sweeps": results})
    print(json.dumps([{key: one[key] for key in ("rows", "apart_ms", "span_ms", "entry", "steps")} for one in results]))


if __name__ == "__main__":
    main()
