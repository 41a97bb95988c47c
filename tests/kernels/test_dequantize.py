"""Quantized weights that a kernel writes out, beside torch's operators: odd sizes, over poisoned memory."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.torch.grouped import Grouped, dequantize, interleave
from phonograph.kernels.triton.gemm.dequantize import dequantize_into


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_writing_out(bits: int, zeros: bool, ordered: bool, device: torch.device) -> None:
    outputs, inputs, group = 37, 1100, 48
    groups = -(-inputs // group)
    words = -(-groups * group * bits // 32)
    packed = torch.randint(-(2**31), 2**31, (outputs, words), dtype=torch.int32)
    scales = torch.randn(outputs, groups).half()
    zeros_OG = torch.randint(0, 1 << bits, (outputs, groups), dtype=torch.uint8) if zeros else None
    weight = Grouped(packed, scales, zeros_OG, bits, group)
    order = torch.randperm(inputs) if ordered else torch.arange(inputs)
    wanted = torch.empty(outputs, inputs)
    wanted[:, order] = dequantize(weight._replace(scales_OG=scales.float()))[:, :inputs]
    there = Grouped(packed.to(device), scales.to(device), None, bits, group, order.to(device) if ordered else None)
    if zeros_OG is not None:
        there = there._replace(zeros_OG=zeros_OG.to(device))
    out = torch.full((outputs, inputs), torch.nan, dtype=torch.float16, device=device)
    dequantize_into(there, out)
    assert torch.equal(out.cpu(), wanted.half())


def test_interleaved(device: torch.device) -> None:
    packed = torch.randint(-(2**31), 2**31, (37, 48), dtype=torch.int32)
    scales = torch.randn(37, 3).half()
    wanted = dequantize(Grouped(packed, scales, None, 4, 128))[:, :300]
    there = Grouped(interleave(packed).to(device), scales.to(device), None, 4, 128, interleaved=True)
    out = torch.full((37, 300), torch.nan, dtype=torch.float16, device=device)
    dequantize_into(there, out)
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal(dequantize(there).cpu()[:, :300], wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_offsets(bits: int, device: torch.device) -> None:
    """Groups of 16 with an offset. A GPU rounds the product and the sum at once."""
    outputs, groups, group = 11, 37, 16
    packed = torch.randint(-(2**31), 2**31, (outputs, groups * group * bits // 32), dtype=torch.int32)
    scales, offsets = torch.randn(2, outputs, groups).half()
    weight = Grouped(packed, scales.float(), None, bits, group, offsets_OG=offsets.float())
    wanted = dequantize(weight).half()
    there = Grouped(packed.to(device), scales.to(device), None, bits, group, offsets_OG=offsets.to(device))
    out = torch.full_like(wanted, torch.nan, device=device)
    dequantize_into(there, out)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("bits", "group"), [(4, 20), (8, 10)])
def test_words_of_two_groups(bits: int, group: int, device: torch.device) -> None:
    """A group that is no multiple of a word's values ends inside a word."""
    outputs, groups = 11, 6
    packed = torch.randint(-(2**31), 2**31, (outputs, -(-groups * group * bits // 32)), dtype=torch.int32)
    zeros = torch.randint(0, 1 << bits, (outputs, groups), dtype=torch.uint8)
    weight = Grouped(packed, torch.randn(outputs, groups).half(), zeros, bits, group)
    wanted = dequantize(weight._replace(scales_OG=weight.scales_OG.float()))[:, : groups * group].half()
    there = weight._replace(packed_OW=packed.to(device), scales_OG=weight.scales_OG.to(device))
    there = there._replace(zeros_OG=zeros.to(device))
    out = torch.full((outputs, groups * group), torch.nan, dtype=torch.float16, device=device)
    dequantize_into(there, out)
    assert torch.equal(out.cpu(), wanted)
