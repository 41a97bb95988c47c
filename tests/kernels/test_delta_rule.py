"""Gated delta rule in torch against transformers, in float32, and its drift over a long answer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from phonograph.kernels.torch.state.causal_conv import causal_conv
from phonograph.kernels.torch.state.delta_rule import delta_chunks, delta_steps

HEADS, KEY, VALUE = 3, 8, 5


def draw(num_tokens: int, decay: str, *, sequences: int = 2) -> list[torch.Tensor]:
    """Return queries and keys of norm 1, values, decays and rates, as a model makes them of gates."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(sequences, num_tokens, HEADS, *shape, generator=generator)

    q, k = (functional.normalize(normal(KEY), dim=-1) for _ in range(2))
    gate = normal()
    decays = {
        "all": -functional.softplus(4 * gate),
        "none": -1e-6 * gate.abs(),
        "whole": -20 - gate.abs(),
        "gates of 20": -functional.softplus(20 * gate.sign()),
    }
    rates = (20 * gate.sign() if decay == "gates of 20" else 2 * normal()).sigmoid()
    return [q, k, normal(VALUE), decays[decay], rates]


@pytest.mark.parametrize("decay", ["all", "none", "whole", "gates of 20"])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 130])
def test_steps_and_chunks_are_those_of_transformers(num_tokens: int, decay: str) -> None:
    q, k, v, decays, rates = draw(num_tokens, decay)
    before = torch.randn(2, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))
    wanted, after = torch_recurrent_gated_delta_rule(
        q, k, v, decays, rates, initial_state=before.clone(), output_final_state=True
    )
    for rule in (delta_steps, delta_chunks):
        state = before.clone()
        got = rule(q * KEY**-0.5, k, v, decays, rates, state)
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
        torch.testing.assert_close(state, after, rtol=0, atol=2e-5)


@pytest.mark.parametrize("decay", ["all", "none"])
def test_a_long_answer_does_not_drift(decay: str) -> None:
    """The state after 8,192 tokens one by one is that of one prefill."""
    drawn = draw(8192, decay, sequences=1)
    states = torch.zeros(1, HEADS, KEY, VALUE), torch.zeros(1, HEADS, KEY, VALUE)
    stepped, whole = (rule(*drawn, state) for rule, state in zip((delta_steps, delta_chunks), states, strict=True))
    assert (states[0] - states[1]).norm() < 1e-4 * states[1].norm()
    assert (stepped - whole).norm() < 1e-4 * whole.norm()


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution_in_parts(taps: int) -> None:
    x_NTC, taps_CW = torch.randn(2, 9, 5), torch.randn(5, taps)
    padded = functional.pad(x_NTC.transpose(1, 2), (taps - 1, 0))
    wanted = functional.conv1d(padded, taps_CW[:, None], groups=5).transpose(1, 2)
    history = torch.zeros(2, taps - 1, 5)
    parts = [causal_conv(part, history, taps_CW) for part in x_NTC.split([1, 3, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)
    assert torch.equal(history, x_NTC[:, -(taps - 1) :])
