"""Random weights in MXFP4, as files have them, with transformers' reading of them."""

from __future__ import annotations

from unittest.mock import patch

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from phonograph.kernels.torch.grouped import Grouped
from phonograph.models.quantization import mxfp4
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme

TYPICAL = 119, 125
"""Exponents of scales from 2^-8 on."""


def random_file(*shape: int, exponents: tuple[int, int] = TYPICAL) -> dict[str, torch.Tensor]:
    """Return blocks and scales of weights [..., outputs, inputs], with scales of the exponents from one up to another.

    Exponents of 255 are not drawn.
    """
    *outer, inputs = shape
    blocks = torch.randint(0, 256, (*outer, inputs // 32, 16), dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(*exponents, (*outer, inputs // 32), dtype=torch.uint8)}


def meant(file: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weights [experts, outputs, inputs] as transformers reads them, in float64."""
    return convert_moe_packed_tensors(file["blocks"], file["scales"], dtype=dtype).transpose(1, 2).double()


def weight_for_gpu(file: dict[str, torch.Tensor], device: torch.device) -> Grouped:
    """Return the weights of all experts, one after another, in the order of a GPU on any device."""
    flat = {end: tensor.flatten(0, 1).to(device) for end, tensor in file.items()}
    outputs, groups = flat["scales"].shape

    def poisoned(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, -1, dtype=dtype, device=device)

    scheme = Mxfp4Scheme()
    with patch.object(mxfp4, "_in_order_of_gpu", lambda _: True):
        weight = scheme.allocate(outputs, groups * 32, poisoned)
    scheme.load("a module", flat, weight, 0)
    return weight.values
