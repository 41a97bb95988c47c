"""Sums over ranks by peer memory, in Triton's interpreter: ranks run one after another, on one memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_peers import FakePeers, peer_buffers
from far_memory import BORDER, far_tensor, last_programs

sum_rows = pytest.importorskip("phonograph.kernels.triton.ranks.sum_rows")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: tests/engine/test_gpu_ranks.py runs the kernel on two of them"
)
MAX_ROWS = 5
EPS = 1e-5


@pytest.fixture(autouse=True)
def bounded() -> None:
    """Ranks write into each other's memory, which no argument holds."""


class Peers(FakePeers):
    """Buffers of sums."""

    def __init__(self, num_ranks: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(num_ranks, MAX_ROWS, width, dtype)

    def run(self, rank: int, parts: list[torch.Tensor], **arguments: Any) -> torch.Tensor:
        """Run the kernel of a rank on its part."""
        counters = self.ranks[rank].counters[: len(parts[rank])]
        turns = counters.tolist()
        others = [other for other in range(len(parts)) if other != rank]
        self.put(rank, {other: parts[other] for other in others}, turns)
        x_TE = parts[rank].clone()
        sum_rows.sum_rows(x_TE, self.ranks[rank], **arguments)
        self.check(rank, dict.fromkeys(others, parts[rank]), turns)
        assert counters.tolist() == [(turn + 1) % 3 for turn in turns]
        return x_TE


def draw(num_ranks: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(num_ranks)]
    # A part of -0.0 is no missing one.
    parts[0][:, 0] = -0.0
    return parts


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_ranks", "width"), [(2, 64), (4, 48)])
def test_rows_are_summed_in_the_order_of_the_ranks_at_each_turn(num_ranks: int, width: int, dtype: torch.dtype) -> None:
    peers = Peers(num_ranks, width, dtype)
    # Rows take their turns one by one, as sums have unlike numbers of them.
    for seed, rows in enumerate([2, 5, 1, 1, 4, 5, 3]):
        parts = draw(num_ranks, rows, width, dtype, seed)
        expected = sum_in_order(parts).to(dtype)
        for rank in range(num_ranks):
            assert torch.equal(peers.run(rank, parts), expected)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_stream_gets_the_sum_and_the_next_product_its_norm(factor: float) -> None:
    dtype, width, rows = torch.float16, 64, 3
    peers, parts = Peers(2, width, dtype), draw(2, rows, width, dtype, 7)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    expected = (hidden.float() + factor * sum_in_order(parts)).to(dtype)
    wide = expected.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    for rank in range(2):
        stream, out = hidden.clone(), torch.zeros_like(hidden)
        left = peers.run(rank, parts, hidden_TE=stream, factor=factor, weight_E=weight, eps=EPS, normed=out)
        assert torch.equal(left, parts[rank]) and torch.equal(stream, expected)
        torch.testing.assert_close(out.double(), normed, rtol=2e-3, atol=2e-3)


def test_a_part_that_does_not_come_makes_nan_and_ends_later_spins() -> None:
    peers = Peers(2, 64, torch.float32)
    x_TE = torch.ones(2, 64)
    sum_rows.sum_rows(x_TE, peers.ranks[0])
    assert x_TE.isnan().all() and peers.ranks[0].limit.item() == 0


def test_buffers_take_rows_of_their_width_and_type_only() -> None:
    buffers = Peers(2, 64, torch.float16).ranks[0]
    assert buffers.take(torch.zeros(MAX_ROWS, 64, dtype=torch.float16))
    for shape, dtype in (((1, 32), torch.float16), ((1, 64), torch.float32), ((2, 1, 64), torch.float16)):
        assert not buffers.take(torch.zeros(shape, dtype=dtype))


def test_rows_far_behind_the_first_ones() -> None:
    """The last rows of a step of more than 2^31 numbers, in buffers of as many."""
    width = 1024
    rows, dtype, device = BORDER // width + 2, torch.float16, torch.device("cpu")
    own, other = (far_tensor(peer_buffers.PARTS, 2, rows, width, dtype=dtype, device=device) for _ in range(2))
    x_TE, hidden_TE = (far_tensor(rows, width, dtype=dtype, device=device) for _ in range(2))
    mine, theirs = torch.randn(2, 2, width).to(dtype)
    x_TE[-2:], own[0, 1, -2:] = mine, theirs
    buffers = peer_buffers.PeerBuffers(
        own=own,
        offsets=torch.tensor([0, (other.data_ptr() - own.data_ptr()) // 2]),
        counters=torch.zeros(rows, dtype=torch.int32),
        limit=torch.tensor([3], dtype=torch.int32),
        rank=0,
    )
    with last_programs(2):
        sum_rows.sum_rows(x_TE, buffers, hidden_TE)
    assert torch.equal(hidden_TE[-2:], (mine.float() + theirs.float()).to(dtype))
    assert torch.equal(other[0, 0, -2:], mine) and own[2, 1, -1].signbit().all()
