"""Rows beyond 2^31 elements: of encoders, of ranks' parts of attention, and states; see `test_far_addresses`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from far_memory import BORDER, far_tensor, gpu_turn, last_programs

from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.kernels.triton.elementwise import encoder_rows
from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.kernels.triton.state.mamba2 import mamba2

WIDTH, EPS = 1024, 1e-5
TOKENS = BORDER // WIDTH + 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    with gpu_turn():
        yield torch.device(request.param)


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(device, torch.float16)


def test_rows_of_encoders(device: torch.device) -> None:
    torch.manual_seed(1)
    rows, weight = randn(2, WIDTH, device=device), randn(2, WIDTH, device=device)
    table, out = (far_tensor(TOKENS, WIDTH, dtype=rows.dtype, device=device) for _ in range(2))
    table[[0, -1]] = rows
    expected = torch.zeros_like(rows)
    encoder_rows.layer_norm(rows, weight, EPS, expected)
    with last_programs(2):
        encoder_rows.layer_norm(table, weight, EPS, out)
    assert expected.any() and torch.equal(out[-1], expected[1])

    got, last = torch.zeros_like(rows), torch.tensor([0, TOKENS - 1], device=device)
    encoder_rows.layer_norm(table, weight, EPS, got, rows_N=last)
    assert torch.equal(got, expected)
    places = torch.zeros(2, dtype=torch.int64, device=device)
    encoder_rows.embed(last.int(), places, table, None, None, weight, EPS, got.zero_())
    assert torch.equal(got, expected)
    encoder_rows.embed(torch.zeros_like(last, dtype=torch.int32), last, rows * 0, table, None, weight, EPS, got.zero_())
    assert torch.equal(got, expected)

    encoder_rows.activate(rows, expected, "gelu")
    with last_programs(2):
        encoder_rows.activate(table, out, "gelu")
    assert torch.equal(out[-1], expected[1])

    starts = torch.tensor([0, 1, TOKENS - 1, TOKENS], dtype=torch.int32, device=device)
    means = torch.zeros(3, WIDTH, device=device)
    with last_programs(1):
        encoder_rows.mean_rows(table, starts, means)
    assert torch.equal(means[2], rows[1].float())


@pytest.mark.parametrize("mixer", ["gated delta net", "Mamba 2"])
@pytest.mark.parametrize(("queries", "early"), [((530, 3), False), ((1, 3), False), ((1, 1), False), ((1, 1), True)])
def test_the_last_slots_of_a_large_pool(
    queries: tuple[int, int], early: bool, mixer: str, device: torch.device
) -> None:
    """States and last inputs of slots beyond the border, by steps, by chunks and by segments."""
    delta, mamba = DeltaSizes(1, 2, 16, 32, by_head=False), MambaSizes(2, 32, 1, 16)
    is_mamba, taps = mixer == "Mamba 2", 3
    net, heads = mamba if is_mamba else delta, 2
    shape, width = (heads, 32, 16) if is_mamba else (heads, 16, 32), heads * 32
    inputs, state_size = (taps - 1) * net.channels, heads * 16 * 32
    slots = max(BORDER // inputs, BORDER // state_size) + 3
    torch.manual_seed(1)
    tokens = sum(queries)
    projected = [randn(tokens, net.channels + width + heads * is_mamba, device=device)]
    if not is_mamba:
        projected.append(randn(tokens, 2 * heads, device=device))
    shapes = ((heads,),) * 3 + ((width,),) if is_mamba else ((heads,), (heads,), (32,))
    weights: list[Any] = [torch.randn(*one).to(device) for one in ((net.channels, taps), *shapes)]
    if is_mamba:
        weights.insert(1, None)
    starts = torch.tensor([0, queries[0], tokens], dtype=torch.int32, device=device)
    lens = torch.tensor([30, 9], dtype=torch.int32, device=device)
    before = randn(2, taps - 1, net.channels, device=device), torch.randn(2, *shape).to(device)
    mix: Any = mamba2 if is_mamba else functools.partial(gated_delta, early=early)

    def run(places: tuple[int, int], history: torch.Tensor, state: torch.Tensor) -> list[torch.Tensor]:
        at = torch.tensor(places, dtype=torch.int32, device=device)
        checkpoints = torch.full((3, 2), -1, dtype=torch.int32, device=device)
        out = torch.zeros(tokens, width, dtype=torch.float16, device=device)
        rows = starts, lens, at, checkpoints
        scratch = torch.empty(tokens, sum(net.scratch_widths), dtype=torch.float16, device=device)
        mix(*projected, *weights, *rows, history, state, out, net, EPS, scratch, single=queries == (1, 1))
        return [out, *(pool[list(places)].clone() for pool in (history, state))]

    expected = run((1, 0), *(pool.flip(0).contiguous() for pool in before))
    far = [far_tensor(slots, *pool.shape[1:], dtype=pool.dtype, device=device) for pool in before]
    for pool, numbers in zip(far, before, strict=True):
        pool[[slots - 1, slots - 2]] = numbers
    for one, other in zip(run((slots - 1, slots - 2), *far), expected, strict=True):
        assert one.any() and torch.equal(one, other)
