"""Queries that ranks share, and results of attention that they merge, over peer memory, in Triton's interpreter.

Ranks run one after another, on one memory.
"""

from __future__ import annotations

import pytest
import torch
from fake_peers import FakePeers
from far_memory import BORDER, far_tensor, last_programs

share_rows = pytest.importorskip("phonograph.kernels.triton.ranks.share_rows").share_rows
merge_heads = pytest.importorskip("phonograph.kernels.triton.ranks.merge_heads").merge_heads

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: tests/engine/test_gpu_ranks.py runs the kernels on two of them"
)
MAX_ROWS = 5
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32])


@pytest.fixture(autouse=True)
def bounded() -> None:
    """Ranks write into each other's memory, which no argument holds."""


@DTYPES
@pytest.mark.parametrize(("num_ranks", "width"), [(2, 64), (3, 40)])
def test_each_rank_gets_the_rows_of_all(num_ranks: int, width: int, dtype: torch.dtype) -> None:
    """Rows lie apart, as queries do between keys and values."""
    peers, generator = FakePeers(num_ranks, MAX_ROWS, width, dtype), torch.Generator().manual_seed(1)
    for rows in (2, 5, 1, 3, 4):
        parts = torch.randn(num_ranks, rows, width, generator=generator).to(dtype)
        parts[0, :, 0] = -0.0
        for rank in range(num_ranks):
            turns = peers.ranks[rank].counters[:rows].tolist()
            others = [other for other in range(num_ranks) if other != rank]
            peers.put(rank, {other: parts[other] for other in others}, turns)
            memory = torch.full((rows, width + 8), torch.nan, dtype=dtype)
            memory[:, :width] = parts[rank]
            out = torch.full((rows, num_ranks, width), torch.nan, dtype=dtype)
            share_rows(memory[:, :width], peers.ranks[rank], out)
            assert torch.equal(out, parts.transpose(0, 1))
            peers.check(rank, dict.fromkeys(others, parts[rank]), turns)
            assert peers.ranks[rank].counters[:rows].tolist() == [(turn + 1) % 3 for turn in turns]


@DTYPES
@pytest.mark.parametrize(("num_ranks", "num_heads", "head_size"), [(2, 4, 64), (3, 3, 40), (4, 1, 16)])
@pytest.mark.parametrize("has_own", [False, True])
def test_merged_heads_are_attention_to_all_keys(
    num_ranks: int, num_heads: int, head_size: int, has_own: bool, dtype: torch.dtype
) -> None:
    """A rank without keys for a token, a token without any, NaN where there are none, and outputs that lie apart."""
    generator, count = torch.Generator().manual_seed(2), num_ranks + has_own
    outputs = FakePeers(num_ranks, MAX_ROWS, num_heads * head_size, dtype)
    lses = FakePeers(num_ranks, MAX_ROWS, num_heads, torch.float32)
    for rows in (3, 5, 2, 4):
        # Scores of all heads, over the keys of each rank and over those of the step.
        shape = count, rows, num_ranks * num_heads
        scores = 9 * torch.randn(*shape, 6, generator=generator, dtype=torch.float64)
        values = torch.randn(*shape, 6, head_size, generator=generator).to(dtype).double()
        scores[1, 0], scores[:, 1] = -torch.inf, -torch.inf
        lse = scores.logsumexp(-1)
        found = (scores.softmax(-1).unsqueeze(-1) * values).sum(-2).to(dtype)
        weights = lse.softmax(0).unsqueeze(-1)
        wanted = (weights * found.double().nan_to_num()).sum(0).nan_to_num()
        wanted_lse = lse.logsumexp(0).T
        lse = lse.float()
        for rank in range(num_ranks):
            heads = slice(rank * num_heads, (rank + 1) * num_heads)
            others = [other for other in range(num_ranks) if other != rank]
            turns = outputs.ranks[rank].counters[:rows].tolist()
            outputs.put(rank, {other: found[other, :, heads].flatten(1) for other in others}, turns)
            lses.put(rank, {other: lse[other, :, heads] for other in others}, turns)
            memory = torch.full((rows, num_heads, head_size + 8), torch.nan, dtype=dtype)
            out, out_lse = memory[..., :head_size], torch.full((num_heads, rows), torch.nan)
            wide = torch.full((num_ranks * num_heads, rows + 3), torch.nan)
            wide[:, :rows] = lse[rank].T
            own = (found[-1, :, heads].contiguous(), lse[-1, :, heads].T.contiguous()) if has_own else None
            arguments = outputs.ranks[rank], lses.ranks[rank], out, out_lse, own
            merge_heads(found[rank].contiguous(), wide[:, :rows], *arguments)
            error = (out.double() - wanted[:, heads]).norm() / wanted[:, heads].norm()
            assert error < (2e-3 if dtype is torch.float16 else 1e-5)
            assert memory[..., head_size:].isnan().all() and (out[1] == 0).all()
            torch.testing.assert_close(out_lse.double(), wanted_lse[heads], rtol=1e-5, atol=1e-5)
            lses.check(
                rank,
                {other: lse[rank, :, slice(other * num_heads, (other + 1) * num_heads)] for other in others},
                turns,
            )
            assert outputs.ranks[rank].counters[:rows].tolist() == [(turn + 1) % 3 for turn in turns]


def test_rows_that_do_not_come_make_nan_and_end_later_spins() -> None:
    peers, x = FakePeers(2, MAX_ROWS, 64, torch.float32), torch.ones(2, 64)
    share_rows(x, peers.ranks[0], out := torch.zeros(2, 2, 64))
    assert out[:, 1].isnan().all() and (out[:, 0] == 1).all() and peers.ranks[0].limit.item() == 0
    outputs, lses = FakePeers(2, MAX_ROWS, 64, torch.float32), FakePeers(2, MAX_ROWS, 4, torch.float32)
    # The outputs alone came.
    outputs.put(0, {1: x}, [0, 0])
    merged = torch.zeros(2, 4, 16)
    merge_heads(torch.ones(2, 8, 16), torch.ones(8, 2), outputs.ranks[0], lses.ranks[0], merged, None)
    assert merged.isnan().all() and outputs.ranks[0].limit.item() == 0


def test_rows_far_behind_the_first_ones() -> None:
    """The last rows of a step of more than 2^31 numbers, in buffers of as many."""
    heads, size = 8, 128
    width = heads * size
    rows, dtype, device = BORDER // width + 2, torch.float16, torch.device("cpu")
    generator = torch.Generator().manual_seed(3)
    mine, theirs = torch.randn(2, 2, width, generator=generator).to(dtype)
    near = FakePeers(2, 2, width, dtype), FakePeers(2, 2, heads, torch.float32)

    def far_peers(width: int, dtype: torch.dtype) -> FakePeers:
        peers = FakePeers(2, 1, 8, dtype)
        own, other = (far_tensor(3, 2, rows, width, dtype=dtype, device=device) for _ in range(2))
        peers.own = [own, other]
        peers.ranks[0] = peers.ranks[0]._replace(
            own=own,
            offsets=torch.tensor([0, (other.data_ptr() - own.data_ptr()) // dtype.itemsize]),
            counters=torch.zeros(rows, dtype=torch.int32),
        )
        return peers

    far = far_peers(width, dtype), far_peers(heads, torch.float32)
    x, out = far_tensor(rows, width, dtype=dtype, device=device), far_tensor(rows, 2, width, dtype=dtype, device=device)
    x[-2:], far[0].own[0][0, 1, -2:] = mine, theirs
    with last_programs(2):
        share_rows(x, far[0].ranks[0], out)
    assert torch.equal(out[-2:], torch.stack([mine, theirs], 1)) and torch.equal(far[0].own[1][0, 0, -2:], mine)

    found, lse = torch.randn(2, 2, 2 * heads, size, generator=generator).to(dtype), torch.randn(2, 2 * heads, 2)
    wanted = torch.zeros(2, heads, size, dtype=dtype)
    near[0].put(0, {1: found[1, :, :heads].flatten(1)}, [0, 0])
    near[1].put(0, {1: lse[1, :heads].T}, [0, 0])
    merge_heads(found[0].contiguous(), lse[0], near[0].ranks[0], near[1].ranks[0], wanted, None)
    # The row has the part of the time after that of the shared queries.
    far[0].own[0][1, 1, -2:], far[1].own[0][1, 1, -2:] = found[1, :, :heads].flatten(1), lse[1, :heads].T
    far_found = far_tensor(rows, 2 * heads, size, dtype=dtype, device=device)
    far_lse = far_tensor(2 * heads, rows, dtype=torch.float32, device=device)
    far_found[-2:], far_lse[:, -2:] = found[0], lse[0]
    merged = far_tensor(rows, heads, size, dtype=dtype, device=device)
    with last_programs(2):
        merge_heads(far_found, far_lse, far[0].ranks[0], far[1].ranks[0], merged, None)
    assert wanted.any() and torch.equal(merged[-2:], wanted)
