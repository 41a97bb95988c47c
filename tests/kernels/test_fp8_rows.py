"""Rows rounded to FP8 with a scale each: ragged widths, zeros, huge and tiny numbers, nothing written beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phonograph.kernels.fp8_activations import Fp8Rows, Rows
from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 100, 1008, 5000])
def test_rows(width: int, dtype: torch.dtype, device: torch.device) -> None:
    around = torch.full((7, width + 24), torch.nan, dtype=dtype)
    x = around[:, 8 : 8 + width]
    x.copy_(torch.randn(7, width, generator=torch.Generator().manual_seed(width)))
    x[1] = 0.0
    x[2] *= 1e4
    x[3] *= 1e-6
    x[4] *= torch.arange(width) % 5 == 0
    x[5, 0], x[5, -1] = 60000.0, -60000.0
    x = around.to(device)[:, 8 : 8 + width]
    memory = torch.full((9, width), 9, dtype=torch.uint8, device=device)
    out, scales = memory[1:-1].view(torch.float8_e4m3fn), torch.full((9, 1), torch.nan, device=device)
    quantize_rows(x, Fp8Rows(out, scales[1:-1]))
    assert bool((memory[0] == 9).all() & (memory[-1] == 9).all() & scales[[0, -1]].isnan().all())
    exact, scale = x.double(), scales[1:-1].double()
    wanted = exact.abs().amax(1, keepdim=True) / 448
    assert not out[1].float().any() and 0 < scale[1] < 1e-30
    scale[1] = wanted[1] = 1.0
    torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=0.0)
    # Three bits behind the point; the interpreter drops the carry where rounding fills them.
    limit = 1 / 16 if device.type == "cuda" else 0.51
    error = (out.double() * scale - exact).abs()
    assert bool((error <= 1.001 * limit * exact.abs() + scale * 2.0**-9).all())
    assert float(error.norm() / exact.norm()) < (0.03 if device.type == "cuda" else 0.2)
    assert out[5, [0, -1]].tolist() == [448.0, -448.0]


@pytest.mark.gpu
def test_rows_that_are_not_numbers(device: torch.device) -> None:
    """They stay so, in their row only. The interpreter converts them to numbers."""
    x = torch.ones(3, 40, dtype=torch.float16, device=device)
    x[0, 3], x[2, 5] = torch.nan, torch.inf
    out = torch.zeros(3, 40, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(3, 1, device=device)
    quantize_rows(x, Fp8Rows(out, scales))
    rows = out.float() * scales
    assert rows[0, 3].isnan() and not rows[2].isfinite().any()
    assert rows[1].sub(1).abs().max() < 1e-6


# The interpreter multiplies bfloat16 wrongly.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [48, 1000, pytest.param(14336, marks=pytest.mark.gpu)])
def test_norms_and_activation_round_their_results(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """As if their results were written in 16 bits and rounded by a kernel of their own."""
    generator = torch.Generator().manual_seed(width)
    x, hidden, table = (torch.randn(5, width, generator=generator).to(device, dtype) for _ in range(3))
    weight, ids = torch.rand(width, generator=generator).to(device, dtype), torch.tensor([4, 0, 0], device=device)
    gate_up = torch.randn(5, 2 * width, generator=generator).to(device, dtype)

    def results(out: Callable[[int], Rows]) -> list[tuple[Rows, torch.Tensor]]:
        kept, sums = torch.zeros_like(table[:3]), hidden.clone()
        embedded, normed, added, gated, gelu = out(3), out(5), out(5), out(5), out(5)
        layers.embed_and_norm(ids, table, weight, 1e-5, kept, embedded)
        layers.rms_norm(x, weight, 1e-5, normed)
        layers.add_and_norm(x, sums, weight, 1e-5, added)
        layers.silu_and_mul(gate_up, gated)
        layers.gelu_tanh_and_mul(gate_up, gelu)
        return [(embedded, kept), (normed, x), (added, sums), (gated, x), (gelu, x)]

    def room(rows: int) -> Fp8Rows:
        values = torch.zeros(rows, width, dtype=torch.float8_e4m3fn, device=device)
        return Fp8Rows(values, torch.full((rows, 1), torch.nan, device=device))

    apart = results(lambda rows: torch.full((rows, width), torch.nan, dtype=dtype, device=device))
    for (rounded, kept), (exact, wanted_kept) in zip(results(room), apart, strict=True):
        assert isinstance(rounded, Fp8Rows) and isinstance(exact, torch.Tensor)
        wanted = room(len(exact))
        quantize_rows(exact, wanted)
        assert torch.equal(rounded.values_MK.view(torch.uint8), wanted.values_MK.view(torch.uint8))
        assert torch.equal(rounded.scales_M1, wanted.scales_M1) and torch.equal(kept, wanted_kept)
        assert wanted.values_MK.float().abs().amax(1).eq(448).all()
