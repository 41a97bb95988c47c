"""Times mixers with a state in CUDA graphs: decodes and prompts of one layer, beside the time to move their states.

    python benchmarks/state_mixers.py --output FILE

Layers have the sizes of public models, random inputs and bfloat16 activations. Each sequence has a slot of its own, so
that the states of many lie outside the L2 cache. The floor is the bytes of the states, read and written once, at
4.3 TB/s. Kernels start early as in an engine, so that decodes read states while the call before writes them: outputs
are not looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import triton.testing
from rich.console import Console
from rich.table import Table

from bench.result_files import output_file, write_result
from phonograph.bench.records.record import provenance
from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.kernels.triton.state.mamba2 import mamba2

NETS: dict[str, MambaSizes | DeltaSizes] = {
    "Granite 4 H Small": MambaSizes(128, 64, 1, 128),
    "Nemotron 3 Nano": MambaSizes(64, 64, 8, 128, norm_groups=8),
    "Qwen3.6 35B-A3B": DeltaSizes(16, 32, 128, 128, by_head=False),
}
STEPS = ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 512), (1, 2048), (1, 8192), (8, 1024))
"""Sequences of a step, and tokens of each."""
TAPS, EPS, BANDWIDTH, CALLS = 4, 1e-5, 4.3e12, 10


def normal(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(kind)


def layer_of(net: MambaSizes | DeltaSizes, num_seqs: int, length: int) -> tuple[Callable[[], None], int]:
    """Return the launches of a layer on new random inputs, and the bytes of the states."""
    tokens, wide = num_seqs * length, torch.float32
    columns = torch.arange(num_seqs + 1) * length, torch.full((num_seqs,), 100 + length), torch.randperm(num_seqs)
    rows = [one.to("cuda", torch.int32) for one in (*columns, torch.full((3, num_seqs), -1))]
    history = normal(num_seqs, TAPS - 1, net.channels)
    taps = normal(net.channels, TAPS, kind=wide)
    if isinstance(net, MambaSizes):
        heads, inner = net.heads, net.inner
        state = normal(num_seqs, heads, net.head_size, net.key_size, kind=wide)
        weights = normal(net.channels, kind=wide), *(normal(heads, kind=wide) for _ in range(3))
        inputs = normal(tokens, inner + net.channels + heads), taps, *weights, normal(inner, kind=wide)
        kernel: Callable[..., None] = mamba2
    else:
        heads, inner = net.value_heads, net.value_heads * net.value_size
        state = normal(num_seqs, heads, net.key_size, net.value_size, kind=wide)
        weights = normal(heads, kind=wide), normal(heads, kind=wide), normal(net.value_size, kind=wide)
        widths = [net.channels + inner, 2 * heads]
        inputs = *normal(tokens, sum(widths)).split(widths, 1), taps, *weights
        kernel = gated_delta
    out, scratch = normal(tokens, inner), normal(tokens, sum(net.scratch_widths))
    args = *inputs, *rows, history, state, out, net, EPS, scratch
    known = {"early": True} if isinstance(net, DeltaSizes) else {}
    return lambda: kernel(*args, single=length == 1, **known), state.nbytes


def kernel_us(call: Callable[[], None]) -> dict[str, float]:
    """Return the microseconds of each kernel of the launches, from a profiler's trace of some."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return {row.key: round(row.self_device_time_total / CALLS, 1) for row in trace.key_averages()}


def measure(net: MambaSizes | DeltaSizes, num_seqs: int, length: int) -> dict[str, Any]:
    call, num_bytes = layer_of(net, num_seqs, length)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        time_ms: Any = triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")
    floor_us = 2 * num_bytes / BANDWIDTH * 1e6
    return {"us": time_ms * 1e3 / CALLS, "floor_us": floor_us, "kernel_us": kernel_us(call)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=output_file, required=True, help="file of the result")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    table = Table("layer", "sequences", "tokens of each", "us", "us to move the states", "us of kernels")
    for name, net in NETS.items():
        for num_seqs, length in STEPS:
            row: dict[str, Any] = {"layer": name, "seqs": num_seqs, "tokens": length}
            row |= measure(net, num_seqs, length)
            rows.append(row)
            parts = ", ".join(f"{kernel} {us}" for kernel, us in row["kernel_us"].items())
            table.add_row(name, str(num_seqs), str(length), f"{row['us']:.1f}", f"{row['floor_us']:.1f}", parts)
    write_result(arguments.output, provenance(), {"rows": rows})
    Console().print(table)


if __name__ == "__main__":
    main()
