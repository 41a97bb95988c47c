"""The decoder's tensor functions against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from phonograph.kernels.torch.layers import rms_norm, rope, silu_and_mul

SHAPES = [(1, 2), (3, 64), (17, 5, 26), (130, 96)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm(shape: tuple[int, ...], scale: float) -> None:
    x = torch.randn(shape) * scale
    weight = torch.rand(shape[-1]) + 0.5
    eps = 1e-5
    kept = x.clone()
    actual = rms_norm(x, weight, torch.tensor(eps))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept)


def test_rms_norm_with_a_weight_for_each_head() -> None:
    x, weight = torch.randn(7, 3, 16), torch.rand(3, 16) + 0.5
    actual = rms_norm(x[:, :2], weight[:2], torch.tensor(1e-6))
    for head in range(2):
        expected = rms_norm(x[:, head], weight[head], torch.tensor(1e-6))
        torch.testing.assert_close(actual[:, head], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_in_half_precision_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(33, 96).to(dtype) * 30
    with torch.no_grad():
        actual, expected = rms_norm(x, norm.weight, torch.tensor(1e-6)), norm(x)
    assert actual.dtype == dtype
    # The float32 inside may differ in its last bit, which moves a few roundings by one unit.
    assert (actual != expected).float().mean() < 0.01
    torch.testing.assert_close(actual, expected)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), torch.tensor(1e-6)), torch.zeros(2, 8))


@pytest.mark.parametrize(("tokens", "heads", "head_size"), [(1, 1, 2), (9, 6, 26), (33, 3, 64)])
def test_rope(tokens: int, heads: int, head_size: int) -> None:
    x = torch.randn(tokens, heads + 2, head_size)[:, :heads]
    kept = x.clone()
    angles = torch.rand(tokens, head_size // 2, dtype=torch.float64) * 100
    actual = rope(x, angles.cos().float()[:, None, None], angles.sin().float()[:, None])
    # The formula's other form: pairs as complex numbers, turned by their angle.
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    exact = torch.cat([pairs.real, pairs.imag], -1)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)
    assert actual.is_contiguous()
    assert torch.equal(x, kept)


def test_rope_follows_transformers() -> None:
    x, angles = torch.randn(11, 4, 32), torch.rand(11, 16) * 100
    cos, sin = angles.cos().repeat(1, 2)[None], angles.sin().repeat(1, 2)[None]
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rope(x, angles.cos()[:, None, None], angles.sin()[:, None]), expected[0])


@pytest.mark.parametrize(("tokens", "size"), [(1, 3), (20, 88)])
def test_silu_and_mul(tokens: int, size: int) -> None:
    gate_up = torch.randn(tokens, 2 * size) * 4
    kept = gate_up.clone()
    gate, up = gate_up.double()[:, :size], gate_up.double()[:, size:]
    torch.testing.assert_close(silu_and_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)
    assert torch.equal(gate_up, kept)
