"""Times of an attention backend's kernels through its contract: builder, schedule, forward, inside a CUDA graph.

Keys and values rotate through copies that together exceed the L2 cache, as the layers of a model do. Each time comes
with its floor and with the error of a few rows against float32, so that a wrong kernel gets no time. On a CPU the calls
are timed without a graph.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.floor import attention_work, this_chip
from phonograph.attention.attention_spec import UNBOUNDED, AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import load
from phonograph.bench.records.results import BenchProgress, Row
from phonograph.core.limits import Limits
from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError, PhonographError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.runner.pools.kv_pool import allocate_kv_caches

Lengths = list[tuple[int, int]]
"""(query length, sequence length) of each sequence, decodes first."""


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths of a batch; `prefix_len` leading tokens are in blocks that all sequences share."""

    lengths: Lengths
    prefix_len: int = 0


_SEPARATE: dict[str, Lengths] = {
    "decode_1x1k": [(1, 1024)],
    "decode_1x8k": [(1, 8192)],
    "decode_1x32k": [(1, 32768)],
    "decode_1x128k": [(1, 131072)],
    "decode_8x1k": [(1, 1024)] * 8,
    "decode_8x8k": [(1, 8192)] * 8,
    "decode_8x32k": [(1, 32768)] * 8,
    "decode_32x2k": [(1, 2048)] * 32,
    "decode_64x2k": [(1, 2048)] * 64,
    "decode_128x1k": [(1, 1024)] * 128,
    "decode_256x1k": [(1, 1024)] * 256,
    "decode_skew": [(1, 65536)] + [(1, 512)] * 63,
    "spec4_32x2k": [(4, 2048)] * 32,
    "prefill_1x2k": [(2048, 2048)],
    "prefill_1x8k": [(8192, 8192)],
    "prefill_1x16k": [(16384, 16384)],
    "prefill_8x1k": [(1024, 1024)] * 8,
    "chunk_2k_of_32k": [(2048, 32768)],
    "mixed_64dec4k_1x2k": [(1, 4096)] * 64 + [(2048, 2048)],
    "mixed_1dec64k_1x5": [(1, 65536), (5, 5)],
    "mixed_8dec32k_1x512": [(1, 32768)] * 8 + [(512, 512)],
}
CASES = {
    **{name: Case(lengths) for name, lengths in _SEPARATE.items()},
    "shared_64x8k": Case([(1, 8192 + 256)] * 64, prefix_len=8192),
}
"""Cases of the published table."""

LONGEST_UNIFORM_QUERY = 16
"""Query length above which a batch of equal queries is a prefill, not a decode with speculation."""
CPU_OPERATIONS = 2e8
"""Operations above which a published case is left out on a CPU."""
MIN_COPIES, MIN_CALLS, REPLAYS = 2, 20, 5
LARGEST_ERROR = 0.02
"""Relative error that is allowed; rounding in bfloat16 gives a tenth of it."""

_SEQUENCE = re.compile(r"(?:(\d+)\*)?(\d+)@(\d+)")
_PREFIX = re.compile(r"[1-9]\d*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Tensors of one case. query [T, H, D] is a view of rows that also hold keys and values; kv_caches are equal."""

    common: CommonMetadata
    query: torch.Tensor
    out: torch.Tensor
    kv_caches: list[torch.Tensor]


def parse_case(text: str) -> Case:
    """Parse a case: its name, or count * query length @ sequence length as in "64*1@4096+2048@2048".

    In "64*1@8448^8192" the sequences share their first 8192 tokens.

    Raises:
        ConfigError: the text is neither.
    """
    if text in CASES:
        return CASES[text]
    sequences, shares, prefix = text.partition("^")
    lengths: Lengths = []
    for part in sequences.split("+"):
        match = _SEQUENCE.fullmatch(part)
        count, query, length = (int(group or 1) for group in match.groups()) if match else (0, 0, 0)
        if not (match and count and 1 <= query <= length):
            known = ", ".join(CASES)
            raise ConfigError("cases", text, f"must be a case such as 64*1@4096+2048@2048, or one of {known}")
        lengths += [(query, length)] * count
    longest = min(length - query for query, length in lengths)
    if shares and not (_PREFIX.fullmatch(prefix) and int(prefix) <= longest):
        problem = f"has no shared prefix of 1 to {longest} tokens, the context that all sequences have"
        raise ConfigError("cases", text, problem)
    return Case(sorted(lengths, key=lambda pair: pair[0] > 1), int(prefix) if shares else 0)


def default_cases(plan: EnginePlan) -> tuple[list[str], list[str]]:
    """Return the names of the published cases that this device runs in reasonable time, and a line for each other."""
    if plan.device.kind == "cuda":
        return list(CASES), []
    window = _window(plan.attention)
    work = {name: attention_work(plan.attention, case.lengths, window)[1] for name, case in CASES.items()}
    small = [name for name, operations in work.items() if operations <= CPU_OPERATIONS]
    return small, [f"{name} left out: too much for a CPU unless asked for" for name in CASES if name not in small]


def bench_attention(plan: EnginePlan, names: Sequence[str], progress: BenchProgress) -> Iterator[Row]:
    """Measure the microseconds of one layer's `forward` and of one step's `schedule`.

    A case that fails has its error in its row.

    Raises:
        ConfigError: a case does not exist.
        BackendError: the plan's backend is not installed.
    """
    cases = {name: parse_case(name) for name in names}
    load(plan.selection)
    origin = {"provider": plan.selection.capabilities.label, "page": plan.attention.block_size}
    for done, (name, case) in enumerate(cases.items()):
        progress("attention cases", done, len(cases))
        try:
            facts = _measure(plan, case)
        except Exception as error:  # the other cases still run
            lines = str(error).strip().splitlines()
            facts = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        yield Row(suite="attention", case=name, facts={**origin, **facts})


def _measure(plan: EnginePlan, case: Case) -> dict[str, Any]:
    on_gpu = plan.device.kind == "cuda"
    lengths, prefix_len = case.lengths, case.prefix_len // plan.attention.block_size * plan.attention.block_size
    device = torch.device(plan.device.kind)
    key = graph_key(lengths)
    spec = replace(plan.attention, speculative_tokens=max(0, key.query_len - 1))
    limits = Limits(
        max_num_seqs=max(plan.limits.max_num_seqs, len(lengths)),
        max_num_batched_tokens=max(plan.limits.max_num_batched_tokens, key.num_tokens),
        max_model_len=max(plan.limits.max_model_len, *(length for _, length in lengths)),
    )
    backend = load(plan.selection)(spec, device, limits)
    builder = backend.make_builder()
    window = _window(spec)
    num_bytes, num_operations = attention_work(spec, lengths, window)
    # The floor reads the prefix once, as a backend may.
    prefix_bytes, _ = attention_work(spec, [(0, prefix_len)], window)
    num_bytes -= (len(lengths) - 1) * prefix_bytes
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    num_copies = max(MIN_COPIES, 2 * l2_bytes // num_bytes + 1)
    inputs = make_inputs(spec, lengths, device, num_copies=num_copies, prefix_len=prefix_len)
    layer = AttentionLayer(index=0, scale=spec.head_size**-0.5, window=window)
    with torch.inference_mode():
        metadata = builder.build(inputs.common, key=key if on_gpu else None)
        calls = itertools.cycle([AttentionCall(layer, kv_cache, metadata) for kv_cache in inputs.kv_caches])
        # First, since `forward` reads the schedule.
        schedule_us = _time(lambda: backend.schedule(metadata), MIN_CALLS, on_gpu=on_gpu)
        inputs.out.fill_(float("nan"))
        us = _time(
            lambda: backend.forward(inputs.query, next(calls), inputs.out),
            num_copies * -(-MIN_CALLS // num_copies),
            on_gpu=on_gpu,
        )
    error = _error(backend.spec, layer, inputs)
    if not error <= LARGEST_ERROR:  # NaN is not
        raise PhonographError(f"it computes something else: its relative error is {error:.3g}")
    facts: dict[str, Any] = {
        "us": round(us, 2),
        "schedule_us": round(schedule_us, 2),
        "tb_s": round(num_bytes / us / 1e6, 3),
        "tflops": round(num_operations / us / 1e6, 1),
    }
    chip = this_chip(plan.device.kind)
    if chip is not None:
        floor = chip.seconds(num_bytes, num_operations) * 1e6
        facts |= {"floor_us": round(floor, 2), "x_floor": round(us / floor, 3)}
    return {**facts, "err": float(f"{error:.3g}"), "copies": num_copies, "graph": on_gpu}


def graph_key(lengths: Lengths) -> GraphKey:
    """Return the key of the graph in which an engine would run the batch, without padding."""
    query_lens = {query for query, _ in lengths}
    num_tokens = sum(query for query, _ in lengths)
    if len(query_lens) == 1 and max(query_lens) <= LONGEST_UNIFORM_QUERY:
        return GraphKey(GraphSet.DECODE, num_tokens, len(lengths), max(query_lens))
    return GraphKey(GraphSet.MIXED, num_tokens, len(lengths))


def make_inputs(
    spec: AttentionSpec, lengths: Lengths, device: torch.device, *, num_copies: int, prefix_len: int = 0
) -> AttentionInputs:
    """Draw random contents; each sequence has scattered blocks of its own after a prefix of shared blocks."""
    generator = torch.Generator(device).manual_seed(0)
    size, heads, kv_heads = spec.block_size, spec.num_query_heads, spec.num_kv_heads
    dtype: torch.dtype = getattr(torch, spec.dtype)
    query_lens = np.array([query for query, _ in lengths], np.int32)
    seq_lens = np.array([length for _, length in lengths], np.int32)
    num_shared = prefix_len // size
    num_private = -(-seq_lens // size) - num_shared
    scattered = np.random.default_rng(0).permutation(num_shared + int(num_private.sum())).astype(np.int32)
    block_table = np.zeros((len(lengths), num_shared + int(num_private.max())), np.int32)
    block_table[:, :num_shared] = scattered[:num_shared]
    for row, blocks in enumerate(np.split(scattered[num_shared:], np.cumsum(num_private)[:-1])):
        block_table[row, num_shared : num_shared + len(blocks)] = blocks
    num_tokens = int(query_lens.sum())
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_decodes = int((query_lens == 1).sum())
    common = CommonMetadata(
        num_reqs=len(lengths),
        num_decodes=num_decodes,
        num_tokens=num_tokens,
        num_decode_tokens=num_decodes,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc=torch.from_numpy(query_start_loc).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=torch.from_numpy(block_table).to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu=seq_lens,
    )
    caches = allocate_kv_caches(spec, num_layers=num_copies, num_blocks=len(scattered), device=device)
    caches[0].copy_(torch.randn(caches[0].shape, generator=generator, device=device, dtype=dtype))
    for other in caches[1:]:
        other.copy_(caches[0])
    rows = torch.randn(
        num_tokens, (heads + 2 * kv_heads) * spec.head_size, generator=generator, device=device, dtype=dtype
    )
    return AttentionInputs(
        common=common,
        query=rows[:, : heads * spec.head_size].unflatten(1, (heads, spec.head_size)),
        out=torch.empty(num_tokens, heads, spec.head_size, device=device, dtype=dtype),
        kv_caches=caches,
    )


def _time(call: Callable[[], None], count: int, *, on_gpu: bool) -> float:
    """Return the microseconds of a call: the median of replays of a graph of `count` calls, or of calls on a CPU."""
    if not on_gpu:
        call()
        seconds: list[float] = []
        for _ in range(REPLAYS):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles and loads
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        graph.replay()
        milliseconds: list[float] = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
    return statistics.median(milliseconds) / count * 1e3


def _error(spec: AttentionSpec, layer: AttentionLayer, inputs: AttentionInputs) -> float:
    """Return the relative error of the last rows of the first and the last sequence against float32."""
    common = inputs.common
    group = spec.num_query_heads // spec.num_kv_heads
    difference = norm = 0.0
    for row in {0, common.num_reqs - 1}:
        length, last = int(common.seq_lens_cpu[row]), int(common.query_start_loc_cpu[row + 1]) - 1
        blocks = common.block_table[row, : -(-length // spec.block_size)].long()
        first = max(0, length - 1 - layer.window[0]) if layer.window[0] >= 0 else 0
        keys, values = (
            cache[blocks].flatten(0, 1)[first:length].float().repeat_interleave(group, dim=1)
            for cache in inputs.kv_caches[0]
        )
        logits = torch.einsum("hd,lhd->hl", inputs.query[last].float(), keys) * layer.scale
        expected = torch.einsum("hl,lhd->hd", logits.softmax(-1), values)
        difference += float((inputs.out[last].float() - expected).square().sum())
        norm += float(expected.square().sum())
    return (difference / norm) ** 0.5


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Return the largest window of the layers."""
    unbounded = (UNBOUNDED, UNBOUNDED)
    return unbounded if unbounded in spec.windows else max(spec.windows)
