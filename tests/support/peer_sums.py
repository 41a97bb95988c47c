"""Exchanges over peer memory on two GPUs against the same by NCCL, on processes of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import torch
from torch import multiprocessing

from phonograph.kernels.torch.attention.merge_parts import merge_parts, pack_parts
from phonograph.kernels.triton.ranks.nccl_ranks import NcclRanks
from phonograph.kernels.triton.ranks.peer_ranks import PeerRanks

WIDTH, MAX_ROWS, GRAPHS, REPLAYS, EPS = 1536, 64, 12, 40, 1e-5
HEADS, SIZE = 4, 128


class Exchange(NamedTuple):
    """Inputs and results of all exchanges of a number of rows.

    Attributes:
        part: rows of the stream; their sum goes to `plain` and `hidden`, and its norm to `normed`.
        query: heads of this rank; those of both go to `shared`.
        found: results of attention for the heads of both ranks, with `lse`; merged ones go to `out`.
    """

    part: torch.Tensor
    plain: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor
    query: torch.Tensor
    shared: torch.Tensor
    found: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor

    @classmethod
    def make(cls, rows: int) -> Exchange:
        def halves(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")

        stream = [halves(rows, WIDTH) for _ in range(4)]
        heads = halves(rows, HEADS, SIZE), halves(rows, 2 * HEADS, SIZE), halves(rows, 2 * HEADS, SIZE)
        return cls(*stream, *heads, torch.zeros(2 * HEADS, rows, device="cuda"), halves(rows, HEADS, SIZE))

    def run(self, ranks: PeerRanks, weight: torch.Tensor) -> None:
        self.plain.copy_(self.part)
        ranks.sum(self.plain)
        ranks.share(self.query, self.shared)
        self.hidden.zero_()
        ranks.add_and_norm(self.part, self.hidden, weight, EPS, self.normed, 1.0)
        assert ranks.merge_heads(self.found, self.lse, self.out, None, None)

    def draw(self, generator: torch.Generator) -> None:
        for one in (self.part, self.query, self.found, self.lse):
            one.normal_(generator=generator)
        self.lse[:, ::3] = -torch.inf

    def check(self, ranks: PeerRanks, weight: torch.Tensor) -> None:
        whole = self.part.float()
        NcclRanks.sum(ranks, whole)
        expected = whole.bfloat16()
        assert torch.equal(self.plain, expected) and torch.equal(self.hidden, expected)
        x = expected.double()
        x *= (x.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
        torch.testing.assert_close(self.normed.double(), x, rtol=0.01, atol=1e-3)
        shared, merged = torch.empty_like(self.shared), torch.empty_like(self.out)
        NcclRanks.share(ranks, self.query, shared)
        assert torch.equal(self.shared, shared)
        sent = pack_parts(self.found, self.lse, 2)
        parts = torch.empty_like(sent)
        NcclRanks.exchange(ranks, sent, parts)
        merge_parts(parts, merged, None)
        torch.testing.assert_close(self.out.double(), merged.double(), rtol=0.01, atol=1e-3)


def check_sums(folder: Path) -> None:
    """Run random exchanges in graphs that replay in a random order; raises if a rank finds another result."""
    multiprocessing.spawn(_run_rank, args=(str(folder),), nprocs=2)


def _run_rank(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    settings = {"width": WIDTH, "dtype": torch.bfloat16, "max_rows": MAX_ROWS, "in_parts": False}
    ranks = PeerRanks(Path(folder), rank, 2, device, **settings, neighbours=2, heads=(HEADS, SIZE))
    assert not ranks.sums_by_nccl, ranks.notes
    order, generator = random.Random(0), torch.Generator(device).manual_seed(rank)
    weight, stream = torch.rand(WIDTH, device=device).bfloat16(), torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs: list[tuple[torch.cuda.CUDAGraph, Exchange]] = []
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(GRAPHS):
            exchange = Exchange.make(order.randint(1, MAX_ROWS))
            exchange.run(ranks, weight)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            exchange.run(ranks, weight)
            graph.capture_end()
            graphs.append((graph, exchange))
        for _ in range(REPLAYS * GRAPHS):
            graph, exchange = order.choice(graphs)
            exchange.draw(generator)
            graph.replay()
            exchange.check(ranks, weight)
