"""The oracle itself, against torch's attention in float64 and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phonograph.attention.backend import AttentionLayer
from phonograph.testing.oracle import dense_attention


def layer(**changes: object) -> AttentionLayer:
    return AttentionLayer(**{"index": 0, "scale": 0.25, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("queries", "length"), [(5, 5), (1, 9), (4, 11)])
@pytest.mark.parametrize(
    ("window", "causal"), [((-1, -1), True), ((-1, -1), False), ((3, 0), True), ((2, 1), False), ((-1, 2), False)]
)
def test_against_torch_with_a_mask_and_alibi(queries: int, length: int, window: tuple[int, int], causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (
        torch.randn(count, heads, 8, dtype=torch.float64, generator=generator)
        for count, heads in ((queries, 6), (length, 2), (length, 2))
    )
    slopes = torch.rand(6, generator=generator)
    distance = torch.arange(length) - torch.arange(length - queries, length)[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance <= 0
    if window[0] >= 0:
        visible &= distance >= -window[0]
    if window[1] >= 0:
        visible &= distance <= window[1]
    bias = slopes.double()[:, None, None] * distance
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=bias.masked_fill(~visible, -torch.inf),
        scale=0.25,
        enable_gqa=True,
    )
    out, _ = dense_attention(
        query.numpy(), keys.numpy(), values.numpy(), layer(window=window, alibi_slopes=slopes), causal=causal
    )
    np.testing.assert_allclose(out, expected.transpose(0, 1).numpy(), atol=1e-12)


def test_softcap_sink_and_lse_by_hand() -> None:
    query, keys = np.array([[[2.0]]]), np.array([[[1.0]], [[3.0]]])
    values = np.array([[[10.0]], [[20.0]]])
    logits = [4.0 * math.tanh(0.5 * 2.0 * key / 4.0) for key in (1.0, 3.0)]
    total = sum(math.exp(logit) for logit in logits) + math.exp(0.5)
    out, lse = dense_attention(
        query, keys, values, layer(scale=0.5, softcap=4.0, sinks=torch.tensor([0.5])), causal=True
    )
    assert out.item() == pytest.approx((10 * math.exp(logits[0]) + 20 * math.exp(logits[1])) / total)
    assert lse.item() == pytest.approx(math.log(total))


def test_a_query_without_visible_keys() -> None:
    query, keys = np.ones((5, 1, 2)), np.ones((3, 1, 2))
    out, lse = dense_attention(query, keys, 5 * keys, layer(), causal=True)
    assert out[:, 0, 0].tolist() == pytest.approx([0.0, 0.0, 5.0, 5.0, 5.0])
    assert lse[0, :2].tolist() == [-math.inf, -math.inf]
    _, lse = dense_attention(query, keys, 5 * keys, layer(sinks=torch.tensor([0.75])), causal=True)
    assert lse[0, :2].tolist() == [0.75, 0.75]
