"""Random weights in MXFP4, as files have them, with transformers' reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import Mxfp4Config
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


def make_file(folder: Path, inner: int = 32, **settings: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint of gpt-oss whose experts are in MXFP4; return its tensors with what they mean."""
    make_checkpoint("gpt_oss", folder, intermediate_size=inner)
    tensors = load_file(folder / "model.safetensors")
    whole = dict(tensors)
    for layer in range(3):
        for name, outputs, inputs in (("gate_up_proj", 2 * inner, 64), ("down_proj", 64, inner)):
            module = f"model.layers.{layer}.mlp.experts.{name}"
            file = random_file(6, outputs, inputs)
            del tensors[module]
            tensors |= {f"{module}_{end}": tensor for end, tensor in file.items()}
            whole[module] = meant(file).float().transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    written = json.loads(Mxfp4Config(**settings).to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": written}))
    return whole


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
