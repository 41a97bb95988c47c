"""Random weights in quantized formats, and their products in float64, which kernels are compared with.

Shapes: M rows, N or O outputs, K or I inputs, G groups of inputs, W words of 32 bits of an output's weights.
"""

from __future__ import annotations

import math

import torch

from phonograph.kernels.torch.grouped import Grouped, dequantize

DTYPE = torch.bfloat16
"""Type of activations, results and scales of groups."""
FP8 = torch.float8_e4m3fn
GROUP = 128
_LARGEST_FP8 = 448


def int4_weight(outputs: int, inputs: int, generator: torch.Generator) -> Grouped:
    """Quantize random numbers as GPTQ stores them: a scale for each group of inputs, and a zero of 8."""
    values_OGI = torch.randn(outputs, inputs // GROUP, GROUP, generator=generator, device=generator.device)
    scales_OG = (values_OGI.abs().amax(2) / 7).to(DTYPE)
    codes_OGI = (values_OGI / scales_OG.float().unsqueeze(2)).round_().add_(8).clamp_(0, 15).to(torch.int32)
    return Grouped(pack(codes_OGI.flatten(1)), _by_group(scales_OG), None, 4, GROUP)


def fp8_weight(outputs: int, inputs: int, generator: torch.Generator) -> Grouped:
    """Round random numbers to FP8, with a scale for each output."""
    values_OI = torch.randn(outputs, inputs, generator=generator, device=generator.device)
    values, scales_O1 = round_to_fp8(values_OI)
    return Grouped(values, _by_group(scales_O1), None, 8, inputs)


def round_to_fp8(values_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in FP8, and the scale [M, 1] of each."""
    scales_M1 = values_MK.float().abs().amax(1, keepdim=True) / _LARGEST_FP8
    return (values_MK / scales_M1).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(FP8), scales_M1


def pack(codes_OI: torch.Tensor) -> torch.Tensor:
    """Return words [O, I / 8] of values of 4 bits, lowest bits first."""
    codes_OW8 = codes_OI.unflatten(1, (-1, 8))
    words_OW = torch.zeros_like(codes_OW8[..., 0])
    for place in range(8):
        words_OW |= codes_OW8[..., place] << (4 * place)
    return words_OW


def reference(x_MK: torch.Tensor, weight: Grouped, step: int = 4096) -> torch.Tensor:
    """Return x @ weight^T in float64, for which `step` outputs are written out at a time."""
    wide_MK, exact = x_MK.double(), weight._replace(scales_OG=weight.scales_OG.double())
    firsts = range(0, weight.packed_OW.shape[0], step)
    return torch.cat([wide_MK @ dequantize(exact.rows(first, first + step)).t() for first in firsts], 1)


def largest_error(result_MN: torch.Tensor, expected_MN: torch.Tensor) -> float:
    """Return the largest error of a row, or inf if there is none."""
    errors_M = (result_MN.double() - expected_MN).norm(dim=1) / expected_MN.norm(dim=1)
    return float(errors_M.nan_to_num(math.inf).max())


def marlin_scales(scales_OG: torch.Tensor) -> torch.Tensor:
    """Return scales [G, O] in Marlin's order: each 64 outputs as a transposed matrix of 8 x 8."""
    return scales_OG.t().unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1).contiguous()


def _by_group(scales_OG: torch.Tensor) -> torch.Tensor:
    """Return the scales with those of a group side by side in memory, as layers on a GPU have them."""
    return scales_OG.t().contiguous().t()
