"""Finds how the products of few rows run fastest on this GPU: in the chain of all layers, where it counts.

    python benchmarks/sweep_products.py --model DIR --rows 8 16 --output sweep.json

DIR needs a config.json only. All layers of the model, with random weights and nothing in place of attention, are
captured as one graph for each configuration of one product at a time, the others at the best known so far. A
configuration that wins alone often loses here, where its first loads must find room beside the kernel before. The
result names the entries for `MEASURED` and `MEASURED_SILU` in kernels/triton/linear.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
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

MOST_SHARED, MOST_SHARED_ALONE = 110_000, 225_000
"""Bytes of shared memory of a program, so that two fit a multiprocessor; of one that has it to itself."""
NOISE = 0.003
"""A configuration that gains less than this share is not worth an entry."""

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
        self.ids = torch.arange(rows, device="cuda", dtype=torch.int32)
        self._rows = rows
        spec = llm.plan.model
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
                with applied(one, rows_class):
                    self.run()
        load_kernels(kernels)

    def milliseconds(self, settings: Settings, rows_class: int, replays: int) -> float:
        """The median replay."""
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream), applied(settings, rows_class):
            self.decoder.workspace.attention_TF.normal_()
            self.run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            self.run()
            graph.capture_end()
            for _ in range(3):
                graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            stream.synchronize()
        times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(events))
        return times[len(times) // 2]

    def run(self) -> None:
        hidden = self.decoder.forward(self.ids, lambda index, projection, out: None)
        self.decoder.logits(hidden, None, self._rows)


@contextmanager
def applied(settings: Settings, rows_class: int) -> Iterator[None]:
    """Has `linear` choose these."""
    tables = {"product": linear.MEASURED, "silu": linear.MEASURED_SILU}
    before = {kind: dict(table) for kind, table in tables.items()}
    for (kind, shape), config in settings.items():
        tables[kind][rows_class, *shape] = config
    linear.choose.cache_clear()
    linear.choose_silu.cache_clear()
    try:
        yield
    finally:
        for kind, table in tables.items():
            table.clear()
            table.update(before[kind])
        linear.choose.cache_clear()
        linear.choose_silu.cache_clear()


def candidates(rows: int, shape: Shape, *, silu: bool) -> list[LinearConfig | None]:
    """What is worth a try; `rows` is a class. None: by torch, or the activation as a kernel of its own."""
    outputs, inputs = shape
    found: list[LinearConfig | None] = [None]
    most_shared = MOST_SHARED
    tiles = [(16, 256, 1), (16, 512, 1), (16, 512, 2), (32, 128, 1), (32, 128, 2), (32, 256, 2), (32, 256, 4)]
    tiles += [(32, 512, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 8)]
    if rows >= 64:
        # A tile of so many rows may leave no room for a second program.
        most_shared = MOST_SHARED_ALONE
        tiles = [(64, 128, 4), (128, 64, 8), (256, 64, 8)]
        if rows == 64:
            tiles += [(64, 64, 4), (128, 64, 4), (128, 128, 8)]
    splittings = (1,) if silu else (1, 2, 3, 4, 6, 8)
    for (block_n, block_k, warps), splits in itertools.product(tiles, splittings):
        steps, programs = -(-inputs // block_k), -(-outputs // block_n) * splits
        # Sums of a tile in registers, 128 of a thread at most.
        if block_n * (1 + silu) * rows > 128 * 32 * warps:
            continue
        too_few, too_many = programs * (1 + silu) < 100, splits > 1 and programs > 800
        if block_k > inputs or splits > steps or too_few or too_many:
            continue
        for stages, prefetch in ((3, 512), (4, 512), (5, 256), (4, 0)):
            config = LinearConfig(rows, block_n, block_k, splits, warps, stages, prefetch)
            if config.shared_bytes(silu=silu) <= most_shared and stages <= max(3, steps // splits + 1):
                found.append(config)
    return found


def sweep(model: str, rows: int, seconds: float, replays: int) -> dict[str, Any]:
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
    start = now = chain.milliseconds(best, rows_class, replays)
    rounds: list[dict[str, Any]] = []
    for name, key, configs in trials:
        end = time.monotonic() + seconds / len(trials)
        times: list[tuple[float, int]] = []
        for index, config in enumerate(configs):
            if time.monotonic() > end:
                break
            try:
                times.append((chain.milliseconds({**best, key: config}, rows_class, max(5, replays // 3)), index))
            except Exception as error:  # one that a device has no room for must not end the others
                print(f"{name} {config}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        times.sort()
        if times and times[0][0] < now * (1 - NOISE):
            again = chain.milliseconds({**best, key: configs[times[0][1]]}, rows_class, replays)
            if again < now * (1 - NOISE):
                best[key], now = configs[times[0][1]], again
        top = [{"ms": round(ms, 4), "config": repr(configs[index])} for ms, index in times[:6]]
        rounds.append(
            {"product": name, "shape": key[1], "tried": len(times), "of": len(configs), "ms": now, "top": top}
        )
        print(f"{rows} rows, {name} {key[1]}: {now:.4f} ms after {len(times)} of {len(configs)}", flush=True)
    entries = {f"{kind} {(rows_class, *shape)}": repr(config) for (kind, shape), config in best.items()}
    return {"rows": rows, "before_ms": round(start, 4), "after_ms": round(now, 4), "entries": entries, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=60, help="for each number of rows, compilation apart")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    origin = provenance()
    results = [sweep(arguments.model, rows, arguments.seconds, arguments.replays) for rows in arguments.rows]
    if arguments.output is not None:
        write_result(arguments.output, origin, {"model": Path(arguments.model).name, "sweeps": results})
    print(json.dumps([{key: one[key] for key in ("rows", "before_ms", "after_ms", "entries")} for one in results]))


if __name__ == "__main__":
    main()
