"""The cut of a batch at its common prefix, and the merge of both sides, against their definitions."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch

from phonograph.kernels.cascade_tensors import PrefixCut
from phonograph.kernels.torch.attention import cascade as in_torch

pytest.importorskip("triton")

from phonograph.kernels.triton.attention import cascade as in_triton

KERNELS = pytest.mark.parametrize("kernels", [in_triton, in_torch], ids=["triton", "torch"])


@KERNELS
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("max_seqs", "max_blocks"), [(1, 3), (9, 40), (5, 2600)])
def test_cut(kernels: ModuleType, max_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
    rng = np.random.default_rng(max_blocks + block_size)
    cut = PrefixCut.make(max_seqs, max_blocks, device)
    for _ in range(6):
        num_seqs, num_slots = sorted(int(count) for count in rng.integers(1, max_seqs + 1, 2))
        prefix_blocks = int(rng.integers(0, max_blocks))
        prefix_len = prefix_blocks * block_size
        seq_lens = np.zeros(num_slots, np.int32)
        seq_lens[:num_seqs] = rng.integers(prefix_len + 1, max_blocks * block_size + 1, num_seqs)
        seq_lens[0] = max_blocks * block_size  # to the last entry of its table
        starts = np.minimum(np.arange(num_slots + 1), num_seqs).astype(np.int32)
        table = rng.integers(0, 10_000, (num_slots, max_blocks + int(rng.integers(0, 3)))).astype(np.int32)
        for tensor in (cut.prefix_starts[1:], cut.prefix_lens, cut.suffix_lens, cut.suffix_table):
            tensor.fill_(-7)
        inputs = (
            torch.from_numpy(array).to(device) for array in (np.array([prefix_len], np.int32), starts, seq_lens, table)
        )
        kernels.cut_prefix(cut, *inputs, block_size=block_size)
        assert cut.prefix_starts.tolist() == [0, num_seqs] and cut.prefix_lens.tolist() == [prefix_len]
        suffix_lens = [length and length - prefix_len for length in seq_lens.tolist()]
        assert cut.suffix_lens[:num_slots].tolist() == suffix_lens
        assert bool((cut.suffix_lens[num_slots:] == -7).all() and (cut.suffix_table[num_slots:] == -7).all())
        for row, length in enumerate(suffix_lens):
            count = -(-length // block_size)
            expected = table[row, prefix_blocks : prefix_blocks + count].tolist()
            assert cut.suffix_table[row, :count].tolist() == expected


def sides(tokens: int, heads: int, size: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return outputs [T, H, D] and LSEs [H, T] over two random sets of keys in float64, and over both together."""
    generator = torch.Generator().manual_seed(seed)
    # Of very unlike weights, so that either side may be nearly nothing.
    spread = 8.0 * torch.randn(heads, tokens, 1, generator=generator, dtype=torch.float64)
    logits = [torch.randn(heads, tokens, keys, generator=generator, dtype=torch.float64) for keys in (5, 7)]
    values = [torch.randn(heads, keys, size, generator=generator, dtype=torch.float64) for keys in (5, 7)]
    logits[0] += spread
    found = []
    for scores, value in [*zip(logits, values, strict=True), (torch.cat(logits, 2), torch.cat(values, 1))]:
        found.append((torch.einsum("htl,hld->thd", scores.softmax(2), value), scores.logsumexp(2)))
    return found


@KERNELS
@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "dtype", "tolerance"),
    [
        (5, 4, 32, torch.float32, 2e-6),
        (1, 7, 72, torch.float32, 2e-6),
        (3, 40, 128, torch.float16, 1e-3),
        (2, 3, 256, torch.float16, 1e-3),
    ],
)
def test_merge(
    kernels: ModuleType,
    tokens: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    tolerance: float,
    with_lse: bool,
    device: torch.device,
) -> None:
    prefix, suffix, both = sides(tokens, heads, size, tokens * heads)
    # Outputs are slices of wider rows, as a workspace's may be; LSEs too. Two rows belong to no request.
    rows = torch.full((tokens + 2, heads + 1, size), math.nan, dtype=dtype, device=device)
    wide_prefix = rows.clone()
    out, prefix_out = rows[:, :heads], wide_prefix[:, :heads]
    out[:tokens], prefix_out[:tokens] = suffix[0].to(device, dtype), prefix[0].to(device, dtype)
    wide = torch.full((3, heads, tokens + 5), math.nan, device=device)
    prefix_lse, suffix_lse, lse = wide[:, :, : tokens + 2]
    prefix_lse[:, :tokens], suffix_lse[:, :tokens] = prefix[1].to(device), suffix[1].to(device)
    end = torch.tensor([tokens], dtype=torch.int32, device=device)
    kernels.merge_by_lse(prefix_out, prefix_lse, out, suffix_lse, end, lse if with_lse else None)
    assert float((out[:tokens].cpu().double() - both[0]).abs().max()) < tolerance * float(both[0].abs().max())
    assert bool((out[tokens:] == 0).all()), "rows of no request"
    assert bool(rows[:, heads:].isnan().all() and wide[:, :, tokens + 2 :].isnan().all())
    if with_lse:
        assert float((lse[:, :tokens].cpu().double() - both[1]).abs().max()) < 1e-5
        assert bool((lse[:, tokens:] == -math.inf).all())


def rows(count: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32, device=device)


@KERNELS
def test_a_side_without_keys_is_not_read(kernels: ModuleType, device: torch.device) -> None:
    """Rows: both sides, no prefix, no suffix, neither (padding); what has no keys holds NaN."""
    nothing = -math.inf
    prefix = torch.tensor([1.0, math.nan, 3.0, math.nan], device=device)[:, None, None].expand(4, 2, 16).contiguous()
    out = torch.tensor([5.0, 7.0, math.nan, math.nan], device=device)[:, None, None].expand(4, 2, 16).contiguous()
    prefix_lse = torch.tensor([0.5, nothing, -3.0, nothing], device=device).expand(2, 4).contiguous()
    suffix_lse = torch.tensor([0.5, 2.0, nothing, nothing], device=device).expand(2, 4).contiguous()
    lse = torch.full((2, 4), math.nan, device=device)
    kernels.merge_by_lse(prefix, prefix_lse, out, suffix_lse, rows(4, device), lse)
    assert out.unique(dim=1).unique(dim=2).flatten().tolist() == pytest.approx([3.0, 7.0, 3.0, 0.0])
    assert lse[0].tolist() == pytest.approx([0.5 + math.log(2.0), 2.0, -3.0, nothing])


def test_the_other_sign_of_no_keys(device: torch.device) -> None:
    """FlashAttention 2 has an LSE of +inf where a row has no keys."""
    prefix = torch.full((2, 1, 16), math.nan, device=device)
    out = torch.full((2, 1, 16), 4.0, device=device)
    lse = torch.full((1, 2), math.nan, device=device)
    suffix_lse = torch.tensor([[1.0, math.inf]], device=device)
    prefix_lse = torch.full((1, 2), math.inf, device=device)
    in_triton.merge_by_lse(prefix, prefix_lse, out, suffix_lse, rows(2, device), lse)
    assert out[0].unique().tolist() == [4.0] and out[1].unique().tolist() == [0.0]
    assert lse.tolist() == [[1.0, -math.inf]]


@KERNELS
def test_nan_stays_nan(kernels: ModuleType, device: torch.device) -> None:
    """So that verification sees it."""
    good = torch.ones(1, 1, 16, device=device)
    none = torch.zeros(1, 1, device=device)
    out = torch.full((1, 1, 16), math.nan, device=device)
    kernels.merge_by_lse(good, none, out, none, rows(1, device))
    assert bool(out.isnan().all())
    out = torch.ones(1, 1, 16, device=device)
    kernels.merge_by_lse(good, torch.full((1, 1), math.nan, device=device), out, none, rows(1, device))
    assert bool(out.isnan().all())
