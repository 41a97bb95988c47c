"""Results over parts of the keys: packed for ranks, and merged, next to attention over all keys in float64."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.torch.attention.merge_parts import merge_parts, pack_parts

SIZES = [(2, 5, 4, 64, torch.float16), (3, 1, 7, 40, torch.float32), (4, 9, 1, 256, torch.float32)]


@pytest.mark.parametrize(("num_ranks", "num_tokens", "num_heads", "head_size", "dtype"), SIZES)
def test_each_rank_gets_the_results_of_its_heads(
    num_ranks: int, num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    found = torch.randn(num_tokens, num_ranks * num_heads, head_size).to(device, dtype)
    lse = torch.randn(num_ranks * num_heads, num_tokens, device=device)
    packed = pack_parts(found, lse, num_ranks)
    assert packed.shape == (num_ranks, num_tokens, num_heads, head_size + 1) and packed.is_contiguous()
    for rank, part in enumerate(packed):
        heads = slice(rank * num_heads, (rank + 1) * num_heads)
        assert torch.equal(part[..., :-1], found[:, heads].float())
        assert torch.equal(part[..., -1], lse[heads].t())


@pytest.mark.parametrize(("num_ranks", "num_tokens", "num_heads", "head_size", "dtype"), SIZES)
def test_merged_results_are_those_of_all_keys(
    num_ranks: int, num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """A rank without keys, tokens without any, NaN where there are no keys, and outputs that lie apart."""
    keys = 6
    scores = 9 * torch.randn(num_ranks + 1, num_tokens, num_heads, keys, dtype=torch.float64)
    values = torch.randn(num_ranks + 1, num_tokens, num_heads, keys, head_size).to(dtype).double()
    scores[1, :, 0], scores[-1, 0] = -torch.inf, -torch.inf
    if num_tokens > 2:
        scores[:, 2] = -torch.inf
    lse = scores.logsumexp(-1)
    outs = (scores.softmax(-1).unsqueeze(-1) * values).sum(-2)
    assert outs.isnan().any()
    weights = lse.softmax(0).unsqueeze(-1)
    wanted = (weights * outs.nan_to_num()).sum(0).nan_to_num()
    wanted_lse = lse.logsumexp(0).t()
    parts = torch.cat([outs[:-1], lse[:-1].unsqueeze(-1)], -1).float().to(device)
    own, own_lse = outs[-1].to(device, dtype), lse[-1].t().float().contiguous().to(device)
    memory = torch.full((num_tokens, num_heads, head_size + 8), torch.nan, dtype=dtype, device=device)
    out, got_lse = memory[..., :head_size], torch.full((num_heads, num_tokens), torch.nan, device=device)
    merge_parts(parts, out, got_lse, (own, own_lse))
    most = 2e-3 if dtype is torch.float16 else 1e-5
    assert (out.double().cpu() - wanted).norm() <= most * wanted.norm()
    assert memory[..., head_size:].isnan().all()
    torch.testing.assert_close(got_lse.double().cpu(), wanted_lse, rtol=1e-5, atol=1e-5)
    again = torch.full_like(out, torch.nan)
    merge_parts(parts, again, None, (own, own_lse))
    assert torch.equal(again, out)
