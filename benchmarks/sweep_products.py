"""Finds how the products of few rows run fastest on this GPU: in the chain of all layers, where it counts.

    python benchmarks/sweep_products.py --model DIR --rows 8 16 --output sweep.json

DIR needs a config.json only. Some layers of the model, with random weights and nothing in place of attention, are
captured as one graph for each configuration of one product at a time, the others at the best known so far. A
configuration that wins alone often loses here, where its first loads must find room beside the kernel before. Two that
differ by a few percent must be compared at the clock that each brings about: a GPU at its power limit slows down some
tens of milliseconds later. So all configurations first run in turn, at one clock, and the best of them then for
long enough each, there and back, since the last ones run on a warmer chip. The result names the entries for `MEASURED`
and `MEASURED_SILU` in kernels/triton/linear.py, and times the products that run in one launch (`span`) beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phonograph.engine.llm import LLM
from phonograph.evaluation.record import provenance, write_result
from phonograph.kernels.triton import linear
from phonograph.kernels.triton.linear import LinearConfig
from phonograph.kernels.triton.precompile import compile_only
from phonograph.kernels.triton.preload import load_kernels
from phonograph.models import fused

SHARED = 229_000, 113_000
"""Bytes of shared memory of a program that has a multiprocessor to itself, and of one of two."""
NOISE = 0.003
"""A configuration that gains less than this share is not worth an entry."""
FINALISTS = 5
"""Configurations of a product that run at their own clock."""

Shape = tuple[int, int]
Settings = dict[tuple[str, Shape], LinearConfig | None]
"""By ("product" or "silu", (outputs, inputs))."""


class Chain:
    """The decoder of a model, captured for one number of rows at a time."""

    def __init__(self, model: str, rows: int) -> None:
        llm = LLM(
            model=model,
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            cudagraph_mode="NONE",
            num_kv_blocks=64,
            max_num_seqs=rows,
            max_num_batched_tokens=256,
            max_model_len=512,
        )
        self.decoder = llm.engine.core.runner._program.model
        self.stream = torch.cuda.Stream()
        with torch.inference_mode():
            self.decoder.workspace.attention_TF.normal_()
        self.ids = torch.arange(rows, device="cuda", dtype=torch.int32)
        self._rows = rows
        spec = llm.plan.model
        self.num_layers = spec.num_layers
        heads = spec.num_query_heads * spec.head_size
        self.shapes = {
            "qkv": (heads + 2 * spec.num_kv_heads * spec.head_size, spec.hidden_size),
            "output": (spec.hidden_size, heads),
            "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
            "down": (spec.hidden_size, spec.intermediate_size),
        }
        if rows >= 64:
            self.shapes["head"] = (spec.vocab_size, spec.hidden_size)
        self.silu_shape = spec.intermediate_size, spec.hidden_size

    def compile(self, settings: list[Settings], rows_class: int) -> None:
        with torch.inference_mode(), compile_only() as kernels:
            for one in settings:
                with applied(one, rows_class), self.decoder.only_layers(range(1)):
                    self.run()
        load_kernels(kernels)

    def graph(self, settings: Settings, rows_class: int, layers: int, *, span: bool = False) -> torch.cuda.CUDAGraph:
        with (
            torch.inference_mode(),
            torch.cuda.stream(self.stream),
            applied(settings, rows_class, span=span),
            self.decoder.only_layers(range(layers)),
        ):
            self.run()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            self.run()
            graph.capture_end()
        return graph

    def in_turn(self, graphs: list[torch.cuda.CUDAGraph], replays: int) -> list[float]:
        """Milliseconds of each, the median, all at the clock that they bring about together."""
        times: list[list[float]] = [[] for _ in graphs]
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                every = [[torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)] for _ in graphs]
                for graph, events in zip(graphs, every, strict=True):
                    for event in events:
                        event.record()
                        graph.replay()
                self.stream.synchronize()
                for own, events in zip(times, every, strict=True):
                    own += [one.elapsed_time(other) for one, other in itertools.pairwise(events)][1:]
        return [sorted(own)[len(own) // 2] for own in times]

    def sustained(self, graphs: list[torch.cuda.CUDAGraph], seconds: float) -> list[float]:
        """Milliseconds of each at its own clock: half of `seconds` in this order, half in the other."""
        one_replay = max(0.05, min(self.in_turn(graphs, 2)))
        count = max(4, round(seconds * 500 / one_replay))
        totals = [0.0] * len(graphs)
        with torch.cuda.stream(self.stream):
            for order in (range(len(graphs)), reversed(range(len(graphs)))):
                events = []
                for index in order:
                    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    for replay in range(count):
                        if replay == count * 4 // 10:
                            first.record()
                        graphs[index].replay()
                    last.record()
                    events.append((index, first, last))
                self.stream.synchronize()
                for index, first, last in events:
                    totals[index] += first.elapsed_time(last) / (count - count * 4 // 10) / 2
        return totals

    def run(self) -> None:
        hidden = self.decoder.forward(self.ids, lambda index, projection, out: None)
        self.decoder.logits(hidden, None, self._rows)


@contextmanager
def applied(settings: Settings, rows_class: int, *, span: bool = False) -> Iterator[None]:
    """Has `linear` choose these, and, without `span`, all products be launches of their own."""
    tables = {"product": linear.MEASURED, "silu": linear.MEASURED_SILU}
    before = {kind: dict(table) for kind, table in tables.items()}
    choose_span = fused.choose_span
    if not span:
        fused.choose_span = lambda *_: None
    for (kind, shape), config in settings.items():
        tables[kind][rows_class, *shape] = config
    linear.choose.cache_clear()
    linear.choose_silu.cache_clear()
    try:
        yield
    finally:
        fused.choose_span = choose_span
        for kind, table in tables.items():
            table.clear()
            table.update(before[kind])
        linear.choose.cache_clear()
        linear.choose_silu.cache_clear()


def candidates(rows: int, shape: Shape, *, silu: bool) -> list[LinearConfig | None]:
    """What is worth a try; `rows` is a class. None: by torch, or the activation as a kernel of its own.

    As many steps under way as there is room for, of programs that have a multiprocessor to themselves or share it in
    twos; inputs split so that there are as many programs as places, or half.
    """
    outputs, inputs = shape
    found: list[LinearConfig | None] = [None]
    blocks = [(64, 64), (64, 128), (128, 64), (128, 128)] if rows > 16 else [(32, 128), (32, 256), (64, 128), (64, 256)]
    rows_tiles = [rows] if rows <= 32 else [one for one in (32, 64, 128) if one <= rows <= 4 * one]
    for rows_tile, (block_n, block_k), room in itertools.product(rows_tiles, blocks, SHARED):
        sums = block_n * (1 + silu) * rows_tile
        warps = 8 if sums > 64 * 128 else 4 if block_n > 32 or rows > 16 else 2
        stages = min(6, room // LinearConfig(rows_tile, block_n, block_k, 1, warps, 1, 0).shared_bytes(silu=silu))
        tiles = -(-outputs // block_n) * -(-rows // rows_tile)
        if stages < 3 or sums > 128 * 32 * warps or (silu and tiles < 100):
            continue
        steps, places = -(-inputs // block_k), linear.PROGRAMS // (1 + (room == SHARED[0])) + 8
        for splits in {1} if silu else {max(1, min(8, count // tiles, steps // 2)) for count in (places, places // 2)}:
            if tiles * splits >= 80:
                found.append(LinearConfig(rows_tile, block_n, block_k, splits, warps, stages, min(512, 2 * block_k)))
    return list(dict.fromkeys(found))


def sweep(model: str, rows: int, seconds: float, layers: int) -> dict[str, Any]:
    """One number of rows: the products in the order of the chain, then the activation."""
    chain, rows_class = Chain(model, rows), linear.rows_class(rows)
    trials = [
        (name, ("product", shape), candidates(rows_class, shape, silu=False)) for name, shape in chain.shapes.items()
    ]
    trials.append(("activation", ("silu", chain.silu_shape), candidates(rows_class, chain.silu_shape, silu=True)))
    longest = max(len(configs) for _, _, configs in trials)
    chain.compile(
        [{key: configs[index % len(configs)] for _, key, configs in trials[:-1]} for index in range(longest)]
        + [{trials[-1][1]: config} for config in trials[-1][2]],
        rows_class,
    )
    best: Settings = {}
    rounds: list[dict[str, Any]] = []
    for name, key, configs in trials:
        graphs: list[torch.cuda.CUDAGraph] = []
        ran: list[LinearConfig | None] = []
        for config in configs:
            try:
                graphs.append(chain.graph({**best, key: config}, rows_class, layers))
                ran.append(config)
            except Exception as error:  # one that a device has no room for must not end the others
                print(f"{name} {config}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        first = chain.in_turn(graphs, 4)
        order = sorted(range(len(graphs)), key=first.__getitem__)[:FINALISTS]
        finalists = [graphs[index] for index in order]
        now, *times = chain.sustained([chain.graph(best, rows_class, layers), *finalists], seconds)
        ranked = sorted(zip(times, (ran[index] for index in order), strict=True), key=lambda one: one[0])
        fastest, config = ranked[0]
        if fastest < now * (1 - NOISE):
            best[key] = config
        top = [{"ms": round(ms, 4), "config": repr(one)} for ms, one in ranked]
        rounds.append({"product": name, "shape": key[1], "tried": len(ran), "of": len(configs), "ms": now, "top": top})
        print(f"{rows} rows, {name} {key[1]}: {now:.4f} ms, {fastest:.4f} of {len(ran)}", flush=True)
    chains: dict[str, Settings] = {"before": {}, "after": best}
    for kind, shape in best:
        chains[f"without {kind} {shape}"] = {key: one for key, one in best.items() if key != (kind, shape)}
    whole = [chain.graph(settings, rows_class, chain.num_layers) for settings in chains.values()]
    whole.append(chain.graph({}, rows_class, chain.num_layers, span=True))
    ms = dict(zip([*chains, "span"], (round(one, 4) for one in chain.sustained(whole, 2 * seconds)), strict=True))
    entries = {f"{kind} {(rows_class, *shape)}": repr(config) for (kind, shape), config in best.items()}
    return {"rows": rows, "ms": ms, "entries": entries, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.2, help="that each finalist runs")
    parser.add_argument("--layers", type=int, default=10, help="in the graphs that are compared")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    origin = provenance()
    results = [sweep(arguments.model, rows, arguments.seconds, arguments.layers) for rows in arguments.rows]
    if arguments.output is not None:
        write_result(arguments.output, origin, {"model": Path(arguments.model).name, "sweeps": results})
    print(json.dumps([{key: one[key] for key in ("rows", "ms", "entries")} for one in results]))


if __name__ == "__main__":
    main()
