"""Kernels of a gated delta net against the torch set: ragged batches, slots, checkpoints, and places left alone."""

from __future__ import annotations

import pytest
import torch
from state_rows import BATCHES, PLACES, assert_near, step_rows

from phonograph.kernels.torch.state import gated_delta as torch_set
from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.triton.elementwise.gate_heads import gate_heads
from phonograph.kernels.triton.state import gated_delta as triton_set

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
NETS = {
    "by kind": (DeltaSizes(2, 4, 16, 16, by_head=False), 4),
    "tiled": (DeltaSizes(2, 6, 16, 16, by_head=False, tiled=True), 4),
    "by head": (DeltaSizes(2, 6, 16, 16, by_head=True), 3),
    "odd sizes": (DeltaSizes(1, 3, 10, 20, by_head=True), 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NETS)
def test_steps_are_those_of_the_torch_set(name: str, batch: str, dtype: torch.dtype, device: torch.device) -> None:
    (net, taps), (queries, _, padding) = NETS[name], BATCHES[batch]
    generator = torch.Generator().manual_seed(len(batch) + len(name))

    def normal(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    num_tokens, heads = sum(queries) + padding, net.value_heads
    projected = normal(num_tokens, net.channels + heads * net.value_size, kind=dtype)
    gates = normal(num_tokens, 2 * heads, kind=dtype)
    weights = normal(net.channels, taps), normal(heads), normal(heads), 1 + 0.1 * normal(net.value_size)
    rows, unread = step_rows(batch, generator)
    history = normal(PLACES, taps - 1, net.channels, kind=dtype)
    state = normal(PLACES, heads, net.key_size, net.value_size)
    history[unread], state[unread] = torch.nan, torch.nan
    out = torch.full((num_tokens, heads * net.value_size), torch.nan, dtype=dtype)
    wanted = history.clone(), state.clone(), out.clone()
    torch_set.gated_delta(projected, gates, *weights, *rows, *wanted, net, torch.tensor(EPS))
    got = [tensor.to(device) for tensor in (history, state, out)]
    inputs = (tensor.to(device) for tensor in (projected, gates, *weights, *rows))
    scratch = torch.full((num_tokens, sum(net.scratch_widths)), torch.nan, dtype=dtype, device=device)
    triton_set.gated_delta(*inputs, *got, net, EPS, scratch)
    # Products of chunks round more than sums of steps do, but for float32.
    most = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}[dtype]
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other, most)
    assert not got[2][sum(queries) :].any(), "padding is 0"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_attention(dtype: torch.dtype, device: torch.device) -> None:
    """Rows lie apart, and what follows the gates in a row is not read."""
    heads, size, num_tokens = 3, 40, 5
    projected, memory = (torch.randn(num_tokens, width).to(device, dtype) for width in (2 * heads * size + 24, 200))
    projected[:, 2 * heads * size :] = torch.nan
    out = memory[:, : heads * size]
    gates = projected[:, : 2 * heads * size].double().view(num_tokens, heads, 2, size)[:, :, 1].flatten(1)
    wanted = out.double() * gates.sigmoid()
    rest = memory[:, heads * size :].clone()
    gate_heads(out, projected, size)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)
    assert torch.equal(memory[:, heads * size :], rest)
