"""Finds how the products of few rows run fastest on this GPU: in the chain of all layers, where it counts.

    python benchmarks/sweep_products.py --model DIR --rows 8 16 --output sweep.json

DIR needs a config.json only. Some layers of the model, with random weights and sequences of one length (`--context`),
are captured as one graph for each configuration of one product at a time, the others at the best known so far. A
configuration that wins alone often loses here, where its first loads must find room beside the kernel before, and one
that wins without attention may lose behind it, which leaves a multiprocessor's memory divided as it needs it. Two that
differ by a few percent must be compared at the clock that each brings about: a GPU at its power limit slows down some
tens of milliseconds later. So all configurations first run in turn, at one clock, and the best of them then for
long enough each, there and back, since the last ones run on a warmer chip. 2 to 16 rows have two searches: large
products through registers need the L1 cache (`gemm_small_m`) and do not mix with those through shared memory, so each
kind is tried with the others of its kind. One product at a time is blind to what only pays together; rings
(`gemm_ring`) were found by trying whole sets. The result names the entries for `EXCEPTIONS` in
kernels/triton/gemm/choose.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.result_files import output_file, write_result
from phonograph.bench.records.record import provenance
from phonograph.engine.llm import LLM
from phonograph.kernels.triton.attention.decode import decode_attention
from phonograph.kernels.triton.attention.decode_plan import make_decode_plan, plan_decode
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.kernels.triton.gemm.choose import EXCEPTIONS, ExceptionKey, choose
from phonograph.kernels.triton.gemm.choose_grouped import integer_stages, is_supported
from phonograph.kernels.triton.gemm.product_plan import (
    PROCESSORS,
    PROGRAMS,
    RING_BYTES,
    GemmDevice,
    GemmGroupedSmallMConfig,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    GemvConfig,
    GemvIntegerConfig,
    KernelConfig,
    ProductPlan,
    ProductShape,
    WeightFormat,
    rows_class,
    step_bytes,
)
from phonograph.kernels.triton.launch.precompile import compile_only
from phonograph.models.layers.kernel_set import KVTarget

SHARED = 229_000, 113_000
"""Bytes of shared memory of a program that has a multiprocessor to itself, and of one of two."""
NOISE = 0.003
"""A configuration that gains less than this share is not worth an entry."""
FINALISTS = 5
"""Configurations of a product that run at their own clock."""
BLOCK = 64
"""Tokens of a KV block."""

Settings = dict[ProductShape, KernelConfig | None]
"""Kernels by the sizes of products; None: torch, or the activation as a kernel of its own."""


class Weights(NamedTuple):
    """Format of the matrices that configurations are for, and the GPU."""

    format: WeightFormat
    device: GemmDevice

    def chosen(self, shape: ProductShape, rows: int) -> KernelConfig | None:
        plan = choose(shape, self.format, rows, self.device)
        return None if plan.gates_apart else plan.kernel

    def has_fp8_rows(self, shape: ProductShape, rows: int) -> bool:
        return choose(shape, self.format, rows, self.device).fp8_rows


def this_gpu() -> GemmDevice:
    """Return the GPU in use; without one an H200, of which a script reads the rules."""
    return GemmDevice.with_capability(torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0))


class Chain:
    """The decoder of a model, captured for one number of rows: of sequences of `context` tokens."""

    def __init__(self, model: str, rows: int, context: int) -> None:
        llm = LLM(
            model=model,
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            cudagraph_mode="NONE",
            num_kv_blocks=64,
            max_num_seqs=rows,
            max_num_batched_tokens=max(256, rows),
            max_model_len=512,
        )
        self.model = llm.engine.core.runner._program.model
        self.stream = torch.cuda.Stream()
        device = torch.device("cuda")
        self.ids = torch.arange(rows, device=device, dtype=torch.int32)
        self._spec = spec = llm.plan.model
        blocks = -(-context // BLOCK)
        shape = (2, rows * blocks, BLOCK, spec.layers[0].attention.num_kv_heads, spec.layers[0].attention.head_size)
        self._caches = [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(spec.num_layers)
        ]
        self._table = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._lens = torch.full((rows,), context, dtype=torch.int32, device=device)
        # Every row's last token, at a position that the model has angles for.
        position = min(context, llm.plan.limits.max_model_len) - 1
        self._positions = torch.full((rows,), position, dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, dtype=torch.int64, device=device) * (blocks * BLOCK) + context - 1
        self._plan = make_decode_plan(
            num_query_heads=spec.layers[0].attention.num_query_heads,
            num_kv_heads=spec.layers[0].attention.num_kv_heads,
            head_size=spec.layers[0].attention.head_size,
            max_num_seqs=rows,
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
            device=device,
        )
        torch.cuda.synchronize()
        self.num_layers = spec.num_layers
        qkv, output, gate_up, down = spec.layers[0].matrices
        self.weights = Weights(output.weight_format("bfloat16"), this_gpu())
        if self.weights.format.bits and not is_supported(self.weights.format, output.num_inputs):
            raise SystemExit(f"--model {model}: there are no kernels for {self.weights.format}")
        self.shapes = {
            "qkv": qkv.shape,
            "output": output.shape,
            "gate_up": ProductShape(gate_up.num_outputs, gate_up.num_inputs),
            "down": down.shape,
        }
        if not self.weights.format.bits:
            self.shapes["head"] = spec.head.shape
        self.shapes["activation"] = gate_up.shape

    def __call__(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        raise NotImplementedError("the model's kernels write the cache themselves")

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        return KVTarget(self._caches[layer], self._slots[:num_tokens], None, None, clears_padding=True)

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        decode_attention(
            self._plan,
            q_THD,
            self._caches[layer],
            self._table,
            self._starts,
            self._lens,
            out_THD,
            None,
            scale=self._spec.layers[0].attention.head_size ** -0.5,
            window=(-1, -1),
            softcap=0.0,
            alibi_slopes=None,
            sinks=None,
            k_scale=None,
            v_scale=None,
            causal=True,
            max_query_len=1,
        )

    def compile(self, settings: list[Settings], rows: int) -> None:
        with torch.inference_mode(), compile_only():
            for one in settings:
                with applied(one, rows, self.weights), self.model.only_layers(range(1)):
                    self.run()

    def graph(self, settings: Settings, rows: int, layers: int) -> torch.cuda.CUDAGraph:
        with (
            torch.inference_mode(),
            torch.cuda.stream(self.stream),
            applied(settings, rows, self.weights),
            self.model.only_layers(range(layers)),
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
                    own.extend([one.elapsed_time(other) for one, other in itertools.pairwise(events)][1:])
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
        plan_decode(self._plan, self._starts, self._lens, max_query_len=1, window=(-1, -1))
        hidden = self.model.forward(self.ids, self._positions, self)
        self.model.logits(hidden)


@contextmanager
def applied(settings: Settings, rows: int, weights: Weights) -> Iterator[None]:
    """Have these chosen for a class of rows, also by products that exist and keep what was chosen."""
    before, plan = dict(EXCEPTIONS), BoundProduct.plan

    def chosen_again(product: BoundProduct, num_rows: int) -> ProductPlan:
        return product._plans.__wrapped__(rows_class(num_rows))

    for shape, config in settings.items():
        EXCEPTIONS[ExceptionKey(weights.format.bits, rows, shape)] = config, "tried"
    choose.cache_clear()
    BoundProduct.plan = chosen_again
    try:
        yield
    finally:
        BoundProduct.plan = plan
        EXCEPTIONS.clear()
        EXCEPTIONS.update(before)
        choose.cache_clear()


def of_one_row(shape: ProductShape) -> list[KernelConfig | None]:
    """Tiles of one row with 16 to 128 weights of a thread in a step."""
    found: list[KernelConfig | None] = []
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)):
        held = block_n * (1 + shape.gated) * block_k // (32 * warps)
        if 16 <= held <= 128 and block_k >= 256 * warps and block_k < 2 * shape.num_inputs:
            found.append(GemvConfig(block_n, block_k, warps))
    return found


def through_shared_memory(rows: int, shape: ProductShape, device: GemmDevice) -> list[KernelConfig | None]:
    """`rows` are those of a tile. None: by torch, or the activation as a kernel of its own.

    As many steps under way as there is room for, of programs that have a multiprocessor to themselves or share it in
    twos; inputs split so that there are as many programs as places, or half.
    """
    outputs, inputs, gated = shape
    found: list[KernelConfig | None] = [None]
    blocks = [(64, 64), (64, 128), (128, 64), (128, 128)] if rows > 16 else [(32, 128), (32, 256), (64, 128), (64, 256)]
    rows_tiles = [rows] if rows <= 32 else [one for one in (32, 64, 128) if one <= rows <= 4 * one]
    for rows_tile, (block_n, block_k), room in itertools.product(rows_tiles, blocks, SHARED):
        sums = block_n * (1 + gated) * rows_tile
        warps = 8 if sums > 64 * 128 else 4 if block_n > 32 or rows > 16 else 2
        stages = min(6, room // step_bytes(rows_tile, block_n, block_k, gated=gated))
        tiles = -(-outputs // block_n) * -(-rows // rows_tile)
        if stages < 3 or sums > 128 * 32 * warps or (gated and tiles < 100):
            continue
        steps, places = -(-inputs // block_k), PROGRAMS // (1 + (room == SHARED[0])) + 8
        for splits in {1} if gated else {max(1, min(8, count // tiles, steps // 2)) for count in (places, places // 2)}:
            if tiles * splits >= 80:
                found.append(GemmTiledConfig(rows_tile, block_n, block_k, splits, warps, stages, min(512, 2 * block_k)))
    # Of equal ones the last stays.
    return list(dict.fromkeys([*found, *rings(rows, shape, device)][::-1]))[::-1]


def rings(rows: int, shape: ProductShape, device: GemmDevice) -> list[GemmRingConfig]:
    """On Hopper: what fills a program's shared memory or half of it, with programs for all processors, half or twice
    as many, or without split inputs, some more than once. What large layers get comes last."""
    outputs, inputs, gated = shape
    found: list[GemmRingConfig] = []
    if not device.has_gluon or inputs % 8:
        return found
    rows_tiles = dict.fromkeys(min(rows, one) for one in (16, 32, 64, rows) if rows <= 4 * one)
    for lag, rows_tile, block_n, block_k, room in itertools.product(
        (1, 0), rows_tiles, (128, 64), (64, 128), (RING_BYTES // 2, RING_BYTES)
    ):
        tiles, steps = -(-outputs // block_n) * -(-rows // rows_tile), -(-inputs // block_k)
        if block_n * (1 + gated) * rows_tile > 1 << 15:
            continue
        for programs in (tiles, PROCESSORS // 2, 2 * PROCESSORS, PROCESSORS):
            splits = 1 if gated else max(1, min(programs // tiles, steps // 4, 8))
            stages = min(room // step_bytes(rows_tile, block_n, block_k, gated=gated), -(-steps // splits))
            if stages >= 2 and tiles * splits >= 16:
                found.append(GemmRingConfig(rows_tile, block_n, block_k, splits, stages, lag))
    return found


def through_registers(rows: int, shape: ProductShape, now: KernelConfig | None, most: int) -> list[KernelConfig | None]:
    """With 24 to 144 registers of a thread for weights and rows on their way, and a program for each processor: `most`
    of up to 500, drawn at random, and what is chosen `now`, which comes first."""
    outputs, inputs, gated = shape
    found: list[GemmSmallMConfig] = []
    for block_n, block_k, warps, sums in itertools.product((8, 16, 32), (256, 512, 1024, 2048), (4, 8, 16), (1, 2)):
        share = 32 * warps * sums
        exchanged = 4 * warps * block_n * (1 + gated) * rows
        if block_k % share or block_k > inputs or -(-outputs // block_n) < 120 or exchanged > 64 << 10:
            continue
        steps, each = -(-inputs // block_k), block_k // (32 * warps)
        for ahead, rows_ahead in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4)):
            held = block_n * (1 + gated) * each * ahead // 2, rows * each * rows_ahead // 2
            if rows_ahead > ahead or ahead > steps or not 24 <= held[0] <= 96 or held[1] > 64 or sum(held) > 144:
                continue
            kept = block_n * (1 + gated) * rows * sums // 32
            # Programs that leave a thread 128 registers, where it does with those.
            programs = 16 // warps if 24 + 1.25 * sum(held) + kept <= 128 else 0
            config = GemmSmallMConfig(rows, block_n, block_k, ahead, rows_ahead, warps, sums, programs)
            found += [config, config._replace(together=True)] if block_k > share else [config]
    if isinstance(now, GemmSmallMConfig):
        first = now
    else:
        usual = (8 if gated else 16, 512, 2, 8, 1)
        of_usual_size = (
            one for one in found if (one.block_n, one.block_k, one.ahead, one.num_warps, one.sums) == usual
        )
        first = next(of_usual_size, found[0])
    return list(dict.fromkeys([first, *random.Random(0).sample(found, min(most, len(found)))]))


def in_groups(rows: int, shape: ProductShape, weights: Weights, most: int) -> list[KernelConfig | None]:
    """Products of weights in groups: what is chosen now, `most` of all, drawn at random, and all rings.

    A kernel of few rows has 16 to 96 registers of a thread for weights on their way.
    """
    outputs, inputs, gated = shape
    (_, bits, group, _, interleaved), device, now = weights.format, weights.device, weights.chosen(shape, rows)
    if weights.has_fp8_rows(shape, rows):
        return list(dict.fromkeys([now, None, *light_rings(max(rows, 8), shape, 8)]))
    if rows == 1 and interleaved and device.has_gluon:
        return list(dict.fromkeys([now, *integer_rows(shape)]))
    rows, found = max(rows, 8), list[KernelConfig | None]()
    if rows <= 16 or (rows == 32 and not interleaved):
        columns = min(64 if bits == 8 else 128, group)
        for block_n, warps, each, ahead, rows_ahead in itertools.product(
            (16, 32), (2, 4, 8), (1, 2, 4), (1, 2, 3, 4, 6), (1, 2)
        ):
            units = warps * each
            registers = block_n * (1 + gated) * columns * bits // 1024 * each * ahead
            steps = -(-inputs // (columns * units))
            if 16 <= registers <= 96 and ahead <= steps and ahead % rows_ahead == 0:
                found.append(GemmGroupedSmallMConfig(rows, block_n, units, ahead, rows_ahead, warps))
    elif not interleaved:
        for block_n, rows_tile, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            tiles = -(-outputs // block_n) * -(-rows // rows_tile)
            if rows_tile > rows or stages * (256 * rows_tile + 128 * block_n) > SHARED[0]:
                continue
            for splits in {1} if gated else {max(1, min(8, programs // tiles)) for programs in (1, 132, 264)}:
                found.append(GemmTiledConfig(rows_tile, block_n, min(128, group), splits, warps, stages, 0))
    rings: list[KernelConfig] = []
    if interleaved and device.has_gluon:
        rings += few_rows_rings(shape) if rows == 8 else light_rings(rows, shape, 4)
    return list(dict.fromkeys([now, *random.Random(0).sample(found, min(most, len(found))), *rings]))


def light_rings(rows: int, shape: ProductShape, bits: int) -> list[GemmRingConfig]:
    """Rings of one, two or three programs of a multiprocessor, with inputs split over as many programs as places."""
    outputs, inputs, gated = shape
    found: list[GemmRingConfig] = []
    rows_tiles = [one for one in (8, 16, 32, 64, 128) if one <= rows <= (4 if one >= 64 else 2) * one]
    block_ks, lags = ((256, 128), (0, 1)) if bits == 8 else ((128, 64), (0,))
    for rows_tile, block_n, block_k, places in itertools.product(rows_tiles, (64, 128), block_ks, (1, 2, 3)):
        if block_n * (1 + gated) * rows_tile > 1 << 14:
            continue
        tiles, steps = -(-outputs // block_n) * -(-rows // rows_tile), -(-inputs // block_k)
        room = RING_BYTES // places // step_bytes(rows_tile, block_n, block_k, gated=gated, bits=bits)
        for programs in (132 * places, 132 * places // 2):
            splits = 1 if gated else max(1, min(programs // tiles, steps // 4, 8))
            stages = min(room, -(-steps // splits), 8)
            if stages >= 2:
                found += [GemmRingConfig(rows_tile, block_n, block_k, splits, stages, lag) for lag in lags]
    return list(dict.fromkeys(found))


def few_rows_rings(shape: ProductShape) -> list[GemmRingSmallMConfig]:
    """Rings of up to 8 rows with weights of 4 bits in groups of 128, two to six programs of a multiprocessor."""
    outputs, inputs, gated = shape
    tiles_and_warps = ((16, 4, 1, 2), (16, 4, 1, 4), (32, 2, 1, 2), (32, 2, 2, 2), (32, 4, 1, 2), (64, 2, 2, 2))
    found: list[GemmRingSmallMConfig] = []
    for (block_n, units, warps_n, warps_k), places in itertools.product(tiles_and_warps, (2, 3, 4, 5, 6)):
        tiles, steps = -(-outputs // block_n), -(-inputs // (128 * units))
        splits = 1 if gated else max(1, min(132 * places // tiles, steps // 4, 8))
        room = (224_000 // places - 6000) // step_bytes(8, block_n, 128 * units, gated=gated, bits=4)
        stages = min(room, -(-steps // splits), 8)
        if stages >= 2:
            found.append(GemmRingSmallMConfig(8, block_n, units, splits, stages, warps_n, warps_k))
    return list(dict.fromkeys(found))


def integer_rows(shape: ProductShape) -> list[GemvIntegerConfig]:
    """Tiles of one row with weights of 4 bits in groups of 128, two to seven programs of a multiprocessor."""
    (outputs, inputs, gated), found = shape, list[GemvIntegerConfig]()
    warps = (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2)
    for block_n, units, (warps_n, warps_k) in itertools.product((16, 32, 64), (1, 2, 4), warps):
        words = block_n * (1 + gated) * units // (2 * warps_n * warps_k)
        if units % warps_k or block_n % (16 * warps_n) or not 8 <= words <= 64:
            continue
        tiles, steps = -(-outputs // block_n), -(-inputs // (128 * units))
        for splits in (1,) if gated else range(1, 9):
            places, each = -(-tiles * splits // 132), -(-steps // splits)
            most = min(integer_stages(block_n, units, each, places, gated=gated), each, 8)
            if 2 <= places <= 7 and steps >= 2 * splits:
                found += [
                    GemvIntegerConfig(block_n, units, splits, stages, warps_n, warps_k)
                    for stages in (2, 3, 4, 6, 8)
                    if stages <= most
                ]
    return list(dict.fromkeys(found))


Trials = list[tuple[str, ProductShape, list[KernelConfig | None]]]
"""Name, sizes and configurations of each product."""


def search(
    chain: Chain, rows: int, trials: Trials, best: Settings, *, seconds: float, layers: int
) -> list[dict[str, Any]]:
    """Try the configurations of one product after another; the other products run with `best`, which is improved."""
    rounds: list[dict[str, Any]] = []
    for name, shape, configs in trials:
        graphs: list[torch.cuda.CUDAGraph] = []
        ran: list[KernelConfig | None] = []
        for config in configs:
            try:
                graphs.append(chain.graph({**best, shape: config}, rows, layers))
                ran.append(config)
            except Exception as error:  # a configuration that the device has no room for must not end the search
                print(f"{name} {config}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        first = chain.in_turn(graphs, 4)
        order = sorted(range(len(graphs)), key=first.__getitem__)[:FINALISTS]
        finalists = [graphs[index] for index in order]
        now, *times = chain.sustained([chain.graph(best, rows, layers), *finalists], seconds)
        ranked = sorted(zip(times, (ran[index] for index in order), strict=True), key=lambda one: one[0])
        fastest, config = ranked[0]
        if fastest < now * (1 - NOISE):
            best[shape] = config
        top = [{"ms": round(ms, 4), "config": repr(one)} for ms, one in ranked]
        rounds.append({"product": name, "shape": shape, "tried": len(ran), "of": len(configs), "ms": now, "top": top})
        print(f"{rows} rows, {name} {shape[:2]}: {now:.4f} ms, {fastest:.4f} of {len(ran)}", flush=True)
    return rounds


def sweep(model: str, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """One number of rows: the products in the order of the chain, then the activation."""
    chain = Chain(model, num_rows, options.context)
    weights, rows = chain.weights, rows_class(num_rows)
    # Most kernels pad one row to eight.
    tile_rows = max(8, rows)
    without_gate_up = {name: shape for name, shape in chain.shapes.items() if name != "gate_up"}
    bests: dict[str, Settings] = {"now": {}}
    kinds: dict[str, Trials] = {}
    if weights.format.bits:
        kinds["groups"] = [
            (name, shape, in_groups(rows, shape, weights, options.most)) for name, shape in without_gate_up.items()
        ]
        bests["groups"] = {}
    elif num_rows == 1:
        kinds["one row"] = [(name, shape, of_one_row(shape)) for name, shape in without_gate_up.items()]
        head = chain.shapes["head"]
        kinds["one row"].append(("head", head, through_shared_memory(tile_rows, head, weights.device)))
        bests["one row"] = {}
    else:
        kinds["shared memory"] = [
            (name, shape, through_shared_memory(tile_rows, shape, weights.device))
            for name, shape in chain.shapes.items()
        ]
        bests["shared memory"] = {}
    if 1 < num_rows <= 16 and not weights.format.bits:
        # What is chosen now may go through registers.
        bests["shared memory"] = {shape: configs[-1] for _, shape, configs in kinds["shared memory"]}
        kinds["registers"] = [
            (name, shape, through_registers(tile_rows, shape, weights.chosen(shape, rows), options.most))
            for name, shape in without_gate_up.items()
        ]
        bests["registers"] = {shape: configs[0] for _, shape, configs in kinds["registers"]}
    rounds: dict[str, list[dict[str, Any]]] = {}
    for kind, trials in kinds.items():
        longest = max(len(configs) for _, _, configs in trials)
        products = [trial for trial in trials if trial[0] != "activation"]
        activations = [{shape: config} for name, shape, configs in trials if name == "activation" for config in configs]
        base = bests[kind]
        chain.compile(
            [{**base, **{shape: own[index % len(own)] for _, shape, own in products}} for index in range(longest)]
            + [{**base, **one} for one in [{}, *activations]],
            rows,
        )
        found = search(chain, rows, trials, base, seconds=options.seconds, layers=options.layers)
        if kind == "registers":
            found += search(chain, rows, trials[::-1], base, seconds=options.seconds, layers=options.layers)
        rounds[kind] = found
    chains = dict(bests)
    for kind, optional in kinds.items():
        for name, shape, _ in optional:
            if shape in bests[kind]:
                chains[f"{kind} without {name}"] = {one: bests[kind][one] for one in bests[kind] if one != shape}
    whole = [chain.graph(settings, rows, chain.num_layers) for settings in chains.values()]
    ms = dict(zip(chains, (round(one, 4) for one in chain.sustained(whole, 2 * options.seconds)), strict=True))
    entries = {
        kind: {f"{rows} rows, {shape}": repr(config) for shape, config in best.items()}
        for kind, best in bests.items()
        if kind != "now"
    }
    return {"rows": num_rows, "context": options.context, "ms": ms, "entries": entries, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.2, help="that each finalist runs")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--most", type=int, default=60, help="configurations through registers of a product")
    parser.add_argument("--layers", type=int, default=10, help="in the graphs that are compared")
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    origin = provenance()
    results = [sweep(arguments.model, rows, arguments) for rows in arguments.rows]
    if arguments.output is not None:
        write_result(arguments.output, origin, {"model": Path(arguments.model).name, "sweeps": results})
    print(json.dumps([{key: one[key] for key in ("rows", "ms", "entries")} for one in results]))


if __name__ == "__main__":
    main()
