"""Kernels of a short convolution against the torch set; ragged batches, slots and checkpoints."""

from __future__ import annotations

import pytest
import torch
from state_rows import BATCHES, PLACES, assert_near, step_rows

from phonograph.kernels.torch.state import gated_conv as torch_set
from phonograph.kernels.triton.state import causal_conv as triton_set

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("channels", "taps", "has_bias"), [(20, 3, False), (200, 2, True), (128, 4, False)])
def test_steps_are_those_of_the_torch_set(
    channels: int, taps: int, has_bias: bool, batch: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of the projection lie apart, places that no sequence reads are NaN, and padding is 0."""
    queries, _, padding = BATCHES[batch]
    generator = torch.Generator().manual_seed(channels + len(batch))
    num_tokens = sum(queries) + padding

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    memory, weights = normal(num_tokens, 3 * channels + 8), normal(channels, taps).float()
    memory[:, 3 * channels :] = torch.nan
    bias = normal(channels).float() if has_bias else None
    rows, unread = step_rows(batch, generator)
    history, out = normal(PLACES, taps - 1, channels), torch.full((num_tokens, channels), torch.nan, dtype=dtype)
    history[unread] = torch.nan
    wanted = history.clone(), out.clone()
    torch_set.short_conv(memory[:, : 3 * channels], weights, bias, *rows, *wanted)
    got = [tensor.to(device) for tensor in (history, out)]
    inputs = [tensor if tensor is None else tensor.to(device) for tensor in (weights, bias, *rows)]
    triton_set.short_conv(memory.to(device)[:, : 3 * channels], *inputs, *got, single=batch == "single")
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other, {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype])
    assert not got[1][sum(queries) :].any() and not got[1].isnan().any()
