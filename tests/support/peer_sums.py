"""Sums over ranks on two GPUs against sums by NCCL in float32, on processes of their own."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import multiprocessing

from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks
from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks

WIDTH, MAX_ROWS, GRAPHS, REPLAYS, EPS = 1536, 64, 12, 40, 1e-5


def check_sums(folder: Path) -> None:
    """Run random sums in graphs that replay in a random order; raises if a rank finds another result."""
    multiprocessing.spawn(_run_rank, args=(str(folder),), nprocs=2)


def _run_rank(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    settings = {"width": WIDTH, "dtype": torch.bfloat16, "max_rows": MAX_ROWS, "in_parts": False}
    ranks = PeerRanks(Path(folder), rank, 2, device, **settings)
    assert not ranks.sums_by_nccl, ranks.notes
    order, generator = random.Random(0), torch.Generator(device).manual_seed(rank)
    weight, stream = torch.rand(WIDTH, device=device).bfloat16(), torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(GRAPHS):
            part = torch.zeros(order.randint(1, MAX_ROWS), WIDTH, dtype=torch.bfloat16, device=device)
            plain, hidden, normed = part.clone(), part.clone(), part.clone()

            def run(
                part: torch.Tensor = part,
                plain: torch.Tensor = plain,
                hidden: torch.Tensor = hidden,
                normed: torch.Tensor = normed,
            ) -> None:
                plain.copy_(part)
                ranks.sum(plain)
                hidden.zero_()
                ranks.add_and_norm(part, hidden, weight, EPS, normed, 1.0)

            run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            run()
            graph.capture_end()
            graphs.append((graph, part, plain, hidden, normed))
        for _ in range(REPLAYS * GRAPHS):
            graph, part, plain, hidden, normed = order.choice(graphs)
            part.normal_(generator=generator)
            graph.replay()
            whole = part.float()
            NcclRanks.sum(ranks, whole)
            expected = whole.bfloat16()
            assert torch.equal(plain, expected) and torch.equal(hidden, expected)
            x = expected.double()
            x *= (x.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
            torch.testing.assert_close(normed.double(), x, rtol=0.01, atol=1e-3)
