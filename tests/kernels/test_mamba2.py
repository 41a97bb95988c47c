"""Mamba 2: the scan against the recurrence of transformers, its drift, and kernels against the torch set."""

from __future__ import annotations

import pytest
import torch
from state_rows import BATCHES, PLACES, assert_near, step_rows
from torch.nn import functional
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update

from phonograph.kernels.torch.state import mamba2 as torch_set
from phonograph.kernels.torch.state.mamba2 import MambaSizes, scan
from phonograph.kernels.triton.state import mamba2 as triton_set

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
NETS = {
    "one group": (MambaSizes(4, 16, 1, 16), 4),
    "groups": (MambaSizes(6, 40, 2, 32, norm_groups=2), 4),
    "odd sizes": (MambaSizes(3, 20, 3, 10, norm_groups=3), 2),
    "wide keys": (MambaSizes(4, 80, 2, 256), 4),
}
ENDS = {
    "gates last": (MambaSizes(4, 24, 2, 16, norm_groups=2, gates_last=1), 4),
    "no norm": (MambaSizes(4, 24, 2, 16, norm_groups=0), 4),
}


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NETS)
def test_kernels_are_the_torch_set(name: str, batch: str, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of the projection lie apart, places that no sequence reads are NaN, and padding is 0."""
    (net, taps), (queries, _, padding) = (NETS | ENDS)[name], BATCHES[batch]
    generator = torch.Generator().manual_seed(len(batch) + len(name))

    def normal(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    num_tokens, width = sum(queries) + padding, net.inner + net.channels + net.heads
    memory = normal(num_tokens, width + 8, kind=dtype)
    memory[:, width:] = torch.nan
    bias = None if name == "one group" else normal(net.channels)
    norm = 1 + 0.1 * normal(net.inner) if net.norm_groups else None
    weights = normal(net.channels, taps), bias, *(normal(net.heads) for _ in range(3)), norm
    rows, unread = step_rows(batch, generator)
    history = normal(PLACES, taps - 1, net.channels, kind=dtype)
    state = normal(PLACES, net.heads, net.head_size, net.key_size)
    history[unread], state[unread] = torch.nan, torch.nan
    out = torch.full((num_tokens, net.inner), torch.nan, dtype=dtype)
    wanted = history.clone(), state.clone(), out.clone()
    torch_set.mamba2(memory[:, :width], *weights, *rows, *wanted, list(net), torch.tensor(EPS))
    got = [tensor.to(device) for tensor in (history, state, out)]
    inputs = [tensor if tensor is None else tensor.to(device) for tensor in (*weights, *rows)]
    scratch = torch.full((num_tokens, sum(net.scratch_widths)), torch.nan, dtype=dtype, device=device)
    triton_set.mamba2(memory.to(device)[:, :width], *inputs, *got, net, EPS, scratch, single=batch == "single")
    most = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other, most)
    assert not got[2][sum(queries) :].any(), "padding is 0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ENDS)
def test_ends_of_outputs(name: str, dtype: torch.dtype, device: torch.device) -> None:
    test_kernels_are_the_torch_set(name, next(iter(BATCHES)), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", ["mixed", "chunks", "long"])
@pytest.mark.parametrize("name", ["groups", "odd sizes", "wide keys"])
def test_segments_are_the_whole(
    name: str, batch: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences are cut whatever else is in the step; checkpoints lie within segments and between them."""
    monkeypatch.setattr(torch_set, "SEGMENT", 64)
    monkeypatch.setattr(triton_set, "SEGMENT", 64)
    monkeypatch.setattr(triton_set, "_CHUNK_PROGRAMS", 5000)
    test_kernels_are_the_torch_set(name, batch, dtype, device)


@pytest.mark.parametrize("batch", BATCHES)
def test_few_programs_scan_all(batch: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_set, "_STEP_PROGRAMS", 5)
    monkeypatch.setattr(triton_set, "_CHUNK_PROGRAMS", 3)
    test_kernels_are_the_torch_set("groups", batch, torch.float32, device)
