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
    "blocks of values": (DeltaSizes(1, 2, 40, 72, by_head=False), 3),
}


class Problem:
    """Random inputs of a step, its rows, and the pools of states with NaN in places that no sequence reads."""

    def __init__(self, net: DeltaSizes, taps: int, num_tokens: int, places: int, dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.net, heads = net, net.value_heads
        self.projected = self.normal(num_tokens, net.channels + heads * net.value_size).to(dtype)
        self.gates = self.normal(num_tokens, 2 * heads).to(dtype)
        scale = 1 + 0.1 * self.normal(net.value_size)
        self.weights = self.normal(net.channels, taps), self.normal(heads), self.normal(heads), scale
        self.history = self.normal(places, taps - 1, net.channels).to(dtype)
        self.state = self.normal(places, heads, net.key_size, net.value_size)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def results(self, rows: list[torch.Tensor], device: torch.device, **known: bool) -> list[torch.Tensor]:
        """Return last inputs, states and outputs of the kernels."""
        out = self.projected.new_full((len(self.projected), self.net.value_heads * self.net.value_size), torch.nan)
        got = [tensor.to(device, copy=True) for tensor in (self.history, self.state, out)]
        scratch = out.new_full((len(out), sum(self.net.scratch_widths)), torch.nan).to(device)
        moved = [tensor.to(device) for tensor in (self.projected, self.gates, *self.weights, *rows)]
        triton_set.gated_delta(*moved, *got, self.net, EPS, scratch, **known)
        return got

    def check(self, rows: list[torch.Tensor], unread: list[int], device: torch.device, **known: bool) -> None:
        dtype = self.projected.dtype
        self.history[unread], self.state[unread] = torch.nan, torch.nan
        got = self.results(rows, device, **known)
        wanted = self.history.clone(), self.state.clone(), torch.full_like(got[2], torch.nan, device="cpu")
        inputs = self.projected, self.gates, *self.weights, *rows
        torch_set.gated_delta(*inputs, *wanted, self.net, torch.tensor(EPS))
        # Products of chunks round more than sums of steps do, but for float32.
        most = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}[dtype]
        for one, other in zip(got, wanted, strict=True):
            assert_near(one, other, most)
        assert not got[2][int(rows[0][-1]) :].any(), "padding is 0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NETS)
def test_steps_are_those_of_the_torch_set(name: str, batch: str, dtype: torch.dtype, device: torch.device) -> None:
    (net, taps), (queries, _, padding) = NETS[name], BATCHES[batch]
    problem = Problem(net, taps, sum(queries) + padding, PLACES, dtype, len(batch) + len(name))
    rows, unread = step_rows(batch, problem.generator)
    problem.check(rows, unread, device, single=batch == "single")
    if batch == "single":
        problem.check(rows, unread, device, single=True, early=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("order", ["by kind", "tiled", "by head"])
def test_a_convolution_within_the_step(order: str, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """All numbers are those of kernels that convolve before it; sequences start, and begin and end at checkpoints.

    On a GPU float32 may differ in the last bits, as products and sums are joined elsewhere.
    """
    generator = torch.Generator().manual_seed(count)
    net = DeltaSizes(3, 3 * count, 16, 80, by_head=order == "by head", tiled=order == "tiled")
    slots, num_tokens, num_rows, places = torch.randperm(16, generator=generator), 13, 16, 22
    starts = torch.arange(num_rows + 1).clamp_max(num_tokens)
    lens = torch.where(torch.arange(num_rows) < num_tokens, 1 + torch.arange(num_rows) % 3, 0)
    slots[4], checkpoints = -1, torch.full((3, num_rows), -1)
    # Rows without a token keep the places of an earlier step.
    checkpoints[0, [1, 2, 14]] = torch.tensor([16, 17, 18])
    checkpoints[1:, [0, 2, 15]] = torch.tensor([[19, 20, 21], [1, 3, 1]])
    rows = [one.to(torch.int32) for one in (starts, lens, slots, checkpoints)]
    problem = Problem(net, 4, num_rows, places, dtype, count)
    apart, within = (problem.results(rows, device, single=True, early=early) for early in (False, True))
    for one, other, before in zip(apart, within, (problem.history, problem.state, None), strict=True):
        if device.type == "cuda" and one.dtype is torch.float32:
            assert_near(one, other.cpu(), 1e-6)
        else:
            assert torch.equal(one, other)
        assert before is None or not torch.equal(one.cpu(), before)
    unread = [*slots[[0, 1, 2, 3, 6, 9, 12, 13, 14, 15]].tolist(), 18, 19, 20, 21]
    problem.check(rows, unread, device, single=True, early=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3])
def test_alike_keys(noise: float, dtype: torch.dtype, device: torch.device) -> None:
    """Each token replaces what the one before it wrote: rates are near 1, decays near 0, and keys are alike.

    The inverse of the system has terms of alternating signs then, and errors of one sign add up.
    """
    net = DeltaSizes(1, 2, 32, 32, by_head=False)
    problem = Problem(net, 2, 200, 3, dtype, 1)
    keys = problem.projected[:, 32:64]
    keys.copy_(keys[0].abs() + noise * keys)
    rates, times = problem.gates.split(2, 1)
    rates.fill_(7), times.fill_(-9)
    # Nor may the convolution change them from token to token.
    problem.weights[0].abs_(), problem.weights[2].zero_()
    rows = [torch.tensor(one, dtype=torch.int32) for one in ([0, 200], [230], [1])]
    problem.check([*rows, torch.tensor([[-1], [2], [30 + 77]], dtype=torch.int32)], [0, 2], device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", ["mixed", "single", "early"])
def test_many_sequences(batch: str, dtype: torch.dtype, device: torch.device) -> None:
    """Long ones lie between others, and there are more than a program has threads.

    Decodes that convolve within the step have larger blocks of values, which are a part of the head here.
    """
    num, single, size = 150, batch != "mixed", 16
    if batch == "early":
        num, size = 45, 128
    lengths = torch.randint(0, 4, (num,), generator=torch.Generator().manual_seed(1))
    queries = torch.tensor([0, 1, 17, 70])[lengths]
    if single:
        queries = (torch.arange(num) < num - 10).long()
    starts = torch.cat([torch.zeros(1), queries.cumsum(0)])
    contexts = torch.where(queries > 0, torch.arange(num) % 3, 0)
    problem = Problem(DeltaSizes(1, 1, size, size, by_head=False), 2, int(queries.sum()) + 3, num, dtype, 2)
    rows = [one.to(torch.int32) for one in (starts, contexts + queries, torch.arange(num).flip(0))]
    rows.append(torch.full((3, num), -1, dtype=torch.int32))
    problem.check(rows, [], device, single=single, early=batch == "early")


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
