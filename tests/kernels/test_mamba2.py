"""The scan of Mamba 2 by chunks against the recurrence of transformers, and its drift over a long answer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update

from phonograph.kernels.torch.state.mamba2 import scan


@pytest.mark.parametrize("decay", [1e-4, 1.0, 50.0])
def test_chunks_are_steps(decay: float) -> None:
    """Decays near 0 and 1, from a state that is not zero, in a last chunk that is not whole."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, keys, queries, time = drawn(2, 150, 3, 5), drawn(2, 150, 3, 7), drawn(2, 150, 3, 7), drawn(2, 150, 3).exp()
    rates, state = -decay * torch.tensor([0.5, 1.0, 2.0]), drawn(2, 3, 5, 7)
    wanted, after = [], state.clone()
    for token in range(150):
        times = time[:, token, :, None].expand(-1, -1, 5)
        inputs = x[:, token], times, rates[:, None, None].expand(-1, 5, 7), keys[:, token], queries[:, token]
        wanted.append(mamba2_selective_state_update(after, *inputs))
    got = scan(x, keys, queries, time, rates, state)
    torch.testing.assert_close(got, torch.stack(wanted, 1).view(got.shape), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("decay", "gates"), [(1e-6, "of 20"), (1.0, "drawn"), (20.0, "of 20")])
def test_a_long_answer_does_not_drift(decay: float, gates: str) -> None:
    """The state after 8,192 tokens one by one is that of one prefill; decays are near 1, between, and near 0."""
    generator = torch.Generator().manual_seed(1)
    x, keys, queries, gate = (torch.randn(1, 8192, 3, *size, generator=generator) for size in ((5,), (7,), (7,), ()))
    time, rates = functional.softplus(gate if gates == "drawn" else 20 * gate.sign()), torch.full((3,), -decay)
    states = torch.zeros(1, 3, 5, 7), torch.zeros(1, 3, 5, 7)
    tokens = zip(*(part.split(1, 1) for part in (x, keys, queries, time)), strict=True)
    stepped = torch.cat([scan(*token, rates, states[0]) for token in tokens], 1)
    whole = scan(x, keys, queries, time, rates, states[1])
    assert (states[0] - states[1]).norm() < 1e-4 * states[1].norm()
    assert (stepped - whole).norm() < 1e-4 * whole.norm()
