"""Times sums of rows over two GPUs in CUDA graphs: over peer memory, with residual and norm, and by NCCL.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python benchmarks/sum_over_ranks.py --output FILE

A graph has several sums, one after another, as those of a step's layers. The time is that of rank 0, per sum. Errors
are relative to a sum in float32. The crossover of the columns is the table of kernels/triton/ranks/choose_sum.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from bench.result_files import output_file, write_result
from phonograph.bench.records.record import provenance
from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks
from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CALLS = 32
REPLAYS = 20
EPS = 1e-5


def graph_us(ranks: PeerRanks, call: Callable[[], object]) -> float:
    """Return the microseconds of a call in a graph of several, on a stream of its own."""
    # Sums follow one another on one stream.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            call()
        graph.capture_end()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        ranks.agree("")
        for _ in range(3):
            graph.replay()
        stream.synchronize()
        ranks.agree("")
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        stream.synchronize()
    ranks.agree("")
    return begin.elapsed_time(end) * 1e3 / REPLAYS / CALLS


def measure(ranks: PeerRanks, rows: int, width: int) -> dict[str, Any]:
    """Return times and errors of sums of some rows."""
    generator = torch.Generator("cuda").manual_seed(ranks.rank)
    part = torch.randn(rows, width, device="cuda", generator=generator).bfloat16()
    whole = part.float()
    NcclRanks.sum(ranks, whole)
    hidden, weight = torch.zeros_like(part), torch.ones(width, dtype=part.dtype, device="cuda")
    out, x = torch.empty_like(part), part.clone()
    ranks.sum(x)
    error = float((x.float() - whole).norm() / whole.norm())
    # Sums of sums would overflow in time.
    x.zero_()
    times = {
        "nccl_us": graph_us(ranks, lambda: NcclRanks.sum(ranks, x)),
        "peer_us": graph_us(ranks, lambda: ranks.sum(x)),
        "peer_norm_us": graph_us(ranks, lambda: ranks.add_and_norm(x, hidden, weight, EPS, out, 1.0)),
    }
    kib = rows * width * part.element_size() / 1024
    return {"rows": rows, "kib": kib, **{name: round(us, 2) for name, us in times.items()}, "error": error}


def run_rank(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Measure all rows on a rank; rank 0 prints and writes them."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    settings = {"width": args.width, "dtype": torch.bfloat16, "max_rows": max(args.rows), "in_parts": False}
    ranks = PeerRanks(Path(folder), rank, args.ranks, device, **settings)
    if ranks.sums_by_nccl:
        raise SystemExit(ranks.notes[0])
    origin, found = provenance(), list[dict[str, Any]]()
    for rows in args.rows:
        with torch.inference_mode():
            found.append(measure(ranks, rows, args.width))
        if rank == 0:
            print(json.dumps(found[-1]), flush=True)
    if rank == 0 and args.output is not None:
        write_result(args.output, origin, {"ranks": args.ranks, "width": args.width, "sums": found})


def main() -> None:
    """Run the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--output", type=output_file)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, args=(folder, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
